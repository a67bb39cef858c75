"""The exercise of the roofline lab."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from labkit.check.formula import Exercise
from labkit.check.verdict import Function, Verdict

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


def intensity(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `intensity(microbatch, width, itemsize)`: FLOP/byte of a matmul (b × d)·(d × d), operands moved once.

    >>> intensity(lambda b, d, itemsize: 2 * b * d * d / (2 * b * d + d * d)).sentence
    'For microbatch = 1, width = 64, itemsize = 4 your function gives 1.939, and 0.4848 is right: itemsize is missing.'

    2bd² FLOP over itemsize · (2bd + d²) bytes: input, weights and output. Source: Williams, Waterman, Patterson 2009.
    """
    return INTENSITY.judge(function, seconds)
