"""A Trainer on the tail window of an epoch: three microbatches, where it accumulates four."""

from tiny import llama, loss_sum, trained, window

microbatches, windows = window(3), 2


def build():
    """A fresh model and its step."""
    model = llama()
    return model, trained(model)
