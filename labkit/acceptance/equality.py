"""The first two gates: is the batch the same, and does the candidate make the base's update?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.acceptance.record import FAILED, PASSED, UNSURE
from labkit.acceptance.side import TestedStep, Trace, Twin
from labkit.audit.measurements import Fault
from labkit.audit.references import References
from labkit.errors import LabError
from labkit.tolerance import Tolerance, depth, tolerance, unit_roundoff
from labkit.wording import percent, times

INVARIANTS = ("systems", "large-batch")
NO_TEST = 0.01  # a tolerance above this share would let a fault pass: then nothing was tested
Outcome = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Examples:
    """Both partitions at the base's weights in float64, and what rounding explains."""

    base: References
    candidate: References
    rounding: Tolerance | None  # in the base's precision; None where it leaves no digit
    derivation: str
    exact: float  # what rounding explains in float64

    @property
    def bound(self) -> float:
        """How far two gradients may be apart; NaN where no bound exists."""
        return self.rounding.value if self.rounding else math.nan

    @property
    def difference(self) -> float:
        """How far the two summed gradients are apart, relative."""
        return distance(self.candidate.gradients.sum(0), self.base.gradients.sum(0))


def distance(one: Tensor, other: Tensor) -> float:
    """‖one − other‖ / ‖other‖.

    >>> round(distance(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])), 6)
    0.1
    """
    return float((one - other).norm() / other.norm())


def examples(base: TestedStep, candidate: TestedStep, twins: tuple[Twin, Twin]) -> Examples:
    """The gradients of both sides' microbatches at the base's weights. LabError where the models are no pair."""
    start, other = base.window.start, candidate.window.start
    if twins[0].sampled.sizes != twins[1].sampled.sizes:
        sizes = f"{len(other):,} numbers in {len(twins[1].sampled.sizes)} parameters"
        against = f"{len(start):,} in {len(twins[0].sampled.sizes)}"
        raise LabError(f"the candidate trains {sizes}, the base {against}: try two models of the same parameters")
    rounded = 2 * unit_roundoff(max(base.dtype, candidate.dtype, key=unit_roundoff))
    if (error := distance(other, start)) > rounded:
        raise LabError(f"the candidate starts from weights that are {percent(error)} off: try the same seed in both")
    before, after = (twin.at(start) for twin in twins)
    exact = _bound(base, candidate, before, torch.float64).value
    try:
        derived = _bound(base, candidate, before, base.dtype)
    except LabError as error:
        return Examples(before, after, None, str(error), exact)
    return Examples(before, after, derived, str(derived), exact)


def _bound(base: TestedStep, candidate: TestedStep, references: References, dtype: torch.dtype) -> Tolerance:
    """Every coordinate adds up a term of each valid token, and one of each microbatch."""
    terms = base.tokens + max(len(base.microbatches), len(candidate.microbatches))
    return tolerance(references.gradients, count=terms, depth=depth(base.model), dtype=dtype)


def check_invariant(invariant: str, base: TestedStep, candidate: TestedStep, gradients: Examples) -> Outcome:
    """The first gate: whether what was declared fixed stays fixed."""
    a, b = base.tokens, candidate.tokens
    if invariant == "large-batch":
        changed = f"{a} valid tokens an update become {b}" if a != b else f"{a} valid tokens an update stay {b}"
        why = "gradients need not be equal then, and nothing here shows that training stays as good"
        return UNSURE, f"declared large-batch, {changed}: {why}. Speed alone adopts nothing: make a quality run."
    if a != b:
        return FAILED, f"the candidate's update holds {b} valid tokens, the base's {a}: another global batch."
    layers = (*base.random_layers, *base.batch_layers, *candidate.random_layers, *candidate.batch_layers)
    if gradients.difference > gradients.exact and not layers:  # else the next gate names them
        why = f"the sums of their gradients differ by {percent(gradients.difference)}"
        return FAILED, f"as many valid tokens, {a}, but {why}: other examples, or a layer that looks at the batch."
    steps = base.report.optimizer_steps, candidate.report.optimizer_steps
    if steps[0] != steps[1]:
        return FAILED, f"the optimizer steps {times(steps[1])} where the base's steps {times(steps[0])}."
    K = len(base.microbatches), len(candidate.microbatches)
    return PASSED, f"the same {a} valid tokens in one update, in {K[0]} microbatches before and {K[1]} after."


def faults(side: TestedStep) -> list[Fault]:
    """The faults that its audit names; random numbers do not count, they are reported or turned off elsewhere."""
    return [each for each in side.report.details if each.word != "nondeterministic"]


def audit_outcome(base: TestedStep, candidate: TestedStep) -> Outcome | None:
    """The outcome where an audit or a random layer stands in the way of comparing the sides; else None."""
    if errors := faults(candidate):
        return FAILED, " ".join(f"the candidate's audit says {each.word}: {each.said}" for each in errors)
    if errors := faults(base):
        return UNSURE, f"the base itself is wrong, {errors[0].word}: {errors[0].said} Correct it first."
    for side in (base, candidate):
        if side.random_layers:
            return UNSURE, f"in the {side.name} {', '.join(side.random_layers)} draw random numbers: turn them off."
        if "nondeterministic" in side.report.faults:
            share = percent(side.report.second_run)
            return UNSURE, f"the {side.name} is random: with other random numbers its gradient is {share} off."
    return None


def check_equality(
    base: TestedStep, candidate: TestedStep, gradients: Examples, deltas: tuple[float, float]
) -> Outcome:
    """The second gate: whether gradient and parameters of one update are equal, up to rounding.

    deltas: how far the parameters' moves are apart, and what a gradient within its tolerance explains.
    """
    if outcome := audit_outcome(base, candidate):
        return outcome
    if gradients.rounding is None:
        return UNSURE, f"{gradients.derivation}, in both sides."
    if gradients.bound > NO_TEST:
        why = f"rounding alone may explain {percent(gradients.bound)} of a difference, too much for a test"
        return UNSURE, f"{why}: build both sides in float64 for it."
    difference = distance(candidate.gradient, base.gradient)
    words = f"gradients before clipping {difference:.1g} off (rounding explains {gradients.bound:.1g})"
    words = f"{words}, parameters after one update {deltas[0]:.1g} off ({deltas[1]:.1g})"
    if difference <= gradients.bound and deltas[0] <= deltas[1]:
        return PASSED, f"{words}."
    if unit_roundoff(candidate.dtype) > unit_roundoff(base.dtype):
        name = str(candidate.dtype).removeprefix("torch.")
        return UNSURE, f"{words}: it computes in {name}, another method. A quality run over several seeds can tell."
    looks = f", {', '.join(candidate.batch_layers)} looks at the batch" if candidate.batch_layers else ""
    return FAILED, f"{words}: this is another update{looks}."


def delta_tolerance(base: TestedStep, controls: list[Trace], bound: float) -> float:
    """What a gradient within its tolerance, and rounding of the parameters, explain of the parameters' moves."""
    size = float(base.delta.norm())
    if not size > 0:
        return math.nan
    change = max((distance(control.first, base.delta) for control in controls), default=0.0)
    rounded = 4 * unit_roundoff(base.dtype) * float(base.window.start.norm()) / size
    return max(bound, change) + rounded
