"""Exercises whose answer is a formula: the right one, and what the usual slips compute."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from labkit import sandbox
from labkit.declare import show
from labkit.verdict import EMPTY, ROUNDED, Function, Verdict, aside, refused, within


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


def _mean(total: float, count: int) -> float:
    return total / count if count else 0.0


TOKEN_MEAN = Exercise(
    ("sums", "counts"),
    {
        "equal counts": ([6.0, 2.0], [4, 4]),
        "unequal counts": ([8.0, 6.0], [1, 3]),
        "one microbatch": ([9.0], [4]),
        EMPTY: ([0.0, 5.0, 8.0], [0, 4, 2]),
        "many microbatches": ([3.5, 9.25, 1.0, 22.0, 7.75, 0.5, 31.0], [2, 5, 1, 13, 4, 1, 9]),
    },
    lambda s, n: sum(s) / sum(n),
    {
        "it is the mean of the means, so a token of a short microbatch weighs more (mean-of-means)": (
            lambda s, n: sum(map(_mean, s, n)) / len(n)
        ),
        "it is the mean of the means of those that are not empty, so a token of a short one weighs more": (
            lambda s, n: sum(map(_mean, s, n)) / sum(count > 0 for count in n)
        ),
        "the means are added and never divided (sum-of-means)": lambda s, n: sum(map(_mean, s, n)),
        "the sums are added and never divided (token-sum)": lambda s, n: sum(s),
        "the total is divided by the number of microbatches, not of tokens": lambda s, n: sum(s) / len(n),
        "the loss per token is divided by the number of microbatches again (double-division)": (
            lambda s, n: sum(s) / sum(n) / len(n)
        ),
        "// drops the fraction, and / keeps it": lambda s, n: sum(s) // sum(n),
        "only the last microbatch is left (last-microbatch-only)": lambda s, n: s[-1] / n[-1],
        "it is upside down, tokens per loss": lambda s, n: sum(n) / sum(s),
    },
)
FLOP = {"": 2, "a multiply-add is two FLOP and was counted as one": 1}
BYTES: dict[str, Callable[[int, int], int]] = {
    "": lambda b, d: 2 * b * d + d * d,
    "one of the two b × d matrices, input or output, was not counted": lambda b, d: b * d + d * d,
    "the d × d weights were not counted": lambda b, d: 2 * b * d,
    "only the d × d weights were counted": lambda b, d: d * d,
    "only one b × d matrix was counted": lambda b, d: b * d,
}
ITEM: dict[str, Callable[[int], int]] = {
    "": lambda size: size,
    "itemsize is missing": lambda size: 1,
    "bits were counted, not bytes": lambda size: 8 * size,
}
POWER = {"": 1, "it is upside down, byte per FLOP": -1}


def _intensities() -> dict[str, Callable[..., float]]:
    """Every combination of slips, the fewest first; the first is none."""
    tables = sorted(itertools.product(FLOP, BYTES, ITEM, POWER), key=lambda slips: sum(map(bool, slips)))
    return {"; ".join(filter(None, slips)): functools.partial(_intensity, slips) for slips in tables}


def _intensity(slips: tuple[str, str, str, str], b: int, d: int, itemsize: int) -> float:
    flop, moved, size, power = slips
    return (FLOP[flop] * b * d * d / (BYTES[moved](b, d) * ITEM[size](itemsize))) ** POWER[power]


INTENSITY = Exercise(
    ("microbatch", "width", "itemsize"),
    {
        "a single row": (1, 64, 4),
        "as many rows as columns": (64, 64, 2),
        "more rows than columns": (512, 96, 4),
        "numbers of 8 bytes": (16, 32, 8),
        "numbers of 1 byte": (8, 128, 1),
    },
    _intensities()[""],
    _intensities(),
)
