"""Stages that only sleep: the order and the times of a real schedule, without the noise of computing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from labkit.pipeline.stages import build, chunks, step

Spend = Callable[[str], None]
Times = list[tuple[str, float, float]]  # forward or backward, begin and end in seconds


class Sleep(torch.autograd.Function):
    """The identity, which takes its time in both directions and keeps its input for backward, as a layer does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spend: Spend) -> Tensor:
        """Spend the time of a forward pass."""
        ctx.save_for_backward(x)
        ctx.spend = spend
        spend("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Spend the time of a backward pass."""
        ctx.spend("backward")
        return gradient, None


class Held:
    """A tensor that autograd keeps for backward, in a box that can be referenced weakly."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Sleeper(nn.Module):
    """A stage that sleeps, records when, and counts the microbatches whose input is still kept.

    >>> stage = Sleeper()
    >>> y = stage(torch.zeros(1)); stage.most, len(stage.held)
    (1, 1)
    >>> y.backward(torch.ones(1)); len(stage.held), [kind for kind, _, _ in stage.times]
    (0, ['forward', 'backward'])
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds = {"forward": 0.0, "backward": 0.0}
        self.clear()

    def clear(self) -> None:
        """Clear the record."""
        self.held: WeakSet[Held] = WeakSet()
        self.most = 0
        self.times: Times = []

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        with saved_tensors_hooks(self._hold, lambda held: held.tensor):
            output: Tensor = Sleep.apply(x + self.weight, self._spend)  # type: ignore[no-untyped-call]
        return output

    def _hold(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        self.held.add(held)
        self.most = max(self.most, len(self.held))
        return held

    def _spend(self, kind: str) -> None:
        begin = time.perf_counter()
        time.sleep(self.seconds[kind])
        self.times.append((kind, begin, time.perf_counter()))


def run_sleepers(
    rank: int, world: int, *, schedule: str, microbatches: int, forward: float, backward: float
) -> list[tuple[int, Times]]:
    """What a rank does: a step to open the connections, then one that counts; for each stage (most kept, times).

    forward, backward: seconds that this rank spends on a microbatch, shared by its stages.
    """
    parts = [Sleeper() for _ in range(chunks(schedule))]
    pipeline = build(schedule, parts, rank, world, microbatches, loss_fn=lambda out, target: out.sum())
    x = torch.zeros(microbatches, 1)
    step(pipeline, rank, world, x, x)
    for part in parts:
        part.clear()
        part.seconds = {"forward": forward / len(parts), "backward": backward / len(parts)}
    dist.barrier()
    step(pipeline, rank, world, x, x)
    return [(part.most, part.times) for part in parts]
