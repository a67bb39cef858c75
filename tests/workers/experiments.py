"""Experiments of the tests: functions that ask for ranks themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit import workers


@dataclass(frozen=True, eq=False)
class Sums:
    """What an experiment found."""

    factor: float
    sums: Tensor


def sums(*, factor: float = 2.0, ranks: int = 2) -> Sums:
    """The rank numbers, scaled and summed by the ranks."""
    return Sums(factor, torch.tensor(workers.run("tests.workers.experiments:scaled", ranks, factor=factor)))


def scaled(rank: int, world: int, factor: float) -> float:
    """The sum over the ranks of factor × (rank + 1)."""
    return workers.total(rank, world, factor * (rank + 1))


def growing(*, ranks: int = 2) -> Iterator[float]:
    """Yields the result so far."""
    yield 0.0
    yield workers.run("labkit.workers:total", ranks, value=1)[0]


def twice(*, ranks: int = 2) -> list[object]:
    """Two calls, after each of which all ranks know the same."""
    return [workers.run("tests.workers.ranks:drawn", ranks) for _ in range(2)]
