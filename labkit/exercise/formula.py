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
from labkit.exercise.verdict import ROUNDED, Function, Verdict, aside, refusal, within
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
        if why := refusal(function, *self.names):
            return Verdict(False, tuple((check, False) for check in self.cases), why, "")
        outcomes: list[sandbox.Outcome] = []
        for case in self.cases.values():
            remaining = seconds - sum(outcome.seconds for outcome in outcomes)
            outcomes.append(sandbox.run(function, *copy.deepcopy(case), seconds=max(remaining, 0.01)))
        values = [_value(outcome.value) for outcome in outcomes]
        right = [_equal(value, self.right(*case)) for value, case in zip(values, self.cases.values(), strict=True)]
        outcome = outcomes[right.index(False) if False in right else 0]
        faults = f"{self._slip(values)} {self._stop(outcomes, values)}".strip()
        sentence = "Right in all cases." if all(right) else faults
        checks = tuple(zip(self.cases, right, strict=True))
        return Verdict(all(right), checks, sentence + aside(outcome), outcome.printed)

    def _slip(self, values: list[float]) -> str:
        """The first wrong number, and the wrong formula that gives all of them."""
        tried = zip(values, self.cases.values(), strict=True)
        pairs = [(value, case) for value, case in tried if math.isfinite(value)]
        value, case = next((pair for pair in pairs if not _equal(pair[0], self.right(*pair[1]))), (math.nan, ()))
        if math.isnan(value):
            return ""
        slips = (words for words, slip in self.wrong.items() if all(_equal(each, slip(*case)) for each, case in pairs))
        arguments = ", ".join(f"{name} = {each}" for name, each in zip(self.names, case, strict=True))
        numbers = f"For {arguments} your function gives {show(value)}, and {show(self.right(*case))} is right"
        return f"{numbers}: {next(slips, 'none of the usual slips gives these numbers')}."

    def _stop(self, outcomes: list[sandbox.Outcome], values: list[float]) -> str:
        """What is no number, or what stopped it."""
        for check, outcome, number in zip(self.cases, outcomes, values, strict=True):
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


def _equal(value: float, right: float) -> bool:
    return math.isclose(value, right, rel_tol=ROUNDED)
