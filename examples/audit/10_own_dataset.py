"""Microbatches from a dataset of one's own: `probe` picks examples of unequal length."""

import torch
from torch import nn

from labkit.audit import probe

DATASET = [("to be", " or not to be"), ("a", " rose"), ("x", "y"), ("so it", " goes on")]


def collate(examples):
    """Letters as tokens; the prompt is no target."""
    tokens = torch.tensor([list("".join(examples[0]).encode())])
    return {"tokens": tokens, "labels": tokens.masked_fill(torch.arange(len(tokens[0])) < len(examples[0][0]), -100)}


microbatches = probe(DATASET, accumulation=3, count=lambda pair: len(pair[1]), collate=collate)


def loss_sum(model, microbatch):
    """The loss summed over valid letters, and their number."""
    logits, labels = model(microbatch["tokens"])[:, :-1], microbatch["labels"][:, 1:]
    return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum"), (labels != -100).sum()


def build():
    """A fresh model and its step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 8), nn.Linear(8, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(microbatches):
        N = sum((each["labels"][:, 1:] != -100).sum() for each in microbatches)
        # instead: N = sum(each["labels"][:, 1:].numel() for each in microbatches)  # padded-count
        for microbatch in microbatches:
            (loss_sum(model, microbatch)[0] / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step
