"""What a rule does to the gradient: fitted from the gradient that ran, against the whole batch and hand arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from labkit import accumulation, rules
from labkit.accumulation import ALL, COUNTS, WINDOW, compare, layers, tail, token_weights, weights
from labkit.corpus import Batch, batch, made, split
from labkit.errors import LabError
from labkit.nets import IGNORE, Scalar, Transformer
from tests.strategies import settings_of

torch.set_num_threads(1)

EXPERIMENTS = [weights, layers, tail]


def whole_batch(model: nn.Module, microbatches: Sequence[Batch], weight: Tensor | None = None) -> Tensor:
    """Σ weight × loss over all targets / N, in one forward; weight [B] of each sequence."""
    tokens, labels = (torch.cat(each) for each in zip(*microbatches, strict=True))
    each = F.cross_entropy(model(tokens)[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    if weight is not None:
        each = each * weight[:, None]
    loss = each.sum() / (labels[:, 1:] != IGNORE).sum()
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("K", [1, 3, 8])
@pytest.mark.parametrize("word", WINDOW)
def test_a_comparison_measures_what_the_algebra_says(word: str, K: int) -> None:
    model = Transformer(seed=K, dtype=torch.float64)
    microbatches = split(*batch(K), K)
    comparison = compare(model, microbatches, word)
    right, wrong = whole_batch(model, microbatches), whole_batch(model, microbatches, comparison.predicted)
    assert comparison.relative_error == pytest.approx(float((wrong - right).norm() / right.norm()), abs=1e-13)
    assert comparison.norm_ratio == pytest.approx(float(wrong.norm() / right.norm()), rel=1e-12)
    assert comparison.projection == pytest.approx(float(wrong @ right / right.norm() ** 2), rel=1e-12)
    assert comparison.cosine == pytest.approx(float(F.cosine_similarity(wrong, right, dim=0)), rel=1e-12)
    assert (comparison.sequence_weights - comparison.predicted).abs().max() < 1e-12 * comparison.predicted.abs().max()
    assert comparison.residual < 1e-14 and not comparison.indistinguishable and 1 <= comparison.condition < 1000
    assert comparison.equal == bool((comparison.predicted - 1).abs().max() < 1e-9)


@pytest.mark.parametrize("word", COUNTS)
def test_fitted_weights_of_microbatches_are_the_interfaces(word: str) -> None:
    comparison = weights(rule=word)
    counts = torch.zeros(4, dtype=torch.float64).index_add(0, comparison.microbatch, comparison.counts)
    assert (comparison.token_weights - token_weights(counts, word)).abs().max() < 1e-12 * comparison.token_weights.max()


def test_a_loop_replaced_behind_the_librarys_back_changes_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    before = weights(rule="mean-of-means")
    other = dataclasses.replace(rules.rule("mean-of-means"), loop=rules.token_sum)
    monkeypatch.setitem(rules.TABLE, "mean-of-means", other)
    after = weights(rule="mean-of-means")
    assert torch.equal(after.predicted, before.predicted)
    N = float(after.counts.sum())
    assert after.token_weights.tolist() == pytest.approx([N] * 4, rel=1e-12)
    assert (after.map.nan_to_num(nan=N) - N).abs().max() < 1e-9


def test_the_map_stands_where_the_targets_are() -> None:
    result = weights(rule="sequence-means", seed=5)
    tokens, labels = batch(5)
    assert result.map.shape == tokens.shape and result.map[:, 0].isnan().all()
    for row in range(8):
        valid = labels[row, 1:] != IGNORE
        assert torch.equal(~result.map[row, 1:].isnan(), valid)
        B, N = 8, float(result.counts.sum())
        assert result.map[row, 1:][valid].tolist() == pytest.approx([N / (B * float(valid.sum()))] * int(valid.sum()))


def test_microbatches_of_different_padding_stand_in_one_map() -> None:
    microbatches = [batch(0, 1, 12), batch(1, 2, 32)]
    comparison = compare(Transformer(dtype=torch.float64), microbatches, "mean-of-means")
    assert comparison.map.shape == (3, 32) and comparison.microbatch.tolist() == [0, 1, 1]
    assert (~comparison.map.isnan()).sum(1).tolist() == comparison.counts.tolist()
    n = [float(comparison.counts[0]), float(comparison.counts[1:].sum())]
    assert comparison.token_weights.tolist() == pytest.approx([sum(n) / 2 / each for each in n])


def test_an_empty_microbatch_weighs_nothing() -> None:
    microbatches = split(*batch(0), 4)
    microbatches[1][1].fill_(IGNORE)
    model = Transformer(dtype=torch.float64)
    right = compare(model, microbatches, "token-mean")
    assert right.equal and right.token_weights.tolist() == pytest.approx([1, 0, 1, 1], abs=1e-12)
    diluted = compare(model, microbatches, "mean-of-means")
    n = [float(diluted.counts[2 * m : 2 * m + 2].sum()) for m in range(4)]
    assert diluted.token_weights.tolist() == pytest.approx([sum(n) / (4 * c) if c else 0 for c in n], rel=1e-12)


def test_twins_are_not_guessed() -> None:
    tokens, labels = batch(0, 4)
    microbatches = [(tokens[:2], labels[:2]), (tokens[[0, 3]], labels[[0, 3]])]
    comparison = compare(Transformer(dtype=torch.float64), microbatches, "token-mean")
    assert comparison.indistinguishable == ((0, 2),)
    assert comparison.sequence_weights.isnan().tolist() == [True, False, True, False]
    assert comparison.token_weights.tolist() == pytest.approx([1, 1])


def test_a_gradient_that_is_not_finite_has_no_weights() -> None:
    def broken(model: nn.Module, microbatches: Sequence[Batch]) -> None:
        rules.token_mean(model, microbatches)
        next(model.parameters()).grad.mul_(math.inf)  # type: ignore[union-attr]

    comparison = compare(Transformer(dtype=torch.float64), split(*batch(0), 4), broken)
    assert comparison.rule == "broken" and not comparison.equal
    assert comparison.token_weights.isnan().all() and not math.isfinite(comparison.relative_error)


def test_a_loop_of_ones_own_is_measured() -> None:
    def accumulate(model: nn.Module, microbatches: Sequence[Batch]) -> None:
        for at, microbatch in enumerate(microbatches, 1):
            rules.token_mean(model, [microbatch])
            for p in model.parameters():
                assert p.grad is not None
                p.grad /= at

    comparison = compare(Scalar(), made([[[1]], [[1]], [[1]], [[1]]]), accumulate)
    assert comparison.rule == "accumulate" and comparison.norm == pytest.approx(1 / 24 + 1 / 24 + 1 / 12 + 1 / 4)
    four = compare(Transformer(dtype=torch.float64), split(*batch(0, 4, shortest=32), 4), accumulate)
    assert four.token_weights.tolist() == pytest.approx([4 / 24, 4 / 24, 4 / 12, 4 / 4])


def test_a_comparison_leaves_no_gradient_and_no_random_state() -> None:
    model, state = Transformer(dtype=torch.float64), torch.random.get_rng_state()
    compare(model, split(*batch(0), 2), "token-sum")
    assert all(p.grad is None for p in model.parameters()) and torch.equal(state, torch.random.get_rng_state())


def test_float32_is_fitted_too() -> None:
    comparison = compare(Transformer(), split(*batch(0), 4), "mean-of-means")
    assert (comparison.sequence_weights - comparison.predicted).abs().max() < 1e-5
    assert not comparison.equal and 1e-7 < comparison.tolerance.value < 1e-3


def test_the_projection_of_one_hides_a_quarter() -> None:
    comparison = layers()
    assert abs(comparison.projection - 1) < 0.005 and 0.255 < comparison.relative_error < 0.285
    assert abs(comparison.norm_ratio - 1) < 0.05 and 0.95 < comparison.cosine < 0.98


def test_layers_are_those_of_the_model() -> None:
    comparison = layers(rule="double-division")
    model = Transformer(seed=2493, dtype=torch.float64)
    assert list(comparison.per_layer) == [name for name, _ in model.named_parameters()]
    for each in comparison.per_layer.values():
        assert each.norm_ratio == pytest.approx(0.25) and each.cosine == pytest.approx(1)
    assert sum(each.norm**2 for each in comparison.per_layer.values()) == pytest.approx(comparison.norm**2)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=12).filter(any), st.sampled_from(COUNTS))
@settings(deadline=None)
def test_token_weights_by_arithmetic(counts: list[int], word: str) -> None:
    N, K = sum(counts), len(counts)
    expected: dict[str, Callable[[int], float]] = {
        "token-mean": lambda n: 1,
        "token-mean-once": lambda n: 1,
        "mean-of-means": lambda n: N / K / n,
        "sum-of-means": lambda n: N / n,
        "token-sum": lambda n: N,
        "double-division": lambda n: 1 / K,
    }
    values = token_weights(counts, word)
    assert values.dtype == torch.float64 and torch.equal(values, token_weights(torch.tensor(counts), word))
    if word == "last-microbatch-only":
        assert values.tolist() == [0] * (K - 1) + [1 if counts[-1] else 0]
    else:
        assert values.tolist() == pytest.approx([expected[word](n) if n else 0 for n in counts])


@pytest.mark.parametrize("word", [*(word for word in ALL if word not in COUNTS), "mean-of-mean", ""])
def test_a_rule_that_needs_more_than_counts_names_one_that_does_not(word: str) -> None:
    with pytest.raises(LabError, match="rule = ") as caught:
        token_weights([1, 3], word)
    token_weights([1, 3], str(caught.value).rpartition("try ")[2].strip("'"))


@pytest.mark.parametrize("counts", [[], [0, 0], [-1, 2], [1.5], [math.nan], [math.inf, 1]])
def test_counts_that_are_none_are_said(counts: list[int]) -> None:
    with pytest.raises(LabError, match=r"no counts of valid tokens .* try \[1, 3\]"):
        token_weights(counts, "token-mean")


# The end of an epoch.


def test_a_tail_by_hand() -> None:
    epochs = tail(rule="tail-divided-by-k")
    assert epochs.epoch == (1, 1, 1, 2, 2, 2) and epochs.left == 0
    assert epochs.norm_ratio == pytest.approx([1, 1, 0.5, 1, 1, 0.5])
    assert epochs.relative_error == pytest.approx([0, 0, 0.5, 0, 0, 0.5], abs=1e-12)
    rows = epochs.weights.nan_to_num(nan=-1).round(decimals=9).tolist()
    assert rows[2] == [-1] * 8 + [0.5] * 2 + [-1] * 10 and rows[3] == [-1] * 10 + [1] * 4 + [-1] * 6


def test_leftovers_by_hand() -> None:
    epochs = tail(rule="carried-over")
    assert epochs.epoch == (1, 1, 2, 2) and epochs.left == 2
    rows = epochs.weights.nan_to_num(nan=-1).round(decimals=9).tolist()
    assert rows[2] == [-1] * 8 + [1] * 6 + [-1] * 6
    assert epochs.relative_error[2] > 0.3 and epochs.relative_error[3] < 1e-12
    assert tail(rule="carried-over", microbatches=8).epoch == (1, 1, 2, 2)
    assert tail(rule="carried-over", microbatches=8).left == 0


@pytest.mark.parametrize("shortest", [4, 32])
def test_the_right_tail_is_right(shortest: int) -> None:
    epochs = tail(rule="token-mean", shortest=shortest, microbatches=7, accumulation_steps=3)
    assert max(epochs.relative_error) < 1e-12
    assert (epochs.weights.nan_to_num(nan=1) - 1).abs().max() < 1e-12


@given(st.sampled_from(["tail-divided-by-k", "carried-over"]), st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_every_step_of_two_epochs_is_predicted(word: str, M: int, K: int) -> None:
    if word == "carried-over" and M < K:
        with pytest.raises(LabError, match=f"accumulation steps = {K} .* try {M}"):
            tail(rule=word, microbatches=M, accumulation_steps=K)
        K = M
    epochs = tail(rule=word, microbatches=M, accumulation_steps=K, shortest=4)
    assert torch.equal(epochs.weights.isnan(), epochs.predicted.isnan())
    assert (epochs.weights - epochs.predicted).nan_to_num().abs().max() < 1e-12
    steps = 2 * (M // K) if word == "carried-over" else 2 * math.ceil(M / K)
    assert len(epochs.weights) == steps and epochs.left == (M % K if word == "carried-over" else 0)
    assert int((~epochs.weights.isnan()).sum()) == 2 * M - epochs.left


# Every experiment.


@pytest.mark.parametrize("run", EXPERIMENTS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_what_is_declared_runs_or_is_answered_with_a_remedy(run: Callable[..., Any], data: st.DataObject) -> None:
    values = data.draw(settings_of(run))
    try:
        result = run(**values)
    except LabError as refused:
        assert "accumulation steps = " in str(refused)
        result = run(**{**values, "accumulation_steps": int(str(refused).rpartition("try ")[2])})
    again = result.predicted if run is tail else result.map
    assert again.dim() == 2


@pytest.mark.parametrize(("microbatches", "message"), [([], "0 microbatches"), (made([[[]]]), "0 valid tokens")])
def test_windows_that_cannot_be_compared(microbatches: list[Batch], message: str) -> None:
    with pytest.raises(LabError, match=message):
        compare(Scalar(), microbatches, "token-mean")


def test_an_unknown_rule_and_a_gradient_of_zero_are_said() -> None:
    with pytest.raises(LabError, match="no rule 'means'"):
        compare(Scalar(), made([[[1]]]), "means")
    with pytest.raises(LabError, match="add up to 0"):
        compare(Scalar(), made([[[0]]]), "token-mean")


def test_the_topics_experiments_stand_in_one_place() -> None:
    for name in ("weights", "layers", "trainings", "empty", "tail", "conditions", "by_hand", "compare"):
        assert callable(getattr(accumulation, name))
