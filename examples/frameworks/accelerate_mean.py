"""Accelerate's accumulate(), as its documentation has it."""

from accelerated import build
from tiny import loss_sum, window

microbatches, windows = window(), 2
