"""A finished run is cached, a stopped one is not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated

from labkit.cached_runs import LIMIT, cache_runs
from labkit.declare import Range, parameters


def made() -> tuple[list[int], object]:
    calls: list[int] = []

    @cache_runs
    def count(*, n: Annotated[int, Range(0, 1000)] = 3) -> Iterator[int]:
        """Count."""
        calls.append(n)
        yield from range(n)

    return calls, count


def test_a_second_look_yields_the_last_result_alone() -> None:
    calls, count = made()
    assert [list(count(n=4)), list(count(n=4)), list(count(n=2)), list(count(n=4))] == [[0, 1, 2, 3], [3], [0, 1], [3]]  # type: ignore[operator]
    assert calls == [4, 2]


def test_a_run_that_is_stopped_is_not_kept() -> None:
    calls, count = made()
    run = count(n=4)  # type: ignore[operator]
    assert next(run) == 0
    run.close()
    assert list(count(n=4)) == [0, 1, 2, 3] and calls == [4, 4]  # type: ignore[operator]


def test_a_run_without_results_is_run_again_and_the_oldest_goes_first() -> None:
    calls, count = made()
    assert list(count(n=0)) == list(count(n=0)) == [] and calls == [0, 0]  # type: ignore[operator]
    for n in range(1, LIMIT + 2):
        list(count(n=n))  # type: ignore[operator]
    assert list(count(n=2)) == [1] and list(count(n=1)) == [0] and calls[-1] == 1  # type: ignore[operator]


def test_it_is_still_a_generator_with_its_declaration_and_its_source() -> None:
    _, count = made()
    assert inspect.isgeneratorfunction(count) and inspect.getdoc(count) == "Count."
    assert parameters(count)["n"].default == 3  # type: ignore[arg-type]
    assert "calls.append" in inspect.getsource(inspect.unwrap(count))  # type: ignore[arg-type]
