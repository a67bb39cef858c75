"""Exercises: a function that a learner wrote goes in, a sentence on what it really does, with its number, comes out."""

from labkit.check.accumulation import accumulate, token_mean
from labkit.check.audit import audited, probe
from labkit.check.batch import global_batch, plan
from labkit.check.cadence import adam_ratio, step
from labkit.check.clipping import clipped_step, next_scale
from labkit.check.memory import accumulate_memory, training_bytes
from labkit.check.noise import noise_scale, scaled_rate
from labkit.check.normalization import frozen, momentum, pooled_variance
from labkit.check.packing import block_mask, targets
from labkit.check.roofline import intensity

__all__ = [
    "accumulate",
    "accumulate_memory",
    "adam_ratio",
    "audited",
    "block_mask",
    "clipped_step",
    "frozen",
    "global_batch",
    "intensity",
    "momentum",
    "next_scale",
    "noise_scale",
    "plan",
    "pooled_variance",
    "probe",
    "scaled_rate",
    "step",
    "targets",
    "token_mean",
    "training_bytes",
]
