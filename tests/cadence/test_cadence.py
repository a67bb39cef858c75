"""The size of Adam's update against exact fractions, torch's Adam as it comes, and a limit of algebra."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import cadence
from labkit.cadence import adam_step_ratio, adam_updates, count, log_spaced, moments
from labkit.errors import LabError
from tests.strategies import NONSENSE, settings_of

torch.set_num_threads(1)


def exact(step: int, K: int, betas: tuple[float, float]) -> float:
    """The ratio by fractions of the very floats."""
    one, two = ((1 - Fraction(b) ** step) / (1 - Fraction(b) ** (step * K)) for b in betas)
    return float(one) / math.sqrt(float(two))


@pytest.mark.parametrize(("step", "ratio"), [(1, 0.496), (30, 2.573), (10_000, 1.000)])
def test_the_known_numbers(step: int, ratio: float) -> None:
    assert round(adam_step_ratio(step, 8, (0.9, 0.999)), 3) == ratio


BETAS = st.floats(0, 1, exclude_max=True)


@given(st.integers(1, 40), st.integers(1, 12), BETAS, BETAS)
def test_the_ratio_is_exact(step: int, K: int, beta1: float, beta2: float) -> None:
    assert adam_step_ratio(step, K, [beta1, beta2]) == pytest.approx(exact(step, K, (beta1, beta2)), rel=1e-13)


def test_betas_at_their_ends() -> None:
    assert adam_step_ratio(1, 9, (0.0, 0.0)) == 1
    nearly = math.nextafter(1, 0)
    assert adam_step_ratio(1, 9, (nearly, 0.0)) == pytest.approx(1 / 9, rel=1e-14)
    assert adam_step_ratio(1, 9, (0.0, nearly)) == pytest.approx(3, rel=1e-14)
    assert adam_step_ratio(10**12, 10**12, (0.9, 0.999)) == 1
    assert adam_step_ratio(7, 1, (0.9, 0.999)) == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0, 8, (0.9, 0.999)), "step = 0 is outside 1 … 1000000000000: try 1"),
        ((1, 0, (0.9, 0.999)), "accumulation = 0 is outside 1 … 1000000000000: try 1"),
        ((1.5, 8, (0.9, 0.999)), "step = 1.5 is not a whole number: try 1"),
        ((1, 8, (0.9, 1.0)), r"betas = \(0.9, 1.0\) are not two numbers from 0 to below 1: try \(0.9, 0.999\)"),
        ((1, 8, (-0.1, 0.9)), "betas"),
        ((1, 8, (0.1, -0.9)), "betas"),
        ((1, 8, (1.0, 0.9)), "betas"),
        ((1, 8, (math.nan, 0.9)), "betas"),
        ((1, 8, (0.9,)), "betas"),
        ((1, 8, (0.9, 0.9, 0.9)), "betas"),
        ((1, 8, 0.9), "betas"),
    ],
)
def test_what_has_no_ratio_is_refused(values: Any, words: str) -> None:
    with pytest.raises(LabError, match=words):
        adam_step_ratio(*values)


@given(NONSENSE, st.sampled_from([0, 1, 2]))
def test_nonsense_is_refused(value: Any, at: int) -> None:
    values: list[Any] = [1, 8, (0.9, 0.999)]
    values[at] = value
    with pytest.raises(LabError, match="try"):
        adam_step_ratio(*values)


@given(st.integers(1, 10_000), st.integers(2, 60))
def test_log_spaced_is_whole_sorted_and_has_both_ends(last: int, points: int) -> None:
    found = log_spaced(last, points)
    assert found == sorted(set(found)) and found[0] == 1 and found[-1] == last and len(found) <= points
    steps = [b / a for a, b in itertools.pairwise(found) if a > 100]
    assert all(step < 1.02 * last ** (1 / (points - 1)) for step in steps)


def torchs(K: int, betas: tuple[float, float], steps: int) -> list[float]:
    """Sizes of the updates of torch's plain Adam whose step is set by hand to what a count of microbatches gives."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1e-3, betas=betas, eps=0.0)
    weight.sum().backward()
    sizes = []
    for step in range(steps):
        if step:
            optimizer.state[weight]["step"] = torch.tensor(float((step + 1) * K - 1))
        before = weight.item()
        optimizer.step()
        sizes.append((before - weight.item()) * 1e3)
    return sizes


@pytest.mark.parametrize(("K", "beta1", "beta2"), [(8, 0.9, 0.999), (3, 0.5, 0.9), (64, 0.99, 0.9999), (2, 0.0, 0.5)])
def test_measured_formula_and_another_run_of_torch_agree(K: int, beta1: float, beta2: float) -> None:
    found = count(accumulation_steps=K, beta1=beta1, beta2=beta2, steps=200)
    assert found.off < found.tolerance.value < 1e-9 and found.steps.tolist() == log_spaced(200)
    expected = [exact(s, K, (beta1, beta2)) for s in found.steps.tolist()]
    assert found.formula.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.measured.tolist() == pytest.approx(expected, rel=found.tolerance.value)
    right = torchs(1, (beta1, beta2), 200)
    wrong = torchs(K, (beta1, beta2), 200)[1:]  # the first makes the state, and cannot be set
    late = [s for s in found.steps.tolist() if s > 1]
    assert [wrong[s - 2] / right[s - 1] for s in late] == pytest.approx(found.measured.tolist()[1:], rel=1e-9)


