"""The tail window: three microbatches, where accelerate accumulates four."""

from accelerated import build
from tiny import loss_sum, window

microbatches, windows = window(3), 2
