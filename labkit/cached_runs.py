"""A second look at a long run is instant: finished results are cached by their parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
LIMIT = 64  # results of one function; the oldest is dropped first


def cache_runs(run: Callable[P, Iterator[R]]) -> Callable[P, Iterator[R]]:
    """Cache a generator: called again with the same parameters, it yields its last result alone.

    >>> @cache_runs
    ... def squares(*, up_to: int):
    ...     for n in range(up_to):
    ...         yield n * n
    >>> list(squares(up_to=4)), list(squares(up_to=4))
    ([0, 1, 4, 9], [9])

    A run that was stopped is not cached. The function must be pure, and callers must not change its results.
    """
    results: dict[object, R] = {}

    @functools.wraps(run)
    def again(*args: P.args, **values: P.kwargs) -> Iterator[R]:
        key = args, tuple(sorted(values.items()))
        if key in results:
            yield results[key]
            return
        result = None
        for result in run(*args, **values):
            yield result
        if result is not None:
            results[key] = result
            if len(results) > LIMIT:
                del results[next(iter(results))]

    return again
