"""A trainer that keeps optimizer and schedule."""

import torch
from torch import nn

from labkit.audit import probe

microbatches = probe(50, accumulation=4)  # (tokens, labels) of a vocabulary of 50


def loss_sum(model, microbatch):
    """The loss summed over valid tokens, and their number."""
    tokens, labels = microbatch
    logits, labels = model(tokens)[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum"), (labels != -100).sum()


class Trainer:
    """A trainer as people write them."""

    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)

    def step(self, microbatches):
        """One update."""
        N = sum((labels[:, 1:] != -100).sum() for _, labels in microbatches)
        for microbatch in microbatches:
            (loss_sum(self.model, microbatch)[0] / N).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        # instead: [self.scheduler.step() for _ in microbatches]  # schedule-per-microbatch


def build():
    """A fresh model and its step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    return model, Trainer(model).step
