"""Imported by the server that forks the ranks, and by nothing else, after all that ranks share."""

import gc

import labkit.workers._group
import labkit.workers._names
import labkit.workers._rank  # noqa: F401

gc.collect()
gc.freeze()  # a rank's collector then never writes to what it shares with the server
