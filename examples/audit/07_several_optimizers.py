"""Two optimizers, each for its own layer; called twice, to see what is left over."""

import torch
import torch.nn.functional as F
from torch import nn

from labkit.audit import probe

microbatches = probe(50, accumulation=4)  # (tokens, labels) of a vocabulary of 50


def loss_sum(model, microbatch):
    """The loss summed over valid tokens, and their number."""
    tokens, labels = microbatch
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="sum"), (labels[:, 1:] != -100).sum()


windows = 2


def build():
    """A fresh model and its step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[1].parameters(), lr=1e-3)]

    def step(microbatches):
        N = sum((labels[:, 1:] != -100).sum() for _, labels in microbatches)
        for microbatch in microbatches:
            (loss_sum(model, microbatch)[0] / N).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        # instead: optimizers[0].zero_grad()  # stale-gradient

    return model, step
