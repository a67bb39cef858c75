"""Means instead of sums, one pass over the labels less: rejected, since it weighs short documents more."""

import torch
import torch.nn.functional as F
from torch import nn

from labkit.audit import probe

invariant = "systems"
microbatches = probe(50, accumulation=4)


def loss_sum(model, microbatch):
    """The loss summed over valid tokens, and their number."""
    tokens, labels = microbatch
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="sum"), (labels[:, 1:] != -100).sum()


def made(means):
    """A model and its step, with means or with sums."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(microbatches):
        N = sum((labels[:, 1:] != -100).sum() for _, labels in microbatches)
        for microbatch in microbatches:
            loss, n = loss_sum(model, microbatch)
            (loss / n / len(microbatches) if means else loss / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def base():
    """The step that is there."""
    return made(means=False)


def candidate():
    """The step that may take its place."""
    return made(means=True)
