"""What the adapters on several ranks share, and their command: python ranked.py adapter ranks."""

import sys

import torch
import torch.distributed as dist
from labkit import audit
from torch.nn.parallel import DistributedDataParallel

from tiny import Plain, cross_entropy, loss_sum, valid, window

microbatches = window(6)  # three for each of two ranks
__all__ = ["N", "cross_entropy", "loss_sum", "microbatches", "wrapped"]


def wrapped(backward):
    """A model in DistributedDataParallel and a step that calls backward(model, batch, batches) for each microbatch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Plain())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batches):
        for batch in batches:
            backward(model, batch, batches)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def N(batches):
    """Valid tokens of all ranks."""
    count = sum(valid(each["labels"]) for each in batches)
    dist.all_reduce(count)
    return count


if __name__ == "__main__":
    adapter, world = sys.argv[1:]
    print("[", audit.ranks(f"{adapter}:build", int(world), windows=2).to_json(), "]", sep="")
