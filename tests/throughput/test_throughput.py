"""Steps of a clock whose times are declared: the sweep finds them again, and the model's line goes through them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import throughput
from labkit.corpus import batch
from labkit.declare import parameters
from labkit.errors import LabError
from labkit.nets import valid_tokens
from labkit.throughput import Times, fitted, positive, row, step_seconds, sweep
from tests.strategies import forbidden
from tests.virtual import set_clock

A, C, STEP = 2.0**-10, 2.0**-13, 2.0**-11


def last(run: Any, **values: Any) -> Any:
    *_, found = run(**values)
    return found


@given(st.integers(1, 64), st.integers(0, 64), *[st.fractions(0, 10, max_denominator=64)] * 4)
def test_the_model_is_the_sum_of_its_parts(K: int, b: int, a: Fraction, c: Fraction, o: Fraction, r: Fraction) -> None:
    exact = K * (a + c * b) + o + r
    assert step_seconds(K, b, float(a), float(c), float(o), float(r)) == pytest.approx(float(exact), rel=1e-12)


def test_an_all_reduce_is_paid_once_a_step_and_by_default_not() -> None:
    assert step_seconds(8, 4, 0.0, 0.0, 0.0, allreduce=0.5) == 0.5
    assert step_seconds(8, 4, 0.0, 0.0, 0.25) == 0.25


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, None, "1", True])
def test_what_is_no_time_is_refused_by_name(at: int, bad: Any) -> None:
    given: list[Any] = [2, 1.0, 1.0, 1.0, 1.0, 1.0]
    given[at] = bad
    names = ("steps", "microbatch", "launch", "per sequence", "optimizer", "allreduce")
    with pytest.raises(LabError, match=f"^{names[at]} = .*: try "):
        step_seconds(*given)


def test_no_microbatch_is_no_step() -> None:
    with pytest.raises(LabError, match=r"^steps = 0 is outside 1 … .*: try 1$"):
        step_seconds(0, 1, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(("sequences", "length", "repeats"), [(8, 8, 3), (64, 32, 3), (16, 64, 9)])
def test_the_sweep_finds_what_the_clock_was_told(
    monkeypatch: pytest.MonkeyPatch, sequences: int, length: int, repeats: int
) -> None:
    clock = set_clock(monkeypatch, A, C, STEP)
    found = last(sweep, sequences=sequences, length=length, repeats=repeats)
    assert (found.launch, found.per_sequence, found.optimizer) == pytest.approx((A, C, STEP), rel=1e-9)
    assert found.residual < 1e-9 and found.progress == 1
    assert found.valid == sequences * (length - 1)
    for each in found.rows:
        b, K = each.microbatch, sequences // each.microbatch
        assert each.accumulation_steps == K and each.steps.count == repeats
        assert each.steps.median == pytest.approx(K * (A + C * b) + STEP)
        assert each.microbatches.median == pytest.approx(A + C * b) and each.optimizers.median == STEP
        assert each.tokens == pytest.approx(found.valid / each.steps.median)
        assert each.sequences == pytest.approx(sequences / each.steps.median)
        assert found.modelled(b) == pytest.approx(each.steps.median)
        assert found.overhead(b) == pytest.approx(K * A / each.steps.median)
    assert [each.microbatch for each in found.rows] == [2**k for k in range(sequences.bit_length())]
    assert sum(clock.given) == sequences * len(found.rows) * (repeats + 1)


def test_the_sizes_are_measured_in_turn_and_the_first_step_of_each_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch, A, C, STEP)
    clock.cold = 8  # the first step
    looks = list(sweep(sequences=8, repeats=3))
    sizes = [(b, 8 // b) for b in (1, 2, 4, 8)]
    first, turn = ([b for b, K in sizes for _ in range(calls * K)] for calls in (2, 1))
    assert clock.given == first + 2 * turn
    assert [len(each.rows) for each in looks[:5]] == [1, 2, 3, 4, 4]
    assert [each.progress for each in looks] == pytest.approx([(k + 1) / 12 for k in range(12)])
    assert math.isnan(looks[0].launch) and looks[1].launch > 0
    assert looks[-1].launch == pytest.approx(A) and looks[-1].residual < 1e-9


def test_one_slow_step_does_not_move_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch, A, C, STEP)
    for done, found in enumerate(sweep(sequences=8, repeats=5)):
        clock.factor = 20.0 if done == 6 and found else 1.0
    assert found.launch == pytest.approx(A) and max(each.steps.highest for each in found.rows) > 10 * A


def made(times: dict[int, float], B: int = 64, optimizer: float = 0.0) -> list[throughput.Row]:
    return [row(b, B, B, [Times(t, t, optimizer)]) for b, t in times.items()]


def test_the_fit_is_the_least_squares_of_the_relative_error() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 1 + 0.1 * torch.randn(7, generator=generator, dtype=torch.float64)
    sizes = [2**k for k in range(7)]
    times = {b: (64 / b * A + 64 * C + STEP) * float(n) for b, n in zip(sizes, noise, strict=True)}
    a, c, o = fitted(made(times, optimizer=STEP))
    t = numpy.array(list(times.values()))
    columns = numpy.array([[64 / b, 64] for b in sizes]) / t[:, None]
    assert (a, c) == pytest.approx(tuple(numpy.linalg.lstsq(columns, (t - STEP) / t)[0])) and o == STEP

    def off(a: float, c: float) -> float:
        return float(((columns @ [a, c] - (t - STEP) / t) ** 2).sum())

    assert all(off(a, c) <= off(a * u, c * v) for u in (0.97, 1, 1.03) for v in (0.97, 1, 1.03))


@settings(max_examples=60)
@given(st.lists(st.floats(1e-3, 10), min_size=3, max_size=7))
def test_no_part_is_negative_and_none_fits_better(times: list[float]) -> None:
    t = torch.tensor(times, dtype=torch.float64)
    columns = torch.tensor([[64 / 2**k, 64] for k in range(len(times))], dtype=torch.float64) / t[:, None]
    target = torch.ones_like(t)
    found = positive(columns, target)
    assert min(found) >= 0

    def off(a: float, c: float) -> float:
        return float((columns @ torch.tensor([a, c], dtype=torch.float64) - target).norm())

    around = [(found[0] + da, found[1] + dc) for da in (-1e-3, 0, 1e-3) for dc in (-1e-3, 0, 1e-3)]
    assert all(off(*found) <= off(*each) + 1e-9 for each in around if min(each) >= 0)


def test_a_larger_microbatch_that_is_slower_gives_no_negative_launch() -> None:
    a, c, _ = fitted(made({1: 1.0, 8: 2.0, 64: 4.0}))
    assert a == 0 and c > 0


def test_the_residual_is_the_largest_relative_distance() -> None:
    rows = tuple(made({1: 64 * A + 64 * C, 8: (8 * A + 64 * C) * 2, 64: A + 64 * C}))
    found = throughput.Sweep("made", 64, 64, rows, A, C, 0.0, 1.0)
    assert found.residual == pytest.approx(0.5)


@pytest.mark.parametrize(("small", "large"), [(2, 16), (1, 64), (16, 2), (8, 8)])
def test_a_microbatch_that_is_faster_and_a_step_that_is_not(
    monkeypatch: pytest.MonkeyPatch, small: int, large: int
) -> None:
    set_clock(monkeypatch, A, C, STEP)
    found = last(throughput.pair, small=small, large=large, repeats=3)
    assert found.microbatch_ratio == pytest.approx((A + C * large) / (A + C * small))
    steps = [64 // b * (A + C * b) + STEP for b in (small, large)]
    assert found.step_ratio == pytest.approx(steps[1] / steps[0]) and found.progress == 1
    assert [each.accumulation_steps for each in found.rows] == [64 // small, 64 // large]
    if small < large:
        assert found.step_ratio < 1 < found.microbatch_ratio


def test_the_pair_has_rows_once_both_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch)
    looks = list(throughput.pair(repeats=3))
    assert [len(each.rows) for each in looks] == [0, 2, 2, 2, 2, 2]
    assert valid_tokens(batch(0, 64, 32, shortest=32)[1]) / looks[-1].rows[0].steps.median == looks[-1].rows[0].tokens


@pytest.mark.parametrize(
    ("run", "name"), [(sweep, "sequences"), (throughput.pair, "small"), (throughput.pair, "large")]
)
def test_a_size_that_is_no_power_of_two_is_refused_with_a_true_remedy(
    monkeypatch: pytest.MonkeyPatch, run: Any, name: str
) -> None:
    set_clock(monkeypatch)
    with pytest.raises(LabError, match=f"^{name} = 13 is no power of two: try 8$"):
        next(run(**{name: 13}))
    next(run(**{name: 8}))


@given(st.data(), st.sampled_from([sweep, throughput.pair]))
def test_values_outside_the_declaration_are_refused(data: st.DataObject, run: Any) -> None:
    name = data.draw(st.sampled_from(sorted(parameters(run))))
    with pytest.raises(LabError, match=name.replace("_", " ")):
        parameters(run)[name].check(data.draw(forbidden(parameters(run)[name])))
