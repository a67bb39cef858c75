"""Exercises whose answer is a formula: the right one, and what the usual slips compute."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from labkit.exercise import sandbox
from labkit.exercise.verdict import ROUNDED, Function, Verdict, aside, refused, within
from labkit.wording import show


@dataclass(frozen=True)
class Exercise:
    """A formula to write: its arguments, the cases it is tried on, the right one, and what wrong ones compute."""

    names: tuple[str, ...]
    cases: Mapping[str, tuple[Any, ...]]
    right: Callable[..., float]
    wrong: Mapping[str, Callable[..., float]]

    def judge(self, function: Function, seconds: float) -> Verdict:
        """The verdict on a function of these arguments."""
        if why := refused(function, *self.names):
            return Verdict(False, tuple((check, False) for check in self.cases), why, "")
        outcomes: list[sandbox.Outcome] = []
        for case in self.cases.values():
            left = seconds - sum(outcome.seconds for outcome in outcomes)
            outcomes.append(sandbox.run(function, *copy.deepcopy(case), seconds=max(left, 0.01)))
        found = [_value(outcome.value) for outcome in outcomes]
        right = [_equal(value, self.right(*case)) for value, case in zip(found, self.cases.values(), strict=True)]
        shown = outcomes[right.index(False) if False in right else 0]
        said = "Right in all cases." if all(right) else f"{self._slip(found)} {self._stop(outcomes, found)}".strip()
        checks = tuple(zip(self.cases, right, strict=True))
        return Verdict(all(right), checks, said + aside(shown), shown.printed)

    def _slip(self, found: list[float]) -> str:
        """The first wrong number, and the wrong formula that gives all of them."""
        tried = [(value, case) for value, case in zip(found, self.cases.values(), strict=True) if math.isfinite(value)]
        off = [(value, case) for value, case in tried if not _equal(value, self.right(*case))]
        if not off:
            return ""
        ways = (words for words, wrong in self.wrong.items() if all(_equal(each, wrong(*case)) for each, case in tried))
        given = ", ".join(f"{name} = {each}" for name, each in zip(self.names, off[0][1], strict=True))
        numbers = f"For {given} your function gives {show(off[0][0])}, and {show(self.right(*off[0][1]))} is right"
        return f"{numbers}: {next(ways, 'none of the usual slips gives these numbers')}."

    def _stop(self, outcomes: list[sandbox.Outcome], found: list[float]) -> str:
        """What is no number, or what stopped it."""
        for check, outcome, number in zip(self.cases, outcomes, found, strict=True):
            if not math.isfinite(number):
                value = outcome.value
                what = str(value) if value is None or isinstance(value, float) else f"a {type(value).__name__}"
                stop = outcome.error or f"Your function returns {what}, which is no finite number."
                return stop if outcome is outcomes[0] else within(check, stop)
        return ""


def _value(value: object) -> float:
    """The number that was returned, NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Tensor | np.ndarray | np.generic):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _equal(found: float, right: float) -> bool:
    return math.isclose(found, right, rel_tol=ROUNDED)
