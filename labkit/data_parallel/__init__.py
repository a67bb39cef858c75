"""Data parallel: several real processes, one gradient, and when it equals the full-batch gradient."""

from labkit.data_parallel.allreduce_time import allreduce as allreduce
from labkit.data_parallel.allreduce_time import allreduce_seconds as allreduce_seconds
from labkit.data_parallel.compare import recipes as recipes
from labkit.data_parallel.killed_rank import killed as killed
from labkit.data_parallel.no_sync import buckets as buckets
from labkit.data_parallel.no_sync import collectives as collectives
from labkit.data_parallel.overflow_on_one_rank import overflow as overflow
from labkit.data_parallel.sharding import fsdp as fsdp
from labkit.data_parallel.step_timeline import timeline as timeline
from labkit.data_parallel.uneven_ranks import empty_rank as empty_rank
from labkit.data_parallel.uneven_ranks import uneven as uneven
