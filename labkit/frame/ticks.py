"""The ticks of an axis: round numbers, at most five, and among them those that matter."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from matplotlib.ticker import Locator

MOST = 5
APART = 0.09  # of an axis as long as the picture is wide: nearer numbers cannot be told apart
Ticks = tuple[float, ...]


@functools.lru_cache(maxsize=1024)
def linear(low: float, high: float, among: Ticks = (), apart: float = APART, whole: bool = False) -> Ticks:
    """Round numbers, evenly apart, if possible through the weightiest of those `among` them that matter, the first.

    >>> linear(0.83, 1.42), linear(0, 37), linear(0.4, 2.6, whole=True)
    ((1.0, 1.2, 1.4), (0.0, 10.0, 20.0, 30.0), (1.0, 2.0))
    >>> linear(-0.2, 1.3), linear(-0.2, 1.3, among=(1,))
    ((0.0, 0.4, 0.8, 1.2), (0.0, 0.5, 1.0))
    >>> linear(-6, 38, among=(0, 37.2)), linear(0, 1300, among=(640.0,))
    ((0.0, 10.0, 20.0, 30.0, 37.2), (0.0, 400.0, 640.0, 800.0, 1200.0))

    Of two or more the outermost are the ends, beyond which there are no ticks. `apart`: the least distance of two
    ticks, as a share of the axis. `whole`: what is counted has no fractions.
    """
    axis = _Axis(low, high, among, apart, float)
    ten = math.floor(math.log10((high - low) or 1.0)) - 1
    steps = [mantissa * 10.0**k for k in range(ten, ten + 4) for mantissa in (1, 2, 2.5, 4, 5)]
    steps = [step for step in steps if step >= apart * (high - low) and (not whole or step % 1 == 0)]
    grids = [list(_multiples(step, *axis.ends)) for step in steps]
    through = [grid for grid in grids if axis.fixed[:1] and axis.fixed[0] in grid]
    few = axis.first(through)
    return few if len(few) >= 3 else axis.first(grids)


@functools.lru_cache(maxsize=1024)
def logarithmic(low: float, high: float, among: Ticks = (), apart: float = APART, base: int = 10) -> Ticks:
    """Powers of a base in even strides from 1; where they are fewer than three, round numbers between them.

    >>> logarithmic(0.5, 2000), logarithmic(1e-3, 1e5), logarithmic(0.125, 512, base=2)
    ((1.0, 10.0, 100.0, 1000.0), (0.01, 1.0, 100.0, 10000.0), (0.125, 1.0, 8.0, 64.0, 512.0))
    >>> logarithmic(0.3, 1300, among=(640.0,)), logarithmic(2, 40), logarithmic(3, 7)
    ((1.0, 10.0, 100.0, 640.0), (3.0, 10.0, 30.0), (3.0, 4.0, 5.0, 6.0, 7.0))

    `among` and `apart` as in `linear`.
    """
    axis = _Axis(low, high, among, apart, math.log)
    powers = axis.first(_powers(base, stride, (1,), *axis.ends) for stride in itertools.count(1))
    between = [axis.ticks(_powers(base, 1, mantissas, *axis.ends)) for mantissas in ((1, 3), (1, 2, 5)) if base == 10]
    for ticks in (powers, *between):
        if 3 <= len(ticks) <= axis.most:
            return ticks
    return powers if len(powers) > 1 or high > 10 * low else linear(low, high, among, apart)


class Rounded(Locator):
    """The ticks that `choose` finds between the limits, or `only` those that an experiment names."""

    def __init__(self, choose: Callable[..., Ticks], apart: Callable[[], float]) -> None:
        self.choose, self.apart = choose, apart
        self.among: Ticks = ()
        self.only: Ticks | None = None

    def __call__(self) -> Any:
        """The ticks of the axis as it is now."""
        assert self.axis
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """The ticks between two limits, in whatever order."""
        if self.only is not None:
            return self.only
        return self.choose(*sorted((float(vmin), float(vmax))), self.among, self.apart())


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Where ticks can stand: distances are shares of the axis."""

    low: float
    high: float
    among: Ticks
    apart: float
    scale: Callable[[float], float]

    @property
    def most(self) -> int:
        return max(2, min(MOST, int(0.75 / self.apart)))

    @property
    def fixed(self) -> list[float]:
        """What matters, without those that are too near to a weightier one."""
        fixed: list[float] = []
        for place in map(float, self.among):
            if self.low <= place <= self.high and self.is_free(place, fixed):
                fixed.append(place)
        return fixed[: self.most]

    @property
    def ends(self) -> tuple[float, float]:
        """Where the first and the last tick may stand."""
        return (min(self.fixed), max(self.fixed)) if len(self.fixed) > 1 else (self.low, self.high)

    def is_free(self, place: float, ticks: Iterable[float]) -> bool:
        """Whether a place is far enough from ticks."""
        wide = self.scale(self.high) - self.scale(self.low)
        return all(abs(self.scale(place) - self.scale(tick)) >= self.apart * wide for tick in ticks)

    def ticks(self, grid: Iterable[float]) -> Ticks:
        """What matters, and a grid where there is room for it."""
        fixed = self.fixed
        return tuple(sorted([*fixed, *(place for place in grid if self.is_free(place, fixed))]))

    def first(self, grids: Iterable[Iterable[float]]) -> Ticks:
        """The first grid, from fine to coarse, whose ticks are few enough."""
        return next((ticks for ticks in map(self.ticks, grids) if len(ticks) <= self.most), tuple(sorted(self.fixed)))


def _multiples(step: float, low: float, high: float) -> Iterator[float]:
    for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield float(f"{step * k:.12g}")


def _powers(base: int, stride: int, mantissas: Ticks, low: float, high: float) -> Iterator[float]:
    for k in range(math.floor(math.log(low, base)) - 1, math.ceil(math.log(high, base)) + 1):
        for place in (float(mantissa * base**k) for mantissa in mantissas):
            if k % stride == 0 and low * (1 - 1e-9) <= place <= high * (1 + 1e-9):
                yield place
