"""A Trainer in bfloat16."""

from tiny import llama, loss_sum, trained, window

microbatches, windows = window(), 2


def build():
    """A fresh model and its step."""
    model = llama()
    return model, trained(model, bf16=True)
