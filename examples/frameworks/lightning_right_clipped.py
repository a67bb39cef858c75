"""The right one, with gradient clipping on."""

from lightning_right import Right, fitted, loss_sum, microbatches, windows


def build():
    """A fresh model and its step."""
    model = Right()
    return model, fitted(model, gradient_clip_val=0.1)
