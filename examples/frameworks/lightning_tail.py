"""Lightning on the tail window: three microbatches, where it accumulates four."""

from lightning_mean import build
from tiny import loss_sum, window

microbatches, windows = window(3), 2
