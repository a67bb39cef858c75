"""A loop that waits for its data: the modelled queue against one played out, and a real thread that runs ahead."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.declare import parameters
from labkit.errors import LabError
from labkit.throughput import loader
from labkit.throughput.loader import each, items, loop, schedule, shares
from tests.strategies import forbidden
from tests.virtual import set_clock


def played(loads: list[int], compute: int, depth: int) -> list[int]:
    """Tick by tick: a loader, a queue of so many places, a trainer."""
    ends: list[int] = []
    queue = loaded = busy = now = 0
    left, holding = (loads[0], False) if depth else (0, False)
    todo = list(loads)
    current = todo.pop(0)
    left = current
    working = False
    while len(ends) < len(loads):
        moved = True
        while moved:  # everything that happens at this tick
            moved = False
            if depth and not holding and loaded < len(loads) and left == 0:
                holding, moved = True, True
            if holding and queue < depth:
                queue, holding, loaded, moved = queue + 1, False, loaded + 1, True
                left = todo.pop(0) if todo else -1
            if working and busy == 0:
                ends.append(now)
                working, moved = False, True
                if not depth:
                    loaded += 1
                    left = todo.pop(0) if todo else -1
            if not working and depth and queue:
                queue, working, busy, moved = queue - 1, True, compute, True
            if not working and not depth and left == 0 and len(ends) < len(loads):
                working, busy, moved, left = True, compute, True, -1
        now += 1
        if working:
            busy -= 1
        if left > 0 and (depth or not working):
            left -= 1
    return ends


@given(st.lists(st.integers(0, 6), min_size=1, max_size=10), st.integers(1, 6), st.integers(0, 4))
def test_the_model_is_the_queue_played_out(loads: list[int], compute: int, depth: int) -> None:
    assert schedule(loads, compute, depth) == played(loads, compute, depth)


@pytest.mark.parametrize("load", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_even_loading_costs_the_sum_in_turn_and_the_longer_ahead(load: float, depth: int) -> None:
    assert each(schedule([load] * 9, 1.0, 0)) == load + 1
    assert each(schedule([load] * 9, 1.0, depth)) == max(load, 1.0)


def test_depth_evens_out_a_burst_and_no_depth_beats_the_mean() -> None:
    burst = [0.0, 0.0, 0.0, 4.0] * 10
    times = [each(schedule(burst, 1.0, depth)) for depth in range(9)]
    assert times[0] > times[1] > times[2] > times[4] == pytest.approx(times[8], abs=0.1)
    slow = [2 * load for load in burst]
    assert all(each(schedule(slow, 1.0, depth)) > 1.9 for depth in range(9))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_every_item_comes_once_and_in_order_and_the_thread_ends(depth: int) -> None:
    assert list(items([0.0] * 20, depth)) == list(range(20))
    assert not [thread for thread in threading.enumerate() if thread.name == "labkit-loader"]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_than_the_depth_waits_and_one_is_in_hand(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    begun: list[float] = []
    full = threading.Event()

    def sleep(seconds: float) -> None:
        begun.append(seconds)
        if len(begun) == depth + 2:  # one taken, `depth` waiting, one that finds no place
            full.set()

    monkeypatch.setattr(loader, "time", SimpleNamespace(sleep=sleep))
    stream = items([0.0] * 12, depth)
    next(stream)
    assert full.wait(10)
    threading.Event().wait(0.05)
    assert len(begun) == depth + 2
    assert list(stream) == list(range(1, 12)) and len(begun) == 12


def test_without_a_depth_nothing_is_loaded_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []
    monkeypatch.setattr(loader, "time", SimpleNamespace(sleep=begun.append))
    stream = items([0.5, 0.25], 0)
    next(stream)
    assert begun == [0.5]
    next(stream)
    assert begun == [0.5, 0.25]


def test_a_loop_in_turn_takes_what_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch)
    monkeypatch.setattr(loader, "time", clock)

    def work() -> None:
        clock.now += 2.0

    assert loop([1.0, 3.0, 5.0], work, 0) == 6.0  # the first step is not counted
    assert each([1.0, 2.0, 5.0]) == 2.0


def test_the_experiment_declares_its_loading_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch, launch=0.75, per_sequence=0.0, optimizer=0.25)
    monkeypatch.setattr(loader, "time", clock)
    *_, found = loader.loader(load=0.5, depth=0)
    assert (found.load, found.compute.median, found.plain.median, found.ahead.median) == (0.5, 1.0, 1.5, 1.5)
    assert found.plain_modelled == found.ahead_modelled == 1.5 and found.gain == 1 and found.progress == 1
    *_, uneven = loader.loader(load=0.5, depth=0, uneven=True)
    assert uneven.plain.median == uneven.plain_modelled == 1.5


def test_it_runs_with_a_real_thread_and_its_model_is_the_queue() -> None:
    looks = list(loader.loader(load=0.25, depth=3, uneven=True))
    found = looks[-1]
    loads = [found.load * 4 * (at % 4 == 3) for at in range(9)]
    assert found.ahead_modelled == pytest.approx(each(schedule(loads, found.compute.median, 3)))
    assert found.plain_modelled == pytest.approx(found.load + found.compute.median)
    assert [every.progress for every in looks] == pytest.approx([(k + 1) / 9 for k in range(9)])
    assert looks[0].plain.count == 0 and found.plain.count == found.ahead.count == 3
    assert not [thread for thread in threading.enumerate() if thread.name == "labkit-loader"]


def test_uneven_shares_keep_the_mean() -> None:
    assert sum(shares(True)) == sum(shares(False)) == len(shares(True)) == 4 and max(shares(True)) == 4


@given(st.data())
def test_values_outside_the_declaration_are_refused(data: Any) -> None:
    declared = parameters(loader.loader)
    name = data.draw(st.sampled_from(sorted(declared)))
    with pytest.raises(LabError, match=name):
        declared[name].check(data.draw(forbidden(declared[name])))