def test_first_largest_and_last_are_of_all_updates() -> None:
    found = count(steps=300)
    every = [exact(s, 8, (0.9, 0.999)) for s in range(1, 301)]
    assert found.first == pytest.approx(every[0]) and found.last == pytest.approx(every[-1])
    assert found.largest == pytest.approx(max(every)) and found.largest_at == 1 + every.index(max(every)) == 40
    assert found.accumulation_steps == 8


def test_by_ten_thousand_updates_the_count_does_not_matter() -> None:
    found = count(steps=10_000)
    assert round(found.last, 3) == 1.000 and found.off < found.tolerance.value and len(found.steps) > 50
    (at,) = [i for i, s in enumerate(found.steps.tolist()) if s == 1]
    assert round(float(found.measured[at]), 3) == 0.496


def test_one_microbatch_makes_no_difference() -> None:
    found = count(accumulation_steps=1, steps=50)
    assert found.measured.tolist() == found.formula.tolist() == [1.0] * len(found.steps)


def with_zero_rates(gradients: torch.Tensor, betas: tuple[float, float]) -> list[float]:
    """torch's Adam with a learning rate of 0 for all but the last gradient of a window."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.0, betas=betas, eps=0.0)
    sizes = []
    for each in gradients:
        for at, g in enumerate(each):
            optimizer.param_groups[0]["lr"] = float(at == len(each) - 1)
            weight.grad = g[None].clone()
            before = weight.item()
            optimizer.step()
        sizes.append(before - weight.item())
    return sizes


@pytest.mark.parametrize(("K", "beta1", "beta2"), [(1, 0.9, 0.999), (5, 0.8, 0.95), (8, 0.0, 0.5)])
def test_moments_by_hand_are_torchs(K: int, beta1: float, beta2: float) -> None:
    gradients = 1 + 2 * torch.randn(12, K, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = with_zero_rates(gradients, (beta1, beta2))
    assert adam_updates(gradients, beta1, beta2).tolist() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(("K", "noise", "steps"), [(8, 2.0, 20), (3, 0.5, 40)])
def test_both_sides_see_the_same_gradients(K: int, noise: float, steps: int) -> None:
    found = moments(accumulation_steps=K, noise=noise, steps=steps, seed=5)
    drawn = torch.randn(steps, K, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    gradients, at = 1 + noise * drawn, found.steps - 1
    right = torch.tensor(with_zero_rates(gradients.mean(1)[:, None], (0.9, 0.999)))
    wrong = torch.tensor(with_zero_rates(gradients, (0.9, 0.999)))
    assert found.right.tolist() == pytest.approx(right[at].tolist(), rel=1e-5)
    assert found.wrong.tolist() == pytest.approx(wrong[at].tolist(), rel=1e-5)
    assert found.ratio == pytest.approx(float(wrong[steps // 2 :].mean() / right[steps // 2 :].mean()), rel=1e-5)
    assert found.noise == noise and found.steps.tolist() == log_spaced(steps)


@pytest.mark.parametrize(("K", "noise"), [(2, 1.0), (8, 1.0), (8, 3.0), (64, 1.0)])
def test_the_ratio_nears_its_limit_where_v_is_slow(K: int, noise: float) -> None:
    found = [moments(accumulation_steps=K, noise=noise, steps=2000, seed=seed) for seed in range(4)]
    mean = sum(each.ratio for each in found) / 4
    assert mean == pytest.approx(math.sqrt((1 + noise**2 / K) / (1 + noise**2)), rel=0.03)
    assert found[0].formula == pytest.approx(math.sqrt((1 + noise**2 / K) / (1 + noise**2)), rel=1e-14)
    assert found[0].formula < 0.95


def test_a_fast_v_leaves_the_limit() -> None:
    found = moments(accumulation_steps=64, beta2=0.5, steps=2000)
    assert found.ratio > 1.1 * found.formula


def test_without_noise_or_with_one_microbatch_nothing_differs() -> None:
    still = moments(noise=0.0)
    assert still.ratio == pytest.approx(1) and still.formula == 1
    assert still.right.tolist() == pytest.approx([1.0] * len(still.steps))
    alone = moments(accumulation_steps=1, noise=8.0)
    assert torch.equal(alone.right, alone.wrong) and alone.ratio == 1 == alone.formula


def test_a_topic_shows_all_its_experiments() -> None:
    for name in ("count", "moments", "path", "state", "schedules", "translated", "adam_step_ratio"):
        assert callable(getattr(cadence, name))


@pytest.mark.parametrize(
    "run",
    [
        lambda: count(accumulation_steps=64, beta1=0.99, beta2=0.9999, steps=10_000),
        lambda: moments(steps=2000, noise=8.0),
    ],
)
def test_the_extremes_are_finite(run: Callable[[], Any]) -> None:
    assert all(
        torch.as_tensor(v).isfinite().all() for v in vars(run()).values() if isinstance(v, (torch.Tensor, float))
    )


@pytest.mark.parametrize("run", [count, moments])
@given(data=st.data())
@settings(max_examples=15)
def test_what_is_declared_runs_the_same_twice_and_leaves_torchs_seed(
    run: Callable[..., Any], data: st.DataObject
) -> None:
    values = data.draw(settings_of(run).map(lambda v: v | {"steps": min(v.get("steps", 50), 100)}))
    state = torch.get_rng_state()
    found = run(**values)
    assert repr(found) == repr(run(**values)) and torch.equal(state, torch.get_rng_state())
    assert all(each.isfinite().all() for each in vars(found).values() if isinstance(each, torch.Tensor))
