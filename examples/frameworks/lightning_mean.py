"""Lightning with accumulate_grad_batches, and a training_step as everybody writes it."""

import torch

from lit import Module, fitted
from tiny import loss_sum, window

microbatches, windows = window(), 2


def build():
    """A fresh model and its step."""
    model = Module(torch.float64)
    return model, fitted(model, precision="64-true")
