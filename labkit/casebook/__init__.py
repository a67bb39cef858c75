"""The casebook: faults that were really shipped, each run live beside the right loop.

A new case is one entry; the lab's list and the picture of all follow by themselves. docs/contributing.md adds one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from labkit.casebook.entry import FAMILIES as FAMILIES
from labkit.casebook.entry import Case as Case
from labkit.casebook.entry import Number as Number
from labkit.casebook.entry import add as add
from labkit.casebook.entry import all as all
from labkit.casebook.entry import find as find
from labkit.casebook.entry import paired
from labkit.casebook.symptoms import symptoms as symptoms
from labkit.declare import Choice, Range, quantity


def titles() -> tuple[str, ...]:
    """Id and topic of every case, also of those that were added.

    >>> titles()[1]
    'B02 nobody divides by K'
    """
    return tuple(each.title for each in all())


@dataclass(frozen=True)
class Ran:
    """A case, run."""

    case: str = quantity("id and topic")
    numbers: tuple[Number, ...] = quantity("every number, wrong and right; the first is compared")
    verdicts: tuple[str, ...] = quantity("the audit's word for the wrong loop and the right one, where it can judge")
    progress: float = quantity("share of the run that is done")

    @property
    def compared(self) -> Number:
        """The number that the case is about."""
        return self.numbers[0]


def case(
    *, case: Annotated[str, Choice(titles(), help="a fault that was shipped")] = "B01 mean of means"
) -> Iterator[Ran]:
    """Run a case: its wrong loop, its right one, and the audit where it can judge them.

    >>> *_, found = case()
    >>> found.compared.wrong, found.compared.right, found.verdicts
    (5.0, 3.5, ('mean-of-means', 'token-mean'))

    A generator of the result so far. Cases of several processes run on real ranks, which take seconds to start.
    """
    chosen = find(case)
    wrong = chosen.numbers(chosen.wrong)
    yield Ran(case, paired(wrong, dict.fromkeys(wrong, math.nan)), (), 0.3)
    numbers = paired(wrong, chosen.numbers(chosen.right))
    yield Ran(case, numbers, (), 0.6 if chosen.step else 1.0)
    if chosen.step:
        yield Ran(case, numbers, tuple(report.verdict for report in chosen.audits()), 1.0)


@dataclass(frozen=True)
class Overview:
    """Many cases, each as one ratio."""

    titles: tuple[str, ...] = quantity("id and topic")
    compared: tuple[str, ...] = quantity("the number that is compared")
    wrong: tuple[float, ...] = quantity("what the wrong loop gives")
    right: tuple[float, ...] = quantity("what the right loop gives")
    ratios: tuple[float, ...] = quantity("|wrong / right|")
    within: float = quantity("the factor that counts as near")
    near: int = quantity("cases that are off by less than this factor", "cases")
    progress: float = quantity("share of the cases that is done")


def overview(
    *,
    family: Annotated[str, Choice(("all", *FAMILIES), help="which cases")] = "all",
    within: Annotated[
        float, Range(1.01, 10, log=True, help="a number off by less than this factor counts as near")
    ] = 2,
) -> Iterator[Overview]:
    """Run every case of a family: wrong over right.

    >>> *_, found = overview(family="data")
    >>> [round(each, 2) for each in found.ratios], found.near
    ([2.17, 2.5, 0.33], 0)

    A generator of the result so far. The sign of a ratio is left out.
    """
    chosen = [each for each in all() if family in ("all", each.family)]
    numbers: list[Number] = []
    for each in chosen:
        numbers.append(each.measured()[0])
        ratios = tuple(abs(number.ratio) for number in numbers)
        yield Overview(
            titles=tuple(case.title for case in chosen[: len(numbers)]),
            compared=tuple(number.name for number in numbers),
            wrong=tuple(number.wrong for number in numbers),
            right=tuple(number.right for number in numbers),
            ratios=ratios,
            within=within,
            near=sum(1 / within < ratio < within for ratio in ratios),
            progress=len(numbers) / len(chosen),
        )
