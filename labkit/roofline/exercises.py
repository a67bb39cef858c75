"""The exercises of the roofline lab: the intensity of a matmul, and the least time that a roof allows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from labkit.exercise.formula import Exercise
from labkit.exercise.verdict import Function, Verdict, exercise

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


@exercise
def intensity(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `intensity(microbatch, width, itemsize)`: FLOP/byte of a matmul (b × d)·(d × d), operands moved once.

    >>> intensity(lambda b, d, itemsize: 2 * b * d * d / (2 * b * d + d * d)).sentence
    'For microbatch = 1, width = 64, itemsize = 4 your function gives 1.939, and 0.4848 is right: itemsize is missing.'

    2bd² FLOP over itemsize · (2bd + d²) bytes: input, weights and output. Source: Williams, Waterman, Patterson 2009.
    """
    return INTENSITY.judge(function, seconds)


TIMES: dict[str, Callable[[float, float, float, float], float]] = {
    "": lambda flop, moved, bandwidth, ceiling: max(flop / ceiling, moved / bandwidth),
    "that is the sum of both times, and at best one hides behind the other": (
        lambda flop, moved, bandwidth, ceiling: flop / ceiling + moved / bandwidth
    ),
    "that is the shorter of the two times, and the kernel ends with the longer": (
        lambda flop, moved, bandwidth, ceiling: min(flop / ceiling, moved / bandwidth)
    ),
    "that is the time of the arithmetic alone": lambda flop, moved, bandwidth, ceiling: flop / ceiling,
    "that is the time of the memory alone": lambda flop, moved, bandwidth, ceiling: moved / bandwidth,
    "that is the rate in GFLOP/s that the roof allows, and the time is FLOP / rate": (
        lambda flop, moved, bandwidth, ceiling: min(flop / moved * bandwidth, ceiling)
    ),
    "that is microseconds: FLOP over GFLOP/s is nanoseconds": (
        lambda flop, moved, bandwidth, ceiling: max(flop / ceiling, moved / bandwidth) / 1e3
    ),
    "that is seconds: FLOP over GFLOP/s is nanoseconds": (
        lambda flop, moved, bandwidth, ceiling: max(flop / ceiling, moved / bandwidth) / 1e9
    ),
    "bandwidth and ceiling are swapped": lambda flop, moved, bandwidth, ceiling: max(flop / bandwidth, moved / ceiling),
    "a multiply-add was counted as one FLOP, and flop holds both already": (
        lambda flop, moved, bandwidth, ceiling: max(flop / 2 / ceiling, moved / bandwidth)
    ),
}

MATMUL_TIME = Exercise(
    ("flop", "moved", "bandwidth", "ceiling"),
    {
        "memory-bound": (6000.0, 4000.0, 80.0, 1000.0),
        "compute-bound": (300000.0, 4000.0, 80.0, 1000.0),
        "at the ridge": (50000.0, 4000.0, 80.0, 1000.0),
        "a machine with a low ceiling": (6000.0, 4000.0, 80.0, 20.0),
        "no arithmetic at all": (0.0, 4000.0, 80.0, 1000.0),
    },
    TIMES[""],
    TIMES,
)


@exercise
def matmul_time(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `matmul_time(flop, moved, bandwidth, ceiling)`: the nanoseconds that a kernel takes at the least.

    >>> verdict = matmul_time(lambda flop, moved, bandwidth, ceiling: flop / ceiling + moved / bandwidth)
    >>> verdict.sentence.partition("is right: ")[2]
    'that is the sum of both times, and at best one hides behind the other.'

    FLOP, bytes, GB/s and GFLOP/s in; max(flop / ceiling, moved / bandwidth) in ns, since 10⁹ is in both rates.
    Source: Williams, Waterman, Patterson 2009.
    """
    return MATMUL_TIME.judge(function, seconds)
