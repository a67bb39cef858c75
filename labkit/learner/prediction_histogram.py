"""How the predictions of a class are spread, before a discussion and after it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from labkit.declare import Value, quantity
from labkit.learner.class_predictions import Entry
from labkit.wording import show

MOST = 10  # rows of different numbers; more are put together
SAME = 5e-4  # numbers this close are one row


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the histogram."""

    label: str = quantity("the number, or the range that it is in")
    before: int = quantity("writers whose last prediction before the discussion is here")
    after: int = quantity("the same after it")
    answer: bool = quantity("whether the answer is here")


@dataclasses.dataclass(frozen=True)
class Tally:
    """The last prediction of each writer in both rounds."""

    before: tuple[float, ...] = quantity("predictions of the first round")
    after: tuple[float, ...] = quantity("predictions of the second round")
    elsewhere: int = quantity("writers who of late only predicted with other settings")
    counts: Mapping[str, int] = quantity("how many predictions of each writer were read")

    def rows(self, answer: float | None = None) -> list[Row]:
        """The histogram, from the lowest row that is not empty to the highest.

        >>> [(row.label, row.before) for row in Tally((160, 150, 160), (), 0, {}).rows()]
        [('150', 1), ('160', 2)]
        """
        numbers = [*self.before, *self.after]
        known = answer is not None and math.isfinite(answer)
        distinct = _distinct([*numbers, answer] if known and answer is not None else numbers)
        edges = _edges(numbers) if len(distinct) > MOST else [-math.inf, *_between(distinct), math.inf]
        labels = (
            [show(number) for number in distinct]
            if len(distinct) <= MOST
            else list(itertools.starmap(_label, itertools.pairwise(edges)))
        )
        counts = [
            _counts(edges, each) for each in (self.before, self.after, [answer] if known and answer is not None else [])
        ]
        rows = zip(labels, *counts, strict=True) if numbers or known else ()
        histogram = [Row(label, before, after, bool(here)) for label, before, after, here in rows]
        full = [at for at, row in enumerate(histogram) if row.before or row.after or row.answer]
        return histogram[full[0] : full[-1] + 1] if full else []


def tally(
    entries: Sequence[Entry],
    experiment: str,
    values: Mapping[str, Value],
    discussed: Mapping[str, int] | None = None,
    late: float = 0.0,
) -> Tally:
    """Count one vote a writer and round; `discussed`: how many predictions of each writer the first round had.

    >>> predictions = [Entry("a", "roofline.ceiling", number, {"intensity": 2}, 0.0) for number in (100, 120, 160)]
    >>> rounds = tally(predictions, "roofline.ceiling", {"intensity": 2}, {"a": 2})
    >>> rounds.before, rounds.after
    ((120,), (160,))

    Rounds are told apart by the order in which each writer wrote: clocks of other machines are not compared. Those who
    only predicted with other settings count where they did so after `late`.
    """
    votes = [entry for entry in entries if entry.experiment == experiment]
    mine: dict[str, list[float]] = {}
    for entry in votes:
        if dict(entry.values) == dict(values):
            mine.setdefault(entry.writer, []).append(entry.number)
    cut = {writer: len(numbers) if discussed is None else discussed.get(writer, 0) for writer, numbers in mine.items()}
    before = [numbers[: cut[writer]] for writer, numbers in mine.items()]
    after = [numbers[cut[writer] :] for writer, numbers in mine.items()]
    return Tally(
        tuple(numbers[-1] for numbers in before if numbers),
        tuple(numbers[-1] for numbers in after if numbers),
        len({entry.writer for entry in votes if entry.at >= late} - set(mine)),
        {writer: len(numbers) for writer, numbers in mine.items()},
    )


def close(numbers: Sequence[float], answer: float, within: float = 0.1) -> int:
    """How many lie within a tenth of the answer.

    >>> close([150, 160, 300], 160)
    2
    """
    return sum(abs(number - answer) <= within * abs(answer) for number in numbers)


# Rows: one for each number while they are few; then ranges, in even steps or in powers of ten.


def _distinct(numbers: Sequence[float]) -> list[float]:
    distinct: list[float] = []
    for number in sorted(numbers):
        if not distinct or not math.isclose(number, distinct[-1], rel_tol=SAME):
            distinct.append(number)
    return distinct


def _between(numbers: Sequence[float]) -> list[float]:
    return [low / 2 + high / 2 for low, high in itertools.pairwise(numbers)]


def _edges(numbers: Sequence[float]) -> list[float]:
    """Borders of at most MOST + 2 rows; the first row and the last hold all outliers."""
    tenths = statistics.quantiles(numbers, n=20, method="inclusive")
    low, high = tenths[0], tenths[-1]
    if low > 0 and high / low > 100:
        first = math.floor(math.log10(low))
        last = min(math.ceil(math.log10(high)), first + MOST)
        return [-math.inf, *(float(f"1e{power}") for power in range(first, last + 1)), math.inf]
    step = _step((high - low) / MOST or abs(low) / MOST or 1.0)
    first = math.floor(low / step)
    return [-math.inf, *(step * (first + n) for n in range(min(math.ceil(high / step) - first, MOST) + 1)), math.inf]


def _step(least: float) -> float:
    """The next of 1, 2, 5, 10, … that is no smaller."""
    power = math.floor(math.log10(least))
    return next(step for factor in (1, 2, 5, 10) if (step := float(f"{factor}e{power}")) >= least * (1 - 1e-9))


def _label(low: float, high: float) -> str:
    if math.isinf(low):
        return f"below {show(high)}"
    return f"{show(low)} or more" if math.isinf(high) else f"{show(low)} … {show(high)}"


def _counts(edges: Sequence[float], numbers: Sequence[float | None]) -> list[int]:
    return [
        sum(number is not None and low <= number < high for number in numbers)
        for low, high in itertools.pairwise(edges)
    ]
