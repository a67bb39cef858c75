"""Lightning as it comes, with gradient clipping on."""

from lit import Module, fitted
from tiny import loss_sum, window

microbatches, windows = window(), 2


def build():
    """A fresh model and its step."""
    model = Module()
    return model, fitted(model, gradient_clip_val=0.1)
