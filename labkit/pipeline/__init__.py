"""Pipeline: what a schedule over real processes does to the gradient, to time and to memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from labkit.cadence.stepping import Seed
from labkit.declare import Choice, Switch, quantity
from labkit.fit import Distance, distance, fit
from labkit.gradients import Gradients, composed
from labkit.nets import IGNORE
from labkit.pipeline.indivisible_batches import indivisible as indivisible
from labkit.pipeline.slicing import cut as cut
from labkit.pipeline.stages import LOSSES, Microbatches, Ranks, Schedule, admit, chunks, data, model
from labkit.pipeline.step import run_pipeline, sums
from labkit.pipeline.timing import bubble as bubble
from labkit.pipeline.timing import bubbles as bubbles
from labkit.pipeline.timing import timeline as timeline
from labkit.tolerance import Compared, Tolerance, depth, tolerance

slices = cut  # as it was called before
# What a loss and scale_grads do together.


@dataclass(frozen=True, eq=False)
class Weighed(Distance, Compared):
    """The gradient of a pipeline step beside that of the full batch, and the weight of each microbatch in it."""

    loss: str = quantity("what loss_fn returns for a microbatch")
    scale_grads: bool = quantity("whether the library divides by M after the last backward")
    counts: Tensor = quantity("n_m, valid tokens of each microbatch", "tokens")
    weights: Tensor = quantity("fitted weight × N of each microbatch; 1 is right")
    predicted: Tensor = quantity("the same by algebra")
    predicted_error: float = quantity("relative error that those weights give")
    residual: float = quantity("share of the gradient that no weights explain")
    tolerance: Tolerance = quantity("relative error that rounding alone explains")
    gradients: Gradients = quantity("both gradients, and what each part contributes to them")


def losses(
    *,
    loss: Annotated[str, Choice(tuple(LOSSES), help="what loss_fn returns for a microbatch")] = "mean",
    scale_grads: Annotated[bool, Switch(help="the library's default: divide by M after the last backward")] = True,
    equal: Annotated[bool, Switch(help="12 valid tokens in each microbatch, and not 1, 12, 3, 7")] = False,
    ranks: Ranks = 2,
    microbatches: Microbatches = 4,
    schedule: Schedule = "GPipe",
    seed: Seed = 0,
) -> Weighed:
    """One step of a real pipeline, a process for each rank; the weight of each microbatch in the gradient.

    >>> step = losses(loss="sum / N")  # divided by N, and then by M = 4
    >>> [round(weight, 9) for weight in step.weights.tolist()], round(step.relative_error, 9)
    ([0.25, 0.25, 0.25, 0.25], 0.75)

    float64; a row of 12 tokens is a microbatch. The right gradient is Σ S_m / N, each S_m from a forward of its own in
    this process. Raises LabError for a number of microbatches that the schedule does not take.
    """
    admit(schedule, ranks, microbatches)
    tokens, targets = data(microbatches, seed, equal)
    (g,) = run_pipeline([(tokens, targets)], ranks, microbatches, schedule, loss, scale_grads, seed)
    S, roundings = _by_microbatch(ranks * chunks(schedule), microbatches, seed, equal)
    n = (targets != IGNORE).sum(1).double()
    predicted = weights(loss, n) / (microbatches if scale_grads else 1)
    return weighed(loss, scale_grads, g, S, n, predicted, roundings)


@functools.lru_cache(maxsize=4)
def _by_microbatch(stages: int, microbatches: int, seed: int, equal: bool) -> tuple[Tensor, int]:
    """The S_m [M, P], and how many roundings the model adds up: the same for every loss."""
    whole = model(stages, seed)
    return sums(whole, *data(microbatches, seed, equal)), depth(whole)


def weights(loss: str, counts: Tensor) -> Tensor:
    """The weight × N that a loss gives each microbatch's token sum, before the library divides by M.

    >>> weights("mean", torch.tensor([1.0, 3.0]))
    tensor([4.0000, 1.3333])

    Shapes: counts [M] in, weights [M] out; 1 is right.
    """
    N = counts.sum()
    return {"mean": N / counts, "sum": N * torch.ones_like(counts), "sum / N": torch.ones_like(counts)}[loss]


def weighed(
    loss: str, scale_grads: bool, g: Tensor, S: Tensor, counts: Tensor, predicted: Tensor, roundings: int
) -> Weighed:
    """A gradient g [P] beside the correct one, Σ S_m / N, and the weights of the S_m [M, P] that it is made of."""
    N, right = counts.sum(), S.sum(0) / counts.sum()
    fitted, rounding = fit(g, S), tolerance(S, count=int(N), depth=roundings, dtype=S.dtype)
    labels = [f"{int(n)}" for n in counts]
    return Weighed(
        **vars(distance(g, right)),
        loss=loss,
        scale_grads=scale_grads,
        counts=counts,
        weights=fitted.values * N,
        predicted=predicted,
        predicted_error=distance(predicted @ S / N, right).relative_error,
        residual=fitted.residual,
        tolerance=rounding,
        gradients=composed(g, fitted.values.nan_to_num()[:, None] * S, S / N, labels, rounding.value),
    )


# All ways side by side.


@dataclass(frozen=True)
class Way:
    """One loss with one setting of scale_grads."""

    loss: str = quantity("what loss_fn returns for a microbatch")
    scale_grads: bool = quantity("whether the library divides by M after the last backward")
    error: float = quantity("relative error against the full batch, measured")
    predicted: float = quantity("the same by algebra")
    right: bool = quantity("whether rounding explains the whole error")


@dataclass(frozen=True)
class Ways:
    """Three losses, each with scale_grads on and off."""

    ways: tuple[Way, ...] = quantity("the six ways")
    right: int = quantity("how many of the six are right")
    bound: float = quantity("relative error that rounding alone explains")


def ways(
    *,
    equal: Annotated[bool, Switch(help="12 valid tokens in each microbatch, and not 1, 12, 3, 7")] = False,
    ranks: Ranks = 2,
    microbatches: Microbatches = 4,
    schedule: Schedule = "GPipe",
    seed: Seed = 0,
) -> Ways:
    """Every loss with scale_grads on and off, each in its own pipeline step.

    >>> [(way.loss, way.scale_grads) for way in ways().ways if way.right]
    [('sum / N', False)]

    As `losses` six times.
    """
    steps = [
        losses(loss=loss, scale_grads=scale, equal=equal, ranks=ranks, microbatches=microbatches,
               schedule=schedule, seed=seed)
        for loss in LOSSES
        for scale in (True, False)
    ]  # fmt: skip
    rows = tuple(Way(w.loss, w.scale_grads, w.relative_error, w.predicted_error, w.equal) for w in steps)
    return Ways(rows, sum(way.right for way in rows), max(w.tolerance.value for w in steps))
