"""Data parallel: several real processes, one gradient, and what it takes for that to be the full batch's."""

from labkit.data_parallel.clock import timeline as timeline
from labkit.data_parallel.compare import recipes as recipes
from labkit.data_parallel.death import killed as killed
from labkit.data_parallel.edges import empty_rank as empty_rank
from labkit.data_parallel.edges import uneven as uneven
from labkit.data_parallel.shards import fsdp as fsdp
from labkit.data_parallel.skips import overflow as overflow
from labkit.data_parallel.sync import buckets as buckets
from labkit.data_parallel.sync import collectives as collectives
from labkit.data_parallel.wire import allreduce as allreduce
from labkit.data_parallel.wire import allreduce_seconds as allreduce_seconds
