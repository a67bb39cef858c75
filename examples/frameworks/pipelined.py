"""What the pipelining adapters share: two stages, each on its rank, and their command: python pipelined.py adapter."""

import importlib
import sys

import torch
import torch.distributed as dist
from labkit import workers
from labkit.audit import audit
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tiny import VOCABULARY, cross_entropy, loss_sum, valid, window

microbatches = window()


def whole():
    """Both stages; a rank trains its own, and keeps the other for the audit's references."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, 16), torch.nn.Tanh())
    model = torch.nn.Sequential(first, torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, VOCABULARY)))
    model[1 - dist.get_rank()].requires_grad_(False)
    return model


def piped(loss, **options):
    """A model, and a step that runs a 1F1B schedule over the microbatches."""
    rank, model, told = dist.get_rank(), whole(), {}
    stage = PipelineStage(model[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, len(microbatches), loss_fn=lambda x, y: loss(x, y, told["N"]), **options)
    optimizer = torch.optim.AdamW(model[rank].parameters(), lr=1e-2)

    def step(batches):
        if len(batches) != len(microbatches):
            raise ValueError("a schedule has a fixed number of microbatches")
        tokens, labels = (torch.cat([each[name] for each in batches]) for name in ("input_ids", "labels"))
        told["N"] = valid(labels)
        schedule.step(*([tokens] if rank == 0 else []), target=labels)
        optimizer.step()
        optimizer.zero_grad()
        for at, part in enumerate(model):  # what the other rank has made of its stage
            for p in part.parameters():
                dist.broadcast(p.data, at)

    return model, step


def mean(logits, labels, _):
    """The mean over a microbatch."""
    return cross_entropy(logits, labels)


def total(logits, labels, _):
    """The sum over a microbatch."""
    return cross_entropy(logits, labels, "sum")


def share(logits, labels, N):
    """The sum over a microbatch, divided by the tokens of all."""
    return cross_entropy(logits, labels, "sum") / N


def judged(rank, world, adapter):
    """The audit of this rank's stage."""
    return audit(importlib.import_module(adapter).build, microbatches, loss_sum, windows=2).to_json()


if __name__ == "__main__":
    print("[", ", ".join(workers.run("pipelined:judged", 2, adapter=sys.argv[1])), "]", sep="")
