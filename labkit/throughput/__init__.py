"""Throughput: the time of a step at the optimizer boundary, by the size of its microbatches.

    T_step = K · (a + c · b) + T_optimizer + T_allreduce

K microbatches of b sequences each; a is what every microbatch costs whatever it holds: launches, Python, small kernels.
A step is timed from before zero_grad to after optimizer.step, everything that the device does for it included.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from labkit.corpus import Seed, batch
from labkit.declare import Range, quantity
from labkit.device import Spread, name, pick
from labkit.nets import valid_tokens
from labkit.throughput.timing import (
    GLOBAL_BATCH,
    Device,
    Microbatch,
    Repeats,
    Times,
    cut,
    doubling,
    interleave,
    timed,
    trainee,
)

GlobalBatch = Annotated[int, Range(8, 64, log=True, unit="sequences", help="B, sequences of one optimizer step")]
Length = Annotated[int, Range(8, 64, log=True, unit="tokens", help="tokens of every sequence")]


def step_seconds(
    steps: int, microbatch: float, launch: float, per_sequence: float, optimizer: float, allreduce: float = 0.0
) -> float:
    """The modelled seconds of one optimizer step: K · (a + c · b) + T_optimizer + T_allreduce.

    >>> step_seconds(8, 4, launch=0.5, per_sequence=0.25, optimizer=2)
    14.0

    steps: K, microbatches of one step on one process; microbatch: b, sequences; launch: a, per_sequence: c, optimizer
    and allreduce in seconds. Raises LabError for K below 1, and for a number that is below 0 or above a billion.
    """
    K = Range(1, 2**31).check("steps", steps, int)
    costs = {"microbatch": microbatch, "launch": launch, "per sequence": per_sequence, "optimizer": optimizer}
    for label, value in {**costs, "allreduce": allreduce}.items():
        Range(0, 1e9).check(label, value, float)
    return K * (launch + per_sequence * microbatch) + optimizer + allreduce


# The sweep.


@dataclass(frozen=True)
class Row:
    """One size of microbatch at the same global batch."""

    microbatch: int = quantity("b", "sequences")
    accumulation_steps: int = quantity("K = B / b", "microbatches")
    steps: Spread = quantity("one optimizer step, measured", "s")
    microbatches: Spread = quantity("one forward and backward, measured", "s")
    optimizers: Spread = quantity("optimizer.step alone, measured", "s")
    tokens: float = quantity("valid tokens a second, at the median step", "tokens/s")
    sequences: float = quantity("sequences a second, at the median step", "sequences/s")


def row(microbatch: int, sequences: int, valid: int, times: Sequence[Times]) -> Row:
    """The times of one size of microbatch, as spreads and as two throughputs.

    >>> row(2, 8, 24, [Times(0.5, 0.1, 0.1)]).tokens
    48.0
    """
    steps, each, optimizer = (
        Spread.of(column) for column in zip(*((t.step, t.microbatch, t.optimizer) for t in times), strict=True)
    )
    rates = valid / steps.median, sequences / steps.median
    return Row(microbatch, sequences // microbatch, steps, each, optimizer, *rates)


@dataclass(frozen=True)
class Sweep:
    """Steps of one global batch, cut into microbatches of 1, 2, 4, … sequences."""

    device: str = quantity("what the device calls itself")
    sequences: int = quantity("B", "sequences")
    valid: int = quantity("valid tokens of one step", "tokens")
    rows: tuple[Row, ...] = quantity("what was measured, by microbatch")
    launch: float = quantity("a, what each microbatch costs whatever it holds, fitted; NaN: not yet", "s")
    per_sequence: float = quantity("c, what each sequence costs, fitted", "s")
    optimizer: float = quantity("T_optimizer, median of all that were measured", "s")
    progress: float = quantity("share of the sweep that is done")

    def modelled(self, microbatch: int) -> float:
        """The fitted line: seconds of a step with microbatches of that size."""
        K = self.sequences // microbatch
        return step_seconds(K, microbatch, self.launch, self.per_sequence, self.optimizer)

    def overhead(self, microbatch: int) -> float:
        """The share of the modelled step that is K · a."""
        return self.sequences // microbatch * self.launch / self.modelled(microbatch)

    @property
    def residual(self) -> float:
        """The largest |modelled − measured| / measured, over the sizes."""
        return max(abs(self.modelled(each.microbatch) / each.steps.median - 1) for each in self.rows)


def sweep(
    *, sequences: GlobalBatch = 64, length: Length = 32, repeats: Repeats = 5, device: Device = "auto", seed: Seed = 0
) -> Iterator[Sweep]:
    """Real steps of one global batch, for microbatches of 1, 2, 4, … sequences, and the model fitted to them.

    >>> *_, last = sweep(sequences=8, length=8, repeats=3)
    >>> [(row.microbatch, row.accumulation_steps) for row in last.rows], last.valid
    ([(1, 8), (2, 4), (4, 2), (8, 1)], 56)

    Sequences of equal length, so that b alone differs; the sizes are measured in turn. A generator of the result so
    far. Raises LabError where `sequences` is no power of two.
    """
    where, B = pick(device), doubling("sequences", sequences)
    pair, (model, optimizer) = batch(seed, B, length, shortest=length), trainee(seed, length, where)
    sizes = [2**k for k in range(B.bit_length())]
    works = [functools.partial(timed, model, optimizer, cut(pair, b, where), where) for b in sizes]
    for count, times_by_size in enumerate(interleave(works, repeats), 1):
        valid = valid_tokens(pair[1])
        rows = tuple(row(b, B, valid, times) for b, times in zip(sizes, times_by_size, strict=True) if times)
        yield Sweep(name(where), B, valid, rows, *fitted(rows), count / (len(sizes) * repeats))


def fitted(rows: Sequence[Row]) -> tuple[float, float, float]:
    """a, c and T_optimizer of the model, by least squares of the relative error, none below 0.

    >>> rows = [row(b, 8, 8, [Times(8 / b * 0.25 + 1 + 0.5, 0.0, 0.5)]) for b in (1, 2, 8)]
    >>> [round(each, 6) for each in fitted(rows)]
    [0.25, 0.125, 0.5]

    At a fixed global batch T_optimizer and B · c look alike, so T_optimizer is measured by itself. NaN for one row.
    """
    optimizer = statistics.median(each.optimizers.median for each in rows)
    if len(rows) < 2:
        return math.nan, math.nan, optimizer
    K = torch.tensor([[each.accumulation_steps, each.accumulation_steps * each.microbatch] for each in rows])
    measured = torch.tensor([each.steps.median for each in rows], dtype=torch.float64)
    launch, per_sequence = positive(K / measured[:, None], 1 - optimizer / measured)
    return launch, per_sequence, optimizer


def positive(columns: Tensor, target: Tensor) -> tuple[float, float]:
    """Least squares with two unknowns, neither below 0.

    >>> positive(torch.eye(2, dtype=torch.float64), torch.tensor([3.0, -1.0], dtype=torch.float64))
    (3.0, 0.0)
    """
    free = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0]
    alone = (columns.mT @ target).clamp(min=0) / (columns**2).sum(0)  # the other at 0
    ways = [alone * torch.tensor(axis) for axis in ((1, 0), (0, 1))]
    best = free if free.min() >= 0 else min(ways, key=lambda way: float((columns @ way - target).norm()))
    return float(best[0]), float(best[1])


# A microbatch or a step.


@dataclass(frozen=True)
class Pair:
    """Two sizes of microbatch at the same global batch."""

    rows: tuple[Row, ...] = quantity("the small and the large microbatch, once both are measured")
    progress: float = quantity("share that is done")

    @property
    def microbatch_ratio(self) -> float:
        """Time of the large microbatch over that of the small one."""
        return self.rows[1].microbatches.median / self.rows[0].microbatches.median

    @property
    def step_ratio(self) -> float:
        """Time of the step of large microbatches over that of small ones."""
        return self.rows[1].steps.median / self.rows[0].steps.median


def pair(
    *, small: Microbatch = 2, large: Microbatch = 16, repeats: Repeats = 7, device: Device = "auto", seed: Seed = 0
) -> Iterator[Pair]:
    """One microbatch and one whole step, with small and with large microbatches, at a global batch of 64 sequences.

    >>> *_, last = pair(repeats=3)
    >>> [(row.microbatch, row.accumulation_steps) for row in last.rows], last.progress
    ([(2, 32), (16, 4)], 1.0)

    A generator of the result so far. Raises LabError where a size is no power of two.
    """
    where, sizes = pick(device), (doubling("small", small), doubling("large", large))
    examples, (model, optimizer) = batch(seed, GLOBAL_BATCH, 32, shortest=32), trainee(seed, 32, where)
    works = [functools.partial(timed, model, optimizer, cut(examples, b, where), where) for b in sizes]
    for count, times_by_size in enumerate(interleave(works, repeats), 1):
        ready = zip(sizes, times_by_size, strict=True) if all(times_by_size) else ()
        rows = tuple(row(b, GLOBAL_BATCH, valid_tokens(examples[1]), times) for b, times in ready)
        yield Pair(rows, count / (2 * repeats))
