"""Averages against sums written out, the noise scale against its closed form, over many draws and seeds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from labkit.cadence.translation import CURVATURE, TRUE
from labkit.errors import LabError
from labkit.noise import Estimate, closed, estimate, gradients, interval, norms, squared, voters
from tests.frame.driven import extremes
from tests.strategies import settings_of

torch.set_num_threads(1)


# Voters.


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_the_spread_of_a_poll_is_that_of_the_formula(share: float) -> None:
    found = voters(share=share, polls=4000, few=7, many=5)
    assert found.voters.tolist() == [1, 7, 10, 100, 1000, 5000, 10_000, 100_000, 1_000_000]
    exact = [math.sqrt(share * (1 - share) / b) for b in found.voters.tolist()]
    assert found.formula.tolist() == pytest.approx(exact)
    assert (found.spread / found.formula).tolist() == pytest.approx([1.0] * 9, rel=0.06)
    assert found.expected == math.sqrt(5000 / 7) and found.ratio == pytest.approx(found.expected, rel=0.06)
    assert found.ratio == float(found.spread[1] / found.spread[5])


def test_a_poll_of_votes_drawn_one_by_one_has_the_same_spread() -> None:
    generator = torch.Generator().manual_seed(3)
    votes = (torch.rand(4000, 100, generator=generator, dtype=torch.float64) < 0.3).double()
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    ((weight - votes) ** 2 / 2).mean(1).sum().backward()  # torch's gradient of every poll, added up
    per_poll = 2.0 - votes.mean(1)
    assert weight.grad is not None and weight.grad.item() == pytest.approx(float(per_poll.sum()))
    spread = float(((per_poll - (2.0 - 0.3)) ** 2).mean().sqrt())
    found = voters(share=0.3, polls=4000)
    assert spread == pytest.approx(float(found.spread[2]), rel=0.05)


def test_the_intervals_of_the_spread_hold_as_often_as_they_say() -> None:
    inside = torch.stack([(r.low <= r.formula) & (r.formula <= r.high) for s in range(200) if (r := voters(seed=s))])
    assert 0.92 < inside[:, 1:].double().mean() < 0.97
    assert torch.equal(voters().spread[:1], torch.tensor([0.5]).double())  # a single vote is always 0.5 off


def test_the_large_poll_is_given_in_thousands() -> None:
    found = voters(few=500, many=1)
    assert (found.few, found.many) == (500, 1000) and found.expected == pytest.approx(math.sqrt(2))


# The closed form.


@pytest.mark.parametrize(("distance", "noise"), [(1.0, 1.0), (0.1, 3.0), (0.5, 0.1)])
def test_the_mean_and_the_covariance_of_the_gradients_are_those_of_the_closed_form(
    distance: float, noise: float
) -> None:
    g = gradients(distance * TRUE, 200_000, noise, torch.Generator().manual_seed(1))
    squared_norm, trace = closed(distance * TRUE, noise)
    assert float(g.var(0).sum()) == pytest.approx(trace, rel=0.02)
    error = math.sqrt(trace / len(g))
    assert float((g.mean(0) - CURVATURE * distance * TRUE).norm()) < 2 * error
    assert squared_norm == pytest.approx(float(CURVATURE.sum()) * distance**2)
    assert trace / squared_norm == pytest.approx(17 + (noise / distance) ** 2)


def test_a_gradient_is_what_autograd_says() -> None:
    away = torch.linspace(-1, 2, 16, dtype=torch.float64)
    drawn = torch.randn(6, 17, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    x, y = drawn[:, :16] * CURVATURE.sqrt(), drawn[:, :16] * CURVATURE.sqrt() @ TRUE + 0.7 * drawn[:, 16]
    w = (TRUE + away).requires_grad_()
    rows = [torch.autograd.grad((x[i] @ w - y[i]) ** 2 / 2, w)[0] for i in range(6)]
    assert torch.allclose(gradients(away, 6, 0.7, torch.Generator().manual_seed(4)), torch.stack(rows), rtol=1e-12)


# The estimator.


@given(
    st.fractions(0, 100, max_denominator=50),
    st.fractions(0, 100, max_denominator=50),
    st.integers(1, 100),
    st.integers(2, 30),
)
def test_two_exact_norms_give_both_unknowns_back(squared_norm: Fraction, trace: Fraction, small: int, k: int) -> None:
    big = k * small
    found = estimate(float(squared_norm + trace / small), small, float(squared_norm + trace / big), big)
    size = float(squared_norm + trace)
    assert found.squared_norm == pytest.approx(float(squared_norm), abs=1e-12 * size)
    assert found.trace == pytest.approx(float(trace), abs=1e-11 * size * small)
    swapped = estimate(float(squared_norm + trace / big), big, float(squared_norm + trace / small), small)
    assert swapped.trace == pytest.approx(found.trace, abs=1e-11 * size * small)


def test_nothing_left_of_the_gradient_is_an_endless_noise_scale_and_one_size_is_refused() -> None:
    assert Estimate(0.0, 1.0).noise_scale == Estimate(-0.1, 1.0).noise_scale == math.inf
    assert Estimate(0.5, 3.0).noise_scale == 6.0
    with pytest.raises(LabError, match="small = 8 is as large as big, two sizes are needed: try 4"):
        estimate(1.0, 8, 1.0, 8)


@pytest.mark.parametrize("values", [{}, {"steps": 32}, {"distance": 0.2, "small": 1}, {"noise": 4.0, "distance": 0.4}])
def test_the_interval_holds_the_closed_form_as_often_as_it_says(values: dict[str, Any]) -> None:
    found = [norms(seed=seed, **values) for seed in range(200)]
    true = found[0].noise_scale
    assert true == pytest.approx(17 + (values.get("noise", 1.0) / values.get("distance", 0.5)) ** 2)
    held = sum(each.least <= true <= each.most for each in found) / len(found)
    assert 0.9 <= held <= 0.99
    misses = [sum(true < each.least for each in found), sum(true > each.most for each in found)]
    assert max(misses) < 15
    for name, exact in (("squared_norm_estimate", found[0].squared_norm), ("trace_estimate", found[0].trace)):
        drawn = torch.tensor([getattr(each, name) for each in found], dtype=torch.float64)
        assert abs(float(drawn.mean()) - exact) < 3.5 * float(drawn.std()) / math.sqrt(len(drawn))  # unbiased


def test_the_naive_ratio_is_wrong_by_what_algebra_says() -> None:
    found = [norms(seed=seed) for seed in range(100)]
    naive = torch.tensor([each.naive for each in found], dtype=torch.float64)
    expected = 21 * (1 - 4 / 64) / (1 + 21 / 64)
    assert found[0].naive_formula == pytest.approx(expected)
    assert float(naive.mean()) == pytest.approx(expected, rel=0.02) and expected < 0.75 * 21


def test_every_measured_norm_is_that_of_the_formula() -> None:
    found = norms(steps=256, big=512, small=16, seed=5)
    assert found.batches.tolist() == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert (found.measured / found.formula).tolist() == pytest.approx([1.0] * 10, rel=0.1)
    assert found.formula.tolist() == pytest.approx([found.squared_norm + found.trace / 2**k for k in range(10)])
    assert ((found.low < found.formula) & (found.formula < found.high)).sum() >= 8
    assert torch.allclose(found.high - found.measured, found.measured - found.low)


def test_the_norms_of_groups_by_hand() -> None:
    g = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_hand = [float((g[i] + g[i + 1] + g[i + 2]).norm() ** 2 / 9) for i in (0, 3, 6, 9)]
    assert squared(g, 3).tolist() == pytest.approx(by_hand) and len(squared(g, 5)) == 2


def test_the_estimate_on_the_page_is_that_of_its_norms() -> None:
    found = norms(small=8, big=32, seed=2)
    at = {int(b): float(m) for b, m in zip(found.batches, found.measured, strict=True)}
    again = estimate(at[8], 8, at[32], 32)
    assert found.trace_estimate == pytest.approx(again.trace)
    assert found.squared_norm_estimate == pytest.approx(again.squared_norm)
    assert found.estimated == pytest.approx(again.noise_scale)
    assert found.naive == pytest.approx(8 * (at[8] - at[32]) / at[32])


def test_the_bootstrap_draws_steps_and_keeps_the_middle() -> None:
    generator = torch.Generator().manual_seed(0)
    small = 1 + 16 / 4 + torch.randn(400, generator=generator, dtype=torch.float64)
    big = 1 + 16 / 16 + 0.1 * torch.randn(400, generator=generator, dtype=torch.float64)
    low, high = interval(torch.stack([small, big], 1), 4, 16, generator)
    S, G = (small.mean() - big.mean()) * 16 / 3, (16 * big.mean() - 4 * small.mean()) / 12
    error = torch.stack([(small - big) * 16 / 3 / G, -S / G**2 * (16 * big - 4 * small) / 12]).sum(0).std() / 20
    assert (low + high) / 2 == pytest.approx(float(S / G), rel=0.02)
    assert (high - low) / 2 == pytest.approx(1.96 * float(error), rel=0.15)  # by the delta method
    endless = interval(torch.tensor([[1.0, 0.2]] * 9).double(), 4, 16, generator)  # below what noise alone gives
    assert endless == (math.inf, math.inf)


@pytest.mark.parametrize(("small", "big", "remedy"), [(64, 64, 32), (48, 64, 32), (512, 9, 3), (2, 3, 1), (7, 1024, 4)])
def test_a_small_batch_that_is_no_part_is_refused_and_the_remedy_works(small: int, big: int, remedy: int) -> None:
    with pytest.raises(LabError, match=f"small = {small} does not divide big = {big} into several: try {remedy}$"):
        norms(small=small, big=big)
    assert norms(small=remedy, big=big).small == remedy


@pytest.mark.parametrize("run", [voters, norms])
def test_extremes_are_results_or_refused(run: Any) -> None:
    state = torch.get_rng_state()
    for values in extremes(run):
        try:
            found = run(**values)
        except LabError as error:
            assert "try" in str(error)
            continue
        series: list[Tensor] = [value for value in vars(found).values() if isinstance(value, Tensor)]
        assert all(each.isfinite().all() for each in series)
    assert torch.equal(state, torch.get_rng_state())


@given(st.data(), st.sampled_from([voters, norms]))
@settings(max_examples=30, deadline=None)
def test_the_same_parameters_give_the_same_result(data: st.DataObject, run: Any) -> None:
    values = data.draw(settings_of(run))
    try:
        found, again = run(**values), run(**values)
    except LabError:
        return
    for name, value in vars(found).items():
        other = getattr(again, name)
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other
