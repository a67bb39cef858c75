"""Exercises: a function that a learner wrote goes in, a sentence on what it really does, with its number, comes out."""

from labkit.check.accumulation import accumulate, token_mean
from labkit.check.batch import global_batch, plan
from labkit.check.cadence import adam_ratio, step
from labkit.check.clipping import clipped_step, next_scale
from labkit.check.memory import accumulate_memory, training_bytes
from labkit.check.normalization import frozen, momentum, pooled_variance
from labkit.check.roofline import intensity

__all__ = [
    "accumulate",
    "accumulate_memory",
    "adam_ratio",
    "clipped_step",
    "frozen",
    "global_batch",
    "intensity",
    "momentum",
    "next_scale",
    "plan",
    "pooled_variance",
    "step",
    "token_mean",
    "training_bytes",
]
