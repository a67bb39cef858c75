"""Exercises: a function that a learner wrote goes in, a sentence on what it really does, with its number, comes out."""

from labkit.check.acceptance import acceptance
from labkit.check.accumulation import accumulate
from labkit.check.audit import audited, probe
from labkit.check.batch import global_batch, plan
from labkit.check.cadence import adam_ratio, step
from labkit.check.casebook import diagnosis, repaired
from labkit.check.clipping import clipped_step, next_scale
from labkit.check.data_parallel import ddp_loss, no_sync
from labkit.check.memory import accumulate_memory, training_bytes
from labkit.check.noise import noise_scale, scaled_rate
from labkit.check.normalization import frozen, momentum, pooled_variance
from labkit.check.packing import block_mask, targets
from labkit.check.pipeline import bubble, pipeline_loss
from labkit.check.roofline import intensity, matmul_time
from labkit.check.throughput import tokens_per_second, train_step
from labkit.check.tokens import token_mean, token_weight
from labkit.check.verdict import counted

__all__ = [
    "acceptance",
    "accumulate",
    "accumulate_memory",
    "adam_ratio",
    "audited",
    "block_mask",
    "bubble",
    "clipped_step",
    "ddp_loss",
    "diagnosis",
    "frozen",
    "global_batch",
    "intensity",
    "matmul_time",
    "momentum",
    "next_scale",
    "no_sync",
    "noise_scale",
    "pipeline_loss",
    "plan",
    "pooled_variance",
    "probe",
    "repaired",
    "scaled_rate",
    "step",
    "targets",
    "token_mean",
    "token_weight",
    "tokens_per_second",
    "train_step",
    "training_bytes",
]

globals().update({name: counted(globals()[name]) for name in __all__})  # what is passed here is kept as progress
