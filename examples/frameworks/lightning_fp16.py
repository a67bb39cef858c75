"""Lightning with precision 16-mixed."""

from lit import Module, fitted
from tiny import loss_sum, window

microbatches, windows = window(), 2


def build():
    """A fresh model and its step."""
    model = Module()
    return model, fitted(model, precision="16-mixed")
