"""What the parts of an audit hand to each other: the evidence, a judgement of each window, and faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.audit.references import References
from labkit.audit.window import Window
from labkit.errors import LabError
from labkit.fit import Weights, fit
from labkit.rules import rule

SCALELESS = ("step-per-microbatch", "unscale-early", "clip-scaled")  # beside these a common factor says nothing
EXPLAINING = (
    "nondeterministic",
    "clip-per-microbatch",
    "unscale-early",
    "clip-scaled",
)  # of an unknown weight


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    word: str
    said: str
    lookalikes: tuple[str, ...] = ()  # other words that would look the same here

    @property
    def fix(self) -> str:
        """What to do about it, by the rule table."""
        try:
            return rule(self.word).fix
        except LabError:
            return FIXES.get(self.word, "")


FIXES = {
    "no-step": "call the optimizer's step once, after the window's last backward",
    "stale-gradient": "clear the gradients once a window, before its first backward or after the step",
    "non-finite": "sum over valid tokens and divide by their number in the whole window; skip a step that overflowed",
    "unknown": "compare the weights with those you meant",
}


@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything that was measured of a step."""

    windows: list[Window]
    references: list[References]  # one for each window, at the weights that each microbatch was run with
    references_at_start: References  # those of the first window, all at the weights before it
    sequences: list[References] | None  # one for each window, of single sequences
    microbatch_of_sequence: Tensor
    microbatches: Sequence[Any]
    objective: str
    tolerance: float
    rerun_other_seed: Window  # one window with other random numbers
    one_forward: References | None  # all microbatches in one forward
    rerun_without_last: Callable[[], list[Window] | None]  # the same windows without their last microbatch

    @property
    def K(self) -> int:
        """Microbatches of a window."""
        return len(self.microbatches)


@dataclass(frozen=True, eq=False)
class Judgement:
    """One window's gradient, and what it is made of."""

    window: int  # its index
    gradient: Tensor  # before a clip that is allowed
    target: Tensor  # the objective's gradient
    weights: Weights
    faults: list[Fault]
    scaleless: bool = False  # whether a common factor says nothing

    @property
    def error(self) -> float:
        """‖g − G‖ / ‖G‖; NaN where the gradient is not finite."""
        if not self.gradient.isfinite().all():
            return math.nan
        return float((self.gradient - self.target).norm() / self.target.norm())


def unknown_weights(K: int) -> Weights:
    """Those of a gradient that cannot be fitted: NaN for each of K microbatches."""
    return Weights(torch.full((K,), math.nan), math.nan, math.nan, (), (), ())


def first_of_each(faults: Iterable[Fault], order: Sequence[str]) -> tuple[Fault, ...]:
    """One fault of each word, the weightiest first; "unknown" gives way to a fault that explains it."""
    first: dict[str, Fault] = {}
    for fault in faults:
        first.setdefault(fault.word, fault)
    if first.keys() & set(EXPLAINING):
        first.pop("unknown", None)
    return tuple(sorted(first.values(), key=lambda fault: order.index(fault.word)))


def near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two gradients are the same, up to rounding."""
    return float((one - other).norm()) <= tolerance * max(float(one.norm()), float(other.norm()))


def solve(gradient: Tensor, rows: Tensor) -> Weights:
    """The weights of all the rows in a gradient, no coordinate left out."""
    return fit(gradient, rows, sample=rows.shape[1] + 1)
