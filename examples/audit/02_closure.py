"""The whole window inside the optimizer's closure."""

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


def build():
    """A fresh model and its step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(microbatches):
        N = sum((labels[:, 1:] != -100).sum() for _, labels in microbatches)

        def closure():
            optimizer.zero_grad()
            for microbatch in microbatches:
                loss = loss_sum(model, microbatch)[0] / N
                loss.backward()
                # instead: optimizer.zero_grad(); loss.backward()  # last-microbatch-only

        optimizer.step(closure)

    return model, step
