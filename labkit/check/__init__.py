"""Exercises: a function that a learner wrote goes in, a sentence on what it really does, with its number, comes out."""

from labkit.check.accumulation import accumulate
from labkit.check.audit import audited, probe
from labkit.check.batch import global_batch, plan
from labkit.check.cadence import adam_ratio, step
from labkit.check.clipping import clipped_step, next_scale
from labkit.check.memory import accumulate_memory, training_bytes
from labkit.check.noise import noise_scale, scaled_rate
from labkit.check.normalization import frozen, momentum, pooled_variance
from labkit.check.packing import block_mask, targets
from labkit.check.roofline import intensity, matmul_time
from labkit.check.tokens import token_mean, token_weight
from labkit.check.verdict import counted

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
    "matmul_time",
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
    "token_weight",
    "training_bytes",
]

globals().update({name: counted(globals()[name]) for name in __all__})  # what is passed here is kept as progress
