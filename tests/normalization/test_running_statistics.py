"""Running statistics, small groups and padding, against exact fractions, all subsets and torch's own padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from labkit.errors import LabError
from labkit.images import draw
from labkit.normalization.running_statistics import (
    _decay,
    effective_momentum,
    group_variance,
    padding,
    running,
    variances,
)
from tests.strategies import settings_of

torch.set_num_threads(1)

EXPERIMENTS = (running, group_variance, padding)


@pytest.mark.parametrize(("m", "K"), [("1/10", 8), ("1/100", 32), ("1", 3), ("1/2", 1)])
def test_effective_momentum_is_exact(m: str, K: int) -> None:
    assert effective_momentum(float(Fraction(m)), K) == pytest.approx(float(1 - (1 - Fraction(m)) ** K), rel=1e-13)


def means(values: dict[str, Any], K: int) -> list[Fraction]:
    """Exact mean of each microbatch of every update, from the same draws."""
    generator = torch.Generator().manual_seed(values["seed"])
    data = 3 + 2 * torch.randn(values["updates"], 128, 1, generator=generator, dtype=torch.float64)
    parts = [part.flatten().tolist() for batch in data for part in batch.tensor_split(K)]
    return [sum(map(Fraction, part)) / len(part) for part in parts]


@pytest.mark.parametrize(("m", "K", "updates"), [(0.1, 8, 5), (0.5, 3, 4), (1.0, 2, 3), (0.01, 32, 2), (0.25, 1, 6)])
def test_the_running_mean_is_the_recursion_in_fractions(m: float, K: int, updates: int) -> None:
    values = {"momentum": m, "updates": updates, "seed": 4}
    result = running(accumulation_steps=K, **values)  # type: ignore[arg-type]
    for steps, measured, formula in ((1, result.right, result.right_formula), (K, result.wrong, result.wrong_formula)):
        exact = [Fraction(0)]
        for mean in means(values, steps):
            exact.append((1 - Fraction(m)) * exact[-1] + Fraction(m) * mean)
        expected = torch.tensor([float(each) for each in exact[::steps]], dtype=torch.float64)
        for got in (measured, formula):
            assert (got - expected).norm() <= result.tolerance.value * expected.norm()
    assert result.tolerance.terms == 3 * updates * K + 128
    assert result.updates.tolist() == list(range(updates + 1)) and result.tolerance.value < 1e-11


@given(settings_of(running))
@settings(max_examples=25, deadline=None)
def test_run_and_formula_agree_to_rounding(values: dict[str, Any]) -> None:
    result = running(**values)
    for measured, formula in ((result.right, result.right_formula), (result.wrong, result.wrong_formula)):
        assert measured[0] == formula[0] == 0
        assert (measured - formula).norm() <= result.tolerance.value * formula.norm()
    assert result.measured_momentum == pytest.approx(result.effective_momentum, abs=1e-13)
    assert result.momentum <= result.effective_momentum + 1e-15


def test_one_microbatch_changes_nothing_and_eight_replace_more_than_half() -> None:
    one = running(accumulation_steps=1)
    assert one.right.equal(one.wrong) and one.right_variance == one.wrong_variance
    assert one.effective_momentum == pytest.approx(0.1)
    eight = running()
    assert eight.measured_momentum == pytest.approx(1 - 0.9**8, rel=1e-13)
    assert abs(float(eight.wrong[3]) - 3) < 0.5 < 1.5 < abs(float(eight.right[3]) - 3)


@pytest.mark.parametrize("K", [1, 5, 32])
def test_the_running_variance_is_fed_with_the_unbiased_one(K: int) -> None:
    result = running(accumulation_steps=K, updates=7, momentum=0.3, seed=2)
    generator = torch.Generator().manual_seed(2)
    data = 3 + 2 * torch.randn(7, 128, 1, generator=generator, dtype=torch.float64)
    for steps, measured in ((1, result.right_variance), (K, result.wrong_variance)):
        variance = 1.0
        for part in (part for batch in data for part in batch.tensor_split(steps)):
            variance = 0.7 * variance + 0.3 * float(part.var(correction=1))
        assert measured == pytest.approx(variance, rel=1e-12)


def test_the_weights_of_calls_by_hand() -> None:
    expected = [[0, 0, 0, 0], [0.25, 0.5, 0, 0], [0.0625, 0.125, 0.25, 0.5]]
    assert _decay(0.5, 4, every=2).tolist() == expected
    assert _decay(1.0, 2).tolist() == [[0, 0], [1, 0], [0, 1]]


def brightness(seed: int, images: int) -> list[float]:
    return list(draw(seed, images)[0].mean((1, 2, 3)).tolist())


@pytest.mark.parametrize("b", [2, 4])
def test_over_all_subsets_the_prediction_is_exact(b: int) -> None:
    found = group_variance(images=8, draws=10, seed=3)
    groups = torch.tensor(list(itertools.combinations(brightness(3, 8), b)), dtype=torch.float64)
    at = found.sizes.tolist().index(b)
    assert float(found.predicted[at]) == pytest.approx(groups.var(1, correction=0).mean().item(), rel=1e-13)
    assert found.whole == pytest.approx(groups.var(1, correction=1).mean().item(), rel=1e-13)


@pytest.mark.parametrize("images", [8, 23, 64, 256])
def test_random_groups_lie_within_their_error_of_the_prediction(images: int) -> None:
    found = group_variance(images=images, draws=400, seed=5)
    assert found.sizes.tolist() == [*(b for b in (2, 4, 8, 16, 32, 64, 128) if b < images), images]
    off = (found.biased - found.predicted)[:-1] / found.biased_error[:-1]
    assert off.abs().max() < 4
    b = found.sizes.double()
    assert torch.allclose(found.unbiased, found.biased * b / (b - 1), rtol=1e-12)
    assert found.biased[-1].item() == pytest.approx(float(found.predicted[-1]), rel=1e-12)
    assert found.biased_error[-1] < 1e-15 < found.biased_error[:-1].min() and float(found.predicted[-1]) < found.whole


def test_the_error_is_that_of_a_mean() -> None:
    few, many = (group_variance(draws=draws, seed=1).biased_error for draws in (25, 400))
    assert few[0] / many[0] == pytest.approx(4, rel=0.5)
    off = [group_variance(draws=25, seed=seed) for seed in range(40)]
    scores = torch.stack([(each.biased - each.predicted)[0] / each.biased_error[0] for each in off])
    assert 0.7 < float(scores.std()) < 1.4


def test_sorted_by_class_no_formula_of_the_size_holds() -> None:
    found = group_variance(images=60, seed=2)
    images, labels = draw(2, 60)
    values = images.mean((1, 2, 3))[labels.argsort(stable=True)]
    for b, variance in zip(found.sizes.tolist(), found.sorted.tolist(), strict=True):
        groups = [values[at : at + b].var(correction=0) for at in range(0, 60 - b + 1, b)]
        assert variance == pytest.approx(float(torch.stack(groups).mean()), rel=1e-12)
    assert (found.sorted[:3] < 0.5 * found.predicted[:3]).all()
    assert float(found.sorted[-1]) == pytest.approx(float(found.predicted[-1]), rel=1e-12)


def test_a_rest_is_left_out() -> None:
    rows = torch.tensor([[0.0, 2.0, 5.0, 5.0, 99.0]])
    assert variances(rows, 2, correction=0).tolist() == [0.5] and variances(rows, 2, correction=1).tolist() == [1.0]


@pytest.mark.parametrize("composition", ["shuffled", "sorted"])
@pytest.mark.parametrize(("B", "K", "shortest"), [(16, 4, 4), (10, 3, 1), (64, 16, 32), (4, 1, 2)])
def test_padding_by_torchs_own(composition: str, B: int, K: int, shortest: int) -> None:
    result = padding(sequences=B, accumulation_steps=K, composition=composition, shortest=shortest, seed=6)
    generator = torch.Generator().manual_seed(6)
    lengths = (shortest * (32 / shortest) ** torch.rand(B, generator=generator, dtype=torch.float64)).round().int()
    values = 1 + torch.randn(B, 32, generator=generator, dtype=torch.float64)
    rows = [row[:length] for row, length in zip(values, lengths.tolist(), strict=True)]
    if composition == "sorted":
        rows = sorted(rows, key=len)
    assert result.lengths.tolist() == [len(row) for row in rows]
    groups = [[rows[at] for at in range(B) if result.microbatch[at] == m] for m in range(K)]
    padded = [pad_sequence(group, batch_first=True) for group in groups]
    whole, tokens = pad_sequence(rows, batch_first=True), int(lengths.sum())
    assert torch.allclose(result.means, torch.stack([each.mean() for each in padded]), rtol=1e-13)
    assert result.one_batch_mean == pytest.approx(whole.mean().item(), rel=1e-13)
    assert result.true_mean == pytest.approx(torch.cat(rows).mean().item(), rel=1e-13)
    shares = [1 - sum(map(len, group)) / each.numel() for group, each in zip(groups, padded, strict=True)]
    assert result.share.tolist() == pytest.approx(shares, abs=1e-15)
    assert result.total_share == pytest.approx(1 - tokens / sum(each.numel() for each in padded), abs=1e-15)
    assert result.one_batch_share == pytest.approx(1 - tokens / whole.numel(), abs=1e-15)
    assert result.microbatch.bincount().tolist() == [len(part) for part in torch.arange(B).tensor_split(K)]


def test_padding_in_numbers() -> None:
    equal = padding(shortest=32)
    assert equal.one_batch_share == equal.total_share == 0 and equal.one_batch_mean == equal.true_mean
    shuffled, by_length = padding(), padding(composition="sorted")
    assert by_length.total_share < shuffled.total_share < shuffled.one_batch_share == by_length.one_batch_share
    assert shuffled.lengths.min() >= 4 and shuffled.lengths.max() <= 32
    assert by_length.one_batch_mean == pytest.approx((1 - by_length.one_batch_share) * by_length.true_mean, rel=1e-13)


def test_more_microbatches_than_sequences_are_refused_with_a_remedy() -> None:
    with pytest.raises(LabError, match="accumulation steps = 9 is outside 1 … 8, the number of sequences: try 8"):
        padding(sequences=8, accumulation_steps=9)
    assert len(padding(sequences=8, accumulation_steps=8).share) == 8


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_what_is_declared_runs_the_same_twice(experiment: Callable[..., Any], data: st.DataObject) -> None:
    values, before = data.draw(settings_of(experiment)), torch.get_rng_state()
    try:
        assert repr(experiment(**values)) == repr(experiment(**values))
    except LabError as refused:
        assert experiment(**{**values, "accumulation_steps": int(str(refused).rpartition("try ")[2])})
    assert torch.get_rng_state().equal(before)
