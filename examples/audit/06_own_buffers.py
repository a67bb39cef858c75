"""Gradients gathered in buffers of their own, given to .grad before the step."""

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
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step(microbatches):
        sums, N = [torch.zeros_like(p) for p in parameters], 0
        for microbatch in microbatches:
            loss, n = loss_sum(model, microbatch)
            N += n
            for kept, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
                kept += gradient
        for p, kept in zip(parameters, sums, strict=True):
            p.grad = kept / N
            # instead: p.grad = kept / N / len(microbatches)  # double-division
        optimizer.step()

    return model, step
