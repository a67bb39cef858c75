"""A second look at a long run is instant: its finished result is kept by its parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
KEPT = 64  # results of one function; the one that was kept first goes first


def remembered(run: Callable[P, Iterator[R]]) -> Callable[P, Iterator[R]]:
    """A generator whose last result is all that it yields when it is called with the same parameters again.

    >>> @remembered
    ... def squares(*, up_to: int):
    ...     for n in range(up_to):
    ...         yield n * n
    >>> list(squares(up_to=4)), list(squares(up_to=4))
    ([0, 1, 4, 9], [9])

    A run that was stopped is not kept. The function must be pure, and its results may not be changed by who gets them.
    """
    kept: dict[object, R] = {}

    @functools.wraps(run)
    def again(*args: P.args, **values: P.kwargs) -> Iterator[R]:
        key = args, tuple(sorted(values.items()))
        if key in kept:
            yield kept[key]
            return
        result = None
        for result in run(*args, **values):
            yield result
        if result is not None:
            kept[key] = result
            if len(kept) > KEPT:
                del kept[next(iter(kept))]

    return again
