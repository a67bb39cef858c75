"""The memory of a training step: weights, gradients, optimizer state, and what autograd keeps for backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from labkit import rules
from labkit.corpus import Batch, Seed, batch
from labkit.declare import Choice, Range, Switch, quantity
from labkit.device import DTYPES, name, pick
from labkit.errors import LabError
from labkit.fit import distance, flat, gradient
from labkit.memory.graphs import classic as classic
from labkit.memory.saved_tensors import Length, Net, rounding, size, watch
from labkit.tolerance import Compared, Tolerance

GlobalBatch = Annotated[int, Range(2, 32, unit="sequences", help="sequences of one optimizer step")]
Microbatch = Annotated[int, Range(1, 32, unit="sequences", help="b, sequences of one microbatch")]
Checkpointing = Annotated[bool, Switch(help="each block keeps its input alone, and runs again in the backward")]


def cut(pair: Batch, microbatch: int) -> list[Batch]:
    """A batch as microbatches of b sequences; the last may hold fewer.

    >>> [len(tokens) for tokens, _ in cut(batch(0, 8), 3)]
    [3, 3, 2]

    Raises LabError where b is more than the sequences.
    """
    if microbatch > len(pair[0]):
        raise LabError(
            f"microbatch = {microbatch} is more than the {len(pair[0])} sequences there are: try {len(pair[0])}"
        )
    return list(zip(*(each.split(microbatch) for each in pair), strict=True))


# Against the size of a microbatch.


@dataclass(frozen=True)
class Row:
    """One size of microbatch."""

    microbatch: int = quantity("b", "sequences")
    accumulation_steps: int = quantity("K, so that K microbatches are the global batch", "microbatches")
    alone: int = quantity("most kept at once for one microbatch", "B")
    window: int = quantity("most kept at once for all K of them", "B")


@dataclass(frozen=True)
class Sweep:
    """Bytes kept for backward, by the size of a microbatch, at one global batch."""

    rows: tuple[Row, ...] = quantity("what was measured, by microbatch")
    slope: float = quantity("bytes that each further sequence of a microbatch costs, fitted", "B")
    intercept: float = quantity("bytes at b = 0, fitted", "B")
    residual: float = quantity("largest |measured − fitted| / measured")
    steps_matter: float = quantity("largest |K microbatches − one| / one")
    progress: float = quantity("share of the sweep that is done")


def kept(
    *,
    sequences: GlobalBatch = 16,
    length: Length = 32,
    checkpointing: Checkpointing = False,
    dtype: Annotated[str, Choice(("float32", "float64", "bfloat16"), help="type of the numbers")] = "float32",
    seed: Seed = 0,
) -> Iterator[Sweep]:
    """Bytes kept for backward against the size of a microbatch, at a fixed global batch.

    >>> *_, last = kept(sequences=4)
    >>> [(row.microbatch, row.accumulation_steps, row.window == row.alone) for row in last.rows]
    [(1, 4, True), (2, 2, True), (4, 1, True)]

    Measured at each b: one microbatch alone, and a window of K. A generator of the result so far. The line is fitted
    by least squares.
    """
    model = Net(seed, length, checkpointing, DTYPES[dtype])
    pair = batch(seed, sequences, length)
    sizes = sorted({*(2**k for k in range(sequences.bit_length())), sequences})
    rows: list[Row] = []
    for b in sizes:
        microbatches = cut(pair, b)
        window = watch(model, microbatches, rules.token_mean).peak
        alone = watch(model, microbatches[:1], rules.token_mean).peak if b < sequences else window
        rows.append(Row(b, len(microbatches), alone, window))
        yield _sweep(rows, len(rows) / len(sizes))


def _sweep(rows: list[Row], progress: float) -> Sweep:
    b, measured, alone = np.array([[row.microbatch, row.window, row.alone] for row in rows], dtype=float).T
    slope, intercept = np.polyfit(b, measured, 1) if len(rows) > 1 else (math.nan, math.nan)
    off, apart = abs(slope * b + intercept - measured) / measured, abs(measured - alone) / alone
    return Sweep(tuple(rows), float(slope), float(intercept), float(off.max()), float(apart.max()), progress)


# The other parts of a step.

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "SGD": lambda weights: SGD(weights, lr=0.1),
    "SGD with momentum": lambda weights: SGD(weights, lr=0.1, momentum=0.9),
    "Adam": lambda weights: Adam(weights, lr=0.01),
    "AdamW": lambda weights: AdamW(weights, lr=0.01),
}


@dataclass(frozen=True)
class Step:
    """The memory of one optimizer step, by part."""

    accumulation_steps: int = quantity("K, 1 for the full batch in one", "microbatches")
    parameters: int = quantity("the weights", "B")
    gradients: int = quantity(".grad of all weights", "B")
    state: int = quantity("tensors in the optimizer's state after the step", "B")
    kept: int = quantity("most kept for backward at once", "B")

    @property
    def name(self) -> str:
        """How the global batch was cut."""
        return called(self.accumulation_steps)

    @property
    def total(self) -> int:
        """The four together."""
        return self.parameters + self.gradients + self.state + self.kept


@dataclass(frozen=True)
class Parts(Compared):
    """One step on the full batch beside the same step on microbatches."""

    full: Step = quantity("the full batch in one")
    cut: Step = quantity("in microbatches")
    relative_error: float = quantity("‖g − G‖ / ‖G‖, G the full batch's gradient")
    tolerance: Tolerance = quantity("relative error that rounding alone explains")


def parts(
    *,
    microbatch: Microbatch = 2,
    sequences: GlobalBatch = 8,
    length: Length = 32,
    optimizer: Annotated[str, Choice(tuple(OPTIMIZERS), help="which makes the step")] = "AdamW",
    checkpointing: Checkpointing = False,
    seed: Seed = 0,
) -> Parts:
    """The memory of a step, part by part: the full batch beside microbatches that leave the same gradient.

    >>> step = parts()
    >>> step.equal, step.cut.state // step.cut.parameters, round(step.full.kept / step.cut.kept, 2)
    (True, 2, 4.0)

    Measured on two copies of one net in float64. Raises LabError for a microbatch larger than the global batch.
    """
    pair = batch(seed, sequences, length)
    large, small = (Net(seed, length, checkpointing) for _ in range(2))
    microbatches = cut(pair, microbatch)
    full = step(large, OPTIMIZERS[optimizer](large.parameters()), [pair])
    small_step = step(small, OPTIMIZERS[optimizer](small.parameters()), microbatches)
    right, g = flat(gradient(large)), flat(gradient(small))
    return Parts(full, small_step, distance(g, right).relative_error, rounding(seed, length, microbatches))


def step(model: nn.Module, optimizer: Optimizer, microbatches: Sequence[Batch]) -> Step:
    """Make one optimizer step, and measure its memory."""
    weights, K = list(model.parameters()), len(microbatches)
    kept = watch(model, microbatches, rules.token_mean).peak
    gradients = size(p.grad for p in weights if p.grad is not None)
    optimizer.step()
    state = size(each for of_one in optimizer.state.values() for each in of_one.values() if isinstance(each, Tensor))
    return Step(K, size(weights), gradients, state, kept)


def called(steps: int) -> str:
    """The name of a window of K microbatches.

    >>> called(1), called(4)
    ('full batch', '4 microbatches')
    """
    return "full batch" if steps == 1 else f"{steps} microbatches"


# By the device's allocator.


@dataclass(frozen=True)
class Peak:
    """Forward and backward of one window on the device, in float32."""

    device: str = quantity("what the device calls itself")
    allocator: bool = quantity("whether its allocator could be asked")
    names: tuple[str, ...] = quantity("how the global batch was cut")
    kept: tuple[int, ...] = quantity("most kept for backward at once", "B")
    allocated: tuple[float, ...] = quantity("most the allocator gave at once; NaN where there is none to ask", "B")


def peak(
    *,
    microbatch: Microbatch = 2,
    sequences: GlobalBatch = 8,
    length: Length = 32,
    checkpointing: Checkpointing = False,
    seed: Seed = 0,
) -> Peak:
    """Peak memory of the full batch and of microbatches: a GPU's allocator, where there is one, beside what is kept.

    >>> memory = peak()
    >>> round(memory.kept[0] / memory.kept[1], 2)
    4.0

    Weights and inputs do not count. Raises LabError for a microbatch larger than the global batch.
    Source: PyTorch, torch.cuda.max_memory_allocated.
    """
    device = pick()
    model = Net(seed, length, checkpointing, torch.float32).to(device)
    tokens, labels = (each.to(device) for each in batch(seed, sequences, length))
    windows = [cut((tokens, labels), b) for b in (sequences, microbatch)]
    names = tuple(called(len(each)) for each in windows)
    kept = tuple(watch(model, each, rules.token_mean).peak for each in windows)
    peaks = tuple(allocated(model, each, device) for each in windows)
    return Peak(name(device), device.type == "cuda", names, kept, peaks)


def allocated(model: nn.Module, microbatches: Sequence[Batch], device: torch.device) -> float:
    """Most bytes that a GPU's allocator held in a window, beyond those held before; NaN on a CPU, which has none.

    >>> allocated(Net(0, 8), [], torch.device("cpu"))
    nan
    """
    if device.type != "cuda":
        return math.nan
    model.zero_grad()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    rules.token_mean(model, microbatches)
    return float(torch.cuda.max_memory_allocated(device) - before)
