"""An overflow on one rank: all ranks skip the step, or the replicas drift apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from labkit import workers
from labkit.corpus import Seed, batch
from labkit.data_parallel.rank_losses import replica
from labkit.declare import Range, Switch, quantity
from labkit.errors import LabError
from labkit.fit import flat
from labkit.nets import next_token_loss, valid_tokens


def finite(model: nn.Module) -> bool:
    """Whether this rank sees no overflow in its own copy of the gradient."""
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def any_overflow(overflow: bool) -> bool:
    """Whether any rank has an overflow: one all-reduce with MAX."""
    flag = torch.tensor(float(overflow))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def spoil(model: nn.Module) -> None:
    """An overflow in this rank's copy of the averaged gradient, as of a cast to half precision."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.fill_(math.inf)


def scaled_step(
    model: DistributedDataParallel, optimizer: SGD, scaler: GradScaler, loss: Tensor, agree: bool, overflows: bool
) -> None:
    """One optimizer step of this rank, skipped after an overflow on it, or with `agree` on any rank."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if overflows:
        spoil(model)
    if agree and any_overflow(not finite(model)):
        spoil(model)
    scaler.step(optimizer)
    scaler.update()


def run_training(
    rank: int,
    world: int,
    *,
    agree: bool,
    overflow_on: int,
    overflow_at: int,
    updates: int,
    batches: Sequence[int],
    seed: int,
) -> list[tuple[float, float, float]]:
    """After every step: how far this replica is from the first, how far it has travelled, log2 of its scale."""
    model, scaler = replica(seed), GradScaler("cpu", init_scale=1024.0)
    optimizer = SGD(model.parameters(), lr=0.1)
    start, distances = flat(model.parameters()), []
    for step in range(1, updates + 1):
        tokens, labels = batch(batches[step - 1] + rank, 1, text="made")
        loss = next_token_loss(model, tokens, labels, "sum") / valid_tokens(labels)
        scaled_step(model, optimizer, scaler, loss, agree, overflows=(rank, step) == (overflow_on, overflow_at))
        here = flat(model.parameters())
        first = here.clone()
        dist.broadcast(first, 0)
        distances.append((float((here - first).norm()), float((here - start).norm()), math.log2(scaler.get_scale())))
    return distances


@dataclass(frozen=True, eq=False)
class Drift:
    """Replicas after one overflow on one of them."""

    agree: bool = quantity("whether the ranks tell each other of an overflow")
    overflow_on: int = quantity("the rank whose gradient overflowed")
    overflow_at: int = quantity("the step with the overflow", "optimizer step")
    distance: Tensor = quantity(
        "‖W_r − W_0‖ of the farthest replica after each step, of the longest way gone by then", "%"
    )
    scales: Tensor = quantity("log2 of the loss scale in the end, rank by rank")

    @property
    def last(self) -> float:
        """The distance at the end."""
        return float(self.distance[-1])


def overflow(
    *,
    agree: Annotated[bool, Switch(help="on: an all-reduce with MAX tells every rank of an overflow on any")] = False,
    ranks: Annotated[int, Range(2, 4, unit="ranks", help="W, processes with a replica of the model each")] = 2,
    overflow_on: Annotated[int, Range(0, 3, help="the rank whose gradient overflows")] = 1,
    overflow_at: Annotated[int, Range(1, 24, unit="optimizer step", help="the step with the overflow")] = 4,
    updates: Annotated[int, Range(8, 24, unit="optimizer steps", help="length of the training")] = 12,
    seed: Seed = 0,
) -> Drift:
    """A training run in real DistributedDataParallel with one overflow on one rank, after the gradients are averaged.

    >>> overflow().last > 1, overflow(agree=True).last
    (True, 0.0)

    Every rank has its own torch.amp.GradScaler, as by default. float64, made text, one text per rank and step; the
    overflow is an inf put into that rank's copy of the averaged gradient. An inf before the average would reach
    every rank anyway. Raises LabError for a rank or a step that does not exist.
    """
    if overflow_on >= ranks:
        raise LabError(f"overflow on = {overflow_on} is no rank of 0 … {ranks - 1}: try {ranks - 1}")
    if overflow_at > updates:
        raise LabError(f"overflow at = {overflow_at} is after the last of {updates} steps: try {updates}")
    answers = workers.run(
        "labkit.data_parallel.overflow_on_one_rank:run_training",
        ranks,
        agree=agree,
        overflow_on=overflow_on,
        overflow_at=overflow_at,
        updates=updates,
        batches=[1_000_003 * (seed + 1) + 10 * step for step in range(updates)],
        seed=seed,
    )
    distances = torch.tensor(answers, dtype=torch.float64)  # rank, step, quantity
    far, way, _ = distances.amax(0).unbind(1)
    return Drift(agree, overflow_on, overflow_at, 100 * far / way.clamp(min=1e-300), distances[:, -1, 2])
