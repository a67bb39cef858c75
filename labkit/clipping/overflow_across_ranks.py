"""Ranks that own a part of one model each must agree on a step that one of them skips."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from labkit.clipping.scaling import Updates
from labkit.corpus import Seed, batch
from labkit.declare import Choice, Range, Switch, quantity
from labkit.errors import LabError
from labkit.fit import flat
from labkit.nets import Transformer, next_token_loss, valid_tokens
from labkit.rules import Microbatches


@dataclass(frozen=True)
class Rank:
    """What one rank owns: parameters, their optimizer and a loss scaler."""

    parameters: list[nn.Parameter]
    optimizer: Optimizer
    scaler: GradScaler

    @property
    def finite(self) -> bool:
        """Whether this rank sees no overflow in its own gradients."""
        return all(bool(g.isfinite().all()) for p in self.parameters if (g := p.grad) is not None)


def owners(model: nn.Module, scale: float) -> list[Rank]:
    """Two ranks: the first owns the first half of the parameter tensors, the last the others and the loss."""
    parameters = list(model.parameters())
    half = len(parameters) // 2
    parts = parameters[:half], parameters[half:]
    return [Rank(part, SGD(part, lr=0.1), GradScaler("cpu", init_scale=scale)) for part in parts]


def coupled_step(
    model: nn.Module, microbatches: Microbatches, ranks: list[Rank], agree: bool, spoiled: Rank | None = None
) -> None:
    """One step of all ranks, in one process. `agree`: an overflow on one is known to all, as by an all-reduce."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    model.zero_grad()
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        *_, scaled = [rank.scaler.scale(loss) for rank in ranks]
        scaled.backward()
    if spoiled:
        spoil(spoiled)
    if agree and not all(rank.finite for rank in ranks):
        for rank in ranks:
            spoil(rank)
    for rank in ranks:
        rank.scaler.step(rank.optimizer)
        rank.scaler.update()


def spoil(rank: Rank) -> None:
    """Put inf into the rank's gradient: its scaler will skip the step and halve its scale."""
    for p in rank.parameters:
        if p.grad is not None:
            p.grad.fill_(math.inf)


def half_a_step(model: nn.Module, microbatches: Microbatches) -> None:
    """An overflow on the first of two ranks that the last never learns of: it steps alone."""
    ranks = owners(model, 1024.0)
    coupled_step(model, microbatches, ranks, agree=False, spoiled=ranks[0])


@dataclass(frozen=True, eq=False)
class Drift:
    """Two ranks with one overflow, beside the same two where both skip that step."""

    overflow_at: int = quantity("the step with the overflow", "optimizer step")
    overflow_on: str = quantity("rank whose gradient overflowed")
    factor: float = quantity("in the end: the first rank's unscaled gradient, of what it should be", "times")
    distance: Tensor = quantity(
        "‖W − W_agreed‖ after each optimizer step, of the way that the agreed training goes", "%"
    )
    first: Tensor = quantity("the same, the first rank's parameters alone", "%")
    last: Tensor = quantity("the same, the last rank's parameters alone", "%")
    scale_first: Tensor = quantity("log2 of the first rank's scale after each step")
    scale_last: Tensor = quantity("log2 of the last rank's scale after each step")


def ranks(
    *,
    agree: Annotated[bool, Switch(help="on: all ranks learn of an overflow on any, and skip together")] = False,
    overflow_on: Annotated[
        str, Choice(("first", "last"), help="rank whose gradient overflows; the last one has the loss")
    ] = "first",
    overflow_at: Annotated[int, Range(1, 60, unit="optimizer step", help="the step with the overflow")] = 5,
    updates: Updates = 20,
    seed: Seed = 0,
) -> Drift:
    """One model on two ranks, half of the parameter tensors each: one overflow, and who skips the step.

    >>> drift = ranks()
    >>> float(drift.distance[3]), drift.factor
    (0.0, 2.0)
    >>> float(ranks(agree=True).distance.max())
    0.0

    Both ranks in one process, one after the other, each with its own torch.amp.GradScaler and SGD; float64, and the
    overflow is an inf that is put into the gradient. Two documents a step. The last rank scales the loss, each
    unscales by its own scale.
    Raises LabError for an overflow after the last step.
    """
    if overflow_at > updates:
        raise LabError(f"overflow at = {overflow_at} is after the last of {updates} steps: try {updates}")
    at = ("first", "last").index(overflow_on)
    start = flat(Transformer(seed=seed, dtype=torch.float64).parameters())
    weights, scales, own = _trained(agree, at, overflow_at, updates, seed)
    right, _, _ = _trained(True, at, overflow_at, updates, seed)
    off, way = weights - right, float((right[-1] - start).norm())
    return Drift(
        overflow_at,
        overflow_on,
        factor=float(2 ** (scales[-1, 1] - scales[-1, 0])),
        distance=100 * off.norm(dim=1) / way,
        first=100 * off[:, :own].norm(dim=1) / way,
        last=100 * off[:, own:].norm(dim=1) / way,
        scale_first=scales[:, 0],
        scale_last=scales[:, 1],
    )


def _trained(agree: bool, on: int, overflow_at: int, updates: int, seed: int) -> tuple[Tensor, Tensor, int]:
    """Parameters [updates, P] and log2 scales [updates, 2] after each step; how many of the first are rank 0's."""
    model = Transformer(seed=seed, dtype=torch.float64)
    ranks = owners(model, 2.0**16)
    weights, scales = [], []
    for step in range(1, updates + 1):
        microbatch = batch(1_000_003 * (seed + 1) + step, 2)
        coupled_step(model, [microbatch], ranks, agree, ranks[on] if step == overflow_at else None)
        weights.append(flat(model.parameters()))
        scales.append([math.log2(rank.scaler.get_scale()) for rank in ranks])
    return torch.stack(weights), torch.tensor(scales), sum(p.numel() for p in ranks[0].parameters)
