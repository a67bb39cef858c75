"""Loss scaling: scale each loss, unscale once, clip, step, update."""

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(microbatches):
        N = sum((labels[:, 1:] != -100).sum() for _, labels in microbatches)
        for microbatch in microbatches:
            scaler.scale(loss_sum(model, microbatch)[0] / N).backward()
        scaler.unscale_(optimizer)
        # instead: pass  # clip-scaled
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return model, step
