"""Numbers in sentences: with how many digits, with which unit, and as which words."""

from __future__ import annotations

import math
import numbers

COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COUNTABLE = (  # what one alone is called; every other unit is the same for one
    *("all-gather", "all-reduce", "case", "column", "device", "document", "draw", "example", "gate", "good step"),
    *("ignored row", "image", "item", "layer", "loop", "message", "microbatch", "optimizer step", "point", "poll"),
    *("rank", "replica", "row", "run", "sample", "seed", "sequence", "step", "token", "training", "update", "voter"),
    *("way", "window"),
)
SINGULAR = {f"{one}{'es' if one.endswith('ch') else 's'}": one for one in COUNTABLE}


def as_float(value: object) -> float:
    """The value as a float, NaN where it is no number.

    >>> as_float(3), as_float("3")
    (3.0, nan)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def show(value: object) -> str:
    """A value as a person writes it: no trailing zeros, four significant digits unless it is exact.

    >>> show(2.0), show(158.9123), show(0.000125), show(8388608)
    ('2', '158.9', '0.000125', '8388608')
    """
    number = as_float(value)
    if math.isnan(number):
        return str(value)
    if math.isfinite(number) and number == int(number) and abs(number) < 1e15:
        return str(int(number))
    return f"{number:.4g}"


def three(value: float) -> str:
    """A number with three digits: no measured figure has more.

    >>> three(158.9123), three(8388608), three(1.1749999999999985)
    ('159', '8390000', '1.18')
    """
    return show(float(f"{float(f'{value:.12g}'):.3g}"))  # a tie is a tie, whatever its last bit


def whole(value: float) -> str:
    """A rate as people read it aloud: three digits, in thousands.

    >>> whole(257_432.1), whole(51.23)
    ('257,000', '51.2')
    """
    return f"{float(three(value)):,.0f}" if value >= 1000 else three(value)


def percent(share: float) -> str:
    """A share in per cent, with three digits.

    >>> percent(0.26543)
    '26.5 %'
    """
    return f"{three(100 * share)} %"


def with_unit(number: float, unit: str) -> str:
    """A number with its unit, in the singular for one of a thing that can be counted.

    >>> with_unit(1, "microbatches"), with_unit(2, "rows"), with_unit(1, "GFLOP/s"), with_unit(1, "times")
    ('1 microbatch', '2 rows', '1 GFLOP/s', '1 times')
    """
    figure = show(number)
    return f"{figure} {SINGULAR.get(unit, unit) if figure == '1' else unit}".rstrip()


def word(count: int) -> str:
    """A count in letters, as far as nine.

    >>> word(4), word(12)
    ('four', '12')
    """
    return COUNTS[count] if count < len(COUNTS) else str(count)


def times(count: int) -> str:
    """How often.

    >>> times(1), times(2), times(4)
    ('once', 'twice', 'four times')
    """
    return {1: "once", 2: "twice"}.get(count) or f"{word(count)} times"
