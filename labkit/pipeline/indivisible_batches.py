"""Batches that a pipeline cannot cut into equal microbatches: what the library does, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from labkit.cadence.stepping import Seed
from labkit.declare import Choice, Range, quantity
from labkit.errors import LabError
from labkit.fit import distance
from labkit.nets import IGNORE
from labkit.pipeline.stages import Microbatches, Ranks, admit, data, enough, model, pad, rows_per_microbatch
from labkit.pipeline.step import Batch, run_pipeline, sums
from labkit.tolerance import Tolerance, depth, tolerance

WAYS = ("as it is", "refused", "padded")
Treatment = Annotated[str, Choice(WAYS, help="handed over, checked before anything runs, or padded")]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one batch, or two, in a pipeline whose microbatches must all have one shape."""

    rows: int = quantity("rows of the first batch", "rows")
    tail: int = quantity("rows of the second batch in the same schedule; 0: none", "rows")
    microbatches: int = quantity("M, parts that a batch is cut into")
    pieces: tuple[int, ...] = quantity("rows of each microbatch of the first batch", "rows")
    later: tuple[int, ...] = quantity("rows of each microbatch of the second batch", "rows")
    ignored: int = quantity("rows that padding has to add, both batches", "rows")
    padded: bool = quantity("whether they were added")
    said: str = quantity("what stopped it, in the pool's and the library's words; empty: nothing")
    errors: tuple[float, ...] = quantity("relative error of each batch's gradient; none where it was stopped")
    tolerance: Tolerance = quantity("relative error that rounding alone explains")

    @property
    def right(self) -> bool:
        """Whether it ran, and the gradient is the full batch's."""
        return bool(self.errors) and max(self.errors) <= self.tolerance.value


def indivisible(
    *,
    rows: Annotated[int, Range(1, 16, unit="rows", help="rows of the batch")] = 7,
    microbatches: Microbatches = 4,
    tail: Annotated[int, Range(0, 16, unit="rows", help="a second batch in the same schedule; 0: none")] = 0,
    treatment: Treatment = "as it is",
    ranks: Ranks = 2,
    schedule: Annotated[str, Choice(("GPipe", "1F1B"), help="the order in which a rank works")] = "GPipe",
    seed: Seed = 0,
) -> Outcome:
    """A batch whose rows M does not divide, and one that is shorter than the one before, in a real pipeline.

    >>> outcome = indivisible(treatment="padded")
    >>> outcome.ignored, outcome.right
    (1, True)

    The loss is sum / N without scale_grads. "as it is": what the library does; if it fails, the ranks are ended.
    "refused": LabError before any rank starts. "padded": ignored rows are added, until all microbatches have the
    same shape. Under torchrun, which ends with a rank that fails, try only these two.
    """
    admit(schedule, ranks, microbatches)
    if treatment == "refused":
        refuse(rows, tail, microbatches)
    batches = [data(each, seed + at) for at, each in enumerate((rows, tail)) if each]
    shape = enough(max(rows, tail), microbatches)
    inputs = [pad(*each, shape) for each in batches] if treatment == "padded" else batches
    gradients, complaint = attempt(inputs, ranks, microbatches, schedule, seed)
    right = [reference(ranks, seed, *each) for each in batches]
    sizes = [shape if treatment == "padded" and each else each for each in (rows, tail)]
    return Outcome(
        rows,
        tail,
        microbatches,
        pieces(sizes[0], microbatches),
        pieces(sizes[1], microbatches),
        ignored=sum(shape - len(tokens) for tokens, _ in batches),
        padded=treatment == "padded",
        said=complaint,
        errors=tuple(distance(g, G).relative_error for g, (G, _) in zip(gradients, right, strict=False)),
        tolerance=max((bound for _, bound in right), key=lambda bound: bound.value),
    )


def attempt(
    batches: Sequence[Batch], ranks: int, microbatches: int, schedule: str, seed: int
) -> tuple[list[Tensor], str]:
    """The gradient of each batch, or what stopped the ranks in one sentence."""
    try:
        return run_pipeline(batches, ranks, microbatches, schedule, "sum / N", False, seed), ""
    except LabError as error:
        complaint = str(error).partition(": try ")[0]  # trying again would fail the same way
        return [], " ".join(complaint.split())


def reference(ranks: int, seed: int, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tolerance]:
    """The full-batch gradient, Σ S / N over its rows, and its tolerance."""
    whole, N = model(ranks, seed), int((targets != IGNORE).sum())
    S = sums(whole, tokens, targets)
    return S.sum(0) / N, tolerance(S, count=N, depth=depth(whole), dtype=S.dtype)


def pieces(rows: int, microbatches: int) -> tuple[int, ...]:
    """Rows of each microbatch as the library cuts them: the first hold one more where they do not divide.

    >>> pieces(7, 4)
    (2, 2, 2, 1)

    As torch.tensor_split does.
    """
    return tuple(len(part) for part in torch.arange(rows).tensor_split(microbatches)) if rows else ()


def refuse(rows: int, tail: int, microbatches: int) -> None:
    """Raises LabError where the microbatches of one batch, or of two, would not all have one shape.

    >>> refuse(8, 3, 4)
    Traceback (most recent call last):
    labkit.errors.LabError: tail = 3 rows after a batch of 8 change the shape of a microbatch: try 8
    """
    rows_per_microbatch(rows, microbatches)
    if tail not in (0, rows):
        raise LabError(f"tail = {tail} rows after a batch of {rows} change the shape of a microbatch: try {rows}")
