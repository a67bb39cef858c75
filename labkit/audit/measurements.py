"""What the parts of an audit tell each other: everything that was seen, and faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from labkit.audit.references import References
from labkit.audit.window import Window
from labkit.errors import LabError
from labkit.fit import Weights, fit
from labkit.rules import rule

SCALELESS = ("step-per-microbatch", "unscale-early", "clip-scaled")  # beside these a common factor says nothing


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    word: str
    said: str
    alike: tuple[str, ...] = ()  # other words that would look the same here

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
class Seen:
    """Everything that was measured of a step."""

    windows: list[Window]
    references: list[References]
    still: References  # those of the first window at the weights before it
    sequences: list[References] | None  # one for each window, of single sequences
    owner: Tensor  # which microbatch each sequence stands in
    microbatches: Sequence[Any]
    meant: str
    tolerance: float
    again: Window  # one window with other random numbers
    whole: References | None  # all microbatches in one forward
    fewer: Callable[[], list[Window] | None]  # the same windows without their last microbatch

    @property
    def K(self) -> int:
        """Microbatches of a window."""
        return len(self.microbatches)


@dataclass(frozen=True, eq=False)
class Judged:
    """One window's gradient, and what it is made of."""

    at: int  # which window
    gradient: Tensor  # before a clip that is allowed
    right: Tensor
    weights: Weights
    faults: list[Fault]
    scaleless: bool = False  # whether a common factor says nothing

    @property
    def error(self) -> float:
        """‖g − G‖ / ‖G‖."""
        return float((self.gradient - self.right).norm() / self.right.norm())


def near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two gradients are the same, up to rounding."""
    return float((one - other).norm()) <= tolerance * max(float(one.norm()), float(other.norm()))


def solve(gradient: Tensor, rows: Tensor) -> Weights:
    """The weights of all the rows in a gradient, no coordinate left out."""
    return fit(gradient, rows, sample=rows.shape[1] + 1)
