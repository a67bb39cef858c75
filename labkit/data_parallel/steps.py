"""Whole steps on ranks, one correct and the usual faulty ones, for the audit: each name builds a model and a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from labkit.corpus import Batch, batch, split
from labkit.data_parallel.rank_losses import RECIPES, replica
from labkit.nets import next_token_loss, valid_tokens

microbatches = split(*batch(3, 12, text="made"), 6)  # of all ranks: they are dealt out in order


def loss_sum(model: nn.Module, microbatch: Batch) -> tuple[Tensor, int]:
    """The loss summed over valid tokens, and their number."""
    return next_token_loss(model, *microbatch, "sum"), valid_tokens(microbatch[1])


def build(recipe: str = "token-mean") -> tuple[DistributedDataParallel, Callable[[list[Any]], None]]:
    """A fresh replica and its step, on the rank that calls it."""
    model = replica(seed=0)
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(microbatches: list[Any]) -> None:
        optimizer.zero_grad()
        RECIPES[recipe](model, microbatches)
        optimizer.step()

    return model, step


rank_means = functools.partial(build, "rank-means")
missing_world_factor = functools.partial(build, "missing-world-factor")
extra_world_factor = functools.partial(build, "extra-world-factor")
mean_of_means = functools.partial(build, "mean-of-means")
reduction_bypassed = functools.partial(build, "reduction-bypassed")
