"""A tail window: three microbatches, where the training accumulates four."""

import torch
import torch.nn.functional as F
from torch import nn

from labkit.audit import probe

microbatches = probe(50, accumulation=3)


def loss_sum(model, microbatch):
    """The loss summed over valid tokens, and their number."""
    tokens, labels = microbatch
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="sum"), (labels[:, 1:] != -100).sum()


K, windows = 4, 2


def build():
    """A fresh model and its step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(microbatches):
        N = sum((labels[:, 1:] != -100).sum() for _, labels in microbatches)
        for microbatch in microbatches:
            loss = loss_sum(model, microbatch)[0] / N
            # instead: loss, n = loss_sum(model, microbatch); loss = loss / n / K  # tail-divided-by-k
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step
