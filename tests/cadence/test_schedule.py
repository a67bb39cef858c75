"""Schedules against closed forms and the loops of the table, counts against divisions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from labkit import rules
from labkit.cadence.schedule import GROWTH_INTERVAL, evaluations, growths, run_schedule, schedules, warmup_cosine
from labkit.cadence.stepping import Training
from labkit.errors import LabError
from tests.strategies import settings_of

torch.set_num_threads(1)

RULES = ("once-per-window", "schedule-per-microbatch", "schedule-per-process")


def test_the_cosine_is_torchs() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = CosineAnnealingLR(optimizer, T_max=40)
    for index in range(41):
        assert warmup_cosine(10, 50)(10 + index) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_the_warmup_is_a_line_and_after_the_end_there_is_nothing() -> None:
    factor = warmup_cosine(8, 20)
    assert [factor(index) for index in range(9)] == [index / 8 for index in range(9)]
    assert factor(20) == factor(21) == factor(400) == 0 < factor(19)
    assert warmup_cosine(0, 20)(0) == 1 and warmup_cosine(2.5, 20)(2) == 0.8


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("K", "W"), [(8, 4), (3, 5), (1, 8), (16, 1)])
def test_learning_rates_are_those_of_the_loops_in_the_table(rule: str, K: int, W: int) -> None:
    schedule = schedules(rule=rule, accumulation_steps=K, world_size=W, warmup=20, updates=100)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    training = Training(optimizer, LambdaLR(optimizer, warmup_cosine(20, 100)), world_size=W)
    rates = [0.0]
    for _ in range(100):
        rules.rule(rule).loop(lambda _: 0 * weight.sum(), range(K), training)
        rates.append(optimizer.param_groups[0]["lr"])
    assert schedule.wrong.tolist() == rates and schedule.rule == rule
    once = schedules(rule="once-per-window", warmup=20, updates=100)
    assert torch.equal(schedule.right, once.right) and torch.equal(once.right, once.wrong)


@pytest.mark.parametrize(
    ("rule", "times"), [("once-per-window", 1), ("schedule-per-microbatch", 6), ("schedule-per-process", 5)]
)
@pytest.mark.parametrize(("warmup", "updates"), [(100, 500), (0, 100), (99, 100), (200, 1000)])
def test_where_warmup_and_schedule_end(rule: str, times: int, warmup: int, updates: int) -> None:
    result = schedules(rule=rule, accumulation_steps=6, world_size=5, warmup=warmup, updates=updates)
    assert result.warmup_ends == warmup and result.wrong_warmup_ends == math.ceil(warmup / times)
    assert result.wrong_ends == math.ceil(updates / times)
    assert result.wrong[result.wrong_ends] == 0 and result.wrong[result.wrong_ends - 1] > 0
    assert result.right.argmax() == warmup and result.right.max() == 1 and result.right[-1] == 0
    expected = [warmup_cosine(warmup, updates)(times * u) for u in range(updates)]
    right = [warmup_cosine(warmup, updates)(u) for u in range(updates)]
    assert result.area_ratio == pytest.approx(sum(expected) / sum(right))
    assert result.wrong[:-1].tolist() == expected and result.updates.tolist() == list(range(updates + 1))


def test_k_times_too_early_leaves_a_kth_of_the_learning() -> None:
    assert schedules().area_ratio == pytest.approx(1 / 8, rel=0.01)
    assert schedules(rule="schedule-per-process").area_ratio == pytest.approx(1 / 4, rel=0.01)
    assert schedules(rule="once-per-window").area_ratio == 1


def test_samples_are_counted_over_microbatches_and_replicas() -> None:
    schedule = schedules(accumulation_steps=3, world_size=5, microbatch=7, updates=100, warmup=1)
    assert schedule.samples.tolist() == [105 * u for u in range(101)]


@pytest.mark.parametrize(("updates", "K"), [(100, 1), (199, 16), (500, 8), (1000, 16), (999, 7), (250, 8)])
def test_what_a_loop_counts(updates: int, K: int) -> None:
    schedule = schedules(updates=updates, accumulation_steps=K, warmup=10)
    assert (schedule.evaluations_right, schedule.evaluations_wrong) == (updates // 100, updates * K // 100)
    assert (schedule.scaler_growths_right, schedule.scaler_growths_wrong) == (updates // 2000, updates * K // 2000)
    assert evaluations(4000, 1) == 40 and growths(4000, 1) == 2 == growths(1000, 4) and growths(3999, 1) == 1


def test_the_growth_interval_is_torchs_and_its_scaler_grows_as_often() -> None:
    assert torch.amp.GradScaler("cpu").get_growth_interval() == GROWTH_INTERVAL
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for _ in range(2 * GROWTH_INTERVAL + 1):
        weight.grad = torch.ones(1)
        scaler.scale(torch.ones(1))
        scaler.unscale_(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0 ** growths(2 * GROWTH_INTERVAL + 1, 1) == 4


def test_stepping_leaves_every_index_to_be_seen() -> None:
    rates, index = run_schedule(lambda index: 1 / (1 + index), updates=3, times=5)
    assert index.tolist() == [0, 5, 10, 15] and rates.tolist() == [1 / (1 + i) for i in (0, 5, 10, 15)]


@pytest.mark.parametrize(("warmup", "updates"), [(100, 100), (200, 150)])
def test_a_warmup_that_leaves_nothing_is_refused_with_a_remedy(warmup: int, updates: int) -> None:
    with pytest.raises(LabError, match=f"warmup = {warmup} of {updates} updates leaves none .*: try {updates - 1}"):
        schedules(warmup=warmup, updates=updates)
    assert schedules(warmup=updates - 1, updates=updates).wrong_ends <= updates


@pytest.mark.parametrize("run", [schedules])
@given(data=st.data())
@settings(max_examples=15)
def test_what_is_declared_runs_the_same_twice_or_is_refused(run: Callable[..., Any], data: st.DataObject) -> None:
    values = data.draw(settings_of(run))
    try:
        result = run(**values)
        assert repr(result) == repr(run(**values)) and result.wrong.min() >= 0 and result.wrong.max() <= 1
    except LabError as refused:
        assert run(**{**values, "warmup": int(str(refused).rpartition("try ")[2])})
