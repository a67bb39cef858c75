"""Twice the examples in one update: it cannot be told here, whatever the speed. That needs a quality run."""

import torch
import torch.nn.functional as F
from torch import nn

from labkit.audit import probe

invariant = "large-batch"  # the batch changes: nothing here can adopt that
base_microbatches, more = probe(50, accumulation=4), probe(50, accumulation=4, seed=1)
candidate_microbatches = [
    tuple(map(torch.cat, zip(*pair, strict=True))) for pair in zip(base_microbatches, more, strict=True)
]


def loss_sum(model, microbatch):
    """The loss summed over valid tokens, and their number."""
    tokens, labels = microbatch
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="sum"), (labels[:, 1:] != -100).sum()


def base():
    """The model and its step, the same for both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(microbatches):
        N = sum((labels[:, 1:] != -100).sum() for _, labels in microbatches)
        for microbatch in microbatches:
            (loss_sum(model, microbatch)[0] / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


candidate = base
