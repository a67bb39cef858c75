"""A Trainer as it comes, with a GPT-2."""

from tiny import gpt2, loss_sum, trained, window

microbatches, windows = window(), 2


def build():
    """A fresh model and its step."""
    model = gpt2()
    return model, trained(model)
