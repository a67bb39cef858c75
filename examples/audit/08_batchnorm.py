"""A BatchNorm that is frozen; `concat` lets the audit compare with all images in one forward."""

import torch
import torch.nn.functional as F
from torch import nn

generator = torch.Generator().manual_seed(0)
microbatches = [
    (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)) for size in (4, 7, 5)
]


def loss_sum(model, microbatch):
    """The loss summed over images, and their number."""
    x, y = microbatch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def concat(microbatches):
    """All microbatches as one."""
    return tuple(torch.cat(each) for each in zip(*microbatches, strict=True))


def build():
    """A fresh model and its step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1].eval()
    # instead: model[1].train()  # batch-dependent-layer

    def step(microbatches):
        images = sum(len(y) for _, y in microbatches)
        for microbatch in microbatches:
            (loss_sum(model, microbatch)[0] / images).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step
