"""Accelerate in bfloat16."""

import accelerated
from tiny import loss_sum, window

microbatches, windows = window(), 2


def build():
    """A fresh model and its step."""
    return accelerated.build(mixed_precision="bf16", max_norm=0.1)
