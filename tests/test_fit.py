"""The fit against numpy's least squares, and what it must refuse to guess."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from labkit.corpus import batch
from labkit.errors import LabError
from labkit.fit import Gradient, coordinates, distance, fit, flat, gradient
from labkit.nets import Transformer, sequence_gradients

torch.set_num_threads(1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", [0, 1])
def test_weights_of_32_separate_sequences_come_back(seed: int) -> None:
    references = sequence_gradients(Transformer(seed=seed, dtype=torch.float64), [batch(seed, 32)])
    weights = drawn(32, seed=seed)
    estimate = fit(weights @ references, references)
    assert (estimate.values - weights).abs().max() < 1e-12
    assert estimate.residual < 1e-14 and 1 < estimate.condition < 100 and not estimate.indistinguishable


def test_in_float32_they_come_back_to_rounding() -> None:
    references = sequence_gradients(Transformer(), [batch(0, 32)])
    assert references.dtype == torch.float32
    weights = drawn(32).float()
    assert (fit(weights @ references, references).values - weights).abs().max() < 1e-5


@given(st.integers(1, 6), st.integers(6, 40), st.integers(0, 999))
@settings(deadline=None)
def test_values_residual_and_condition_are_numpys(m: int, size: int, seed: int) -> None:
    references, g = drawn(m, size, seed=seed), drawn(size, seed=seed + 1)
    weights = fit(g, references)
    expected, *_ = np.linalg.lstsq(references.numpy().T, g.numpy(), rcond=None)
    assert weights.values.numpy() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    left = g.numpy() - references.numpy().T @ expected
    assert weights.residual == pytest.approx(np.linalg.norm(left) / np.linalg.norm(g.numpy()), abs=1e-12)
    scaled = references.numpy() / np.linalg.norm(references.numpy(), axis=1, keepdims=True)
    assert weights.condition == pytest.approx(np.linalg.cond(scaled), rel=1e-9)


def test_twins_are_reported_and_their_sum_is_known() -> None:
    r = drawn(5, 100)
    weights = fit(2 * r[0] + 0.5 * r[1] + 3 * r[2], r[[0, 1, 2, 1, 0]])
    assert weights.indistinguishable == ((0, 4), (1, 3))
    assert weights.values[[0, 1, 3, 4]].isnan().all()
    assert float(weights.values[2]) == pytest.approx(3, abs=1e-12)
    assert weights.totals == pytest.approx((2.0, 0.5), abs=1e-12)
    assert weights.condition < 3


def test_a_multiple_and_a_sum_leave_not_even_the_total() -> None:
    r = drawn(4, 100)
    weights = fit(r.sum(0), torch.stack([r[0], 2 * r[0], r[1], r[2], r[1] - 3 * r[2], r[3]]))
    assert weights.indistinguishable == ((0, 1), (2, 3, 4))
    assert all(math.isnan(total) for total in weights.totals)
    assert float(weights.values[5]) == pytest.approx(1, abs=1e-12)
    assert weights.residual < 1e-12


@pytest.mark.parametrize("small", [1e-3, 1e-6, 1e-9])
def test_a_weak_tie_is_a_tie(small: float) -> None:
    r = drawn(2, 100)
    weights = fit(r[0], torch.stack([r[0], r[1], r[0] + small * r[1]]))
    assert weights.indistinguishable == ((0, 1, 2),)


def test_twins_computed_apart_in_float32_are_twins() -> None:
    tokens, labels = batch(0, 4)
    model = Transformer()
    apart = sequence_gradients(model, [(tokens, labels), (tokens[:1], labels[:1])])
    noisy = apart[4] * (1 + 1e-6 * drawn(len(apart[4]))).float()
    weights = fit(apart.sum(0), torch.stack([*apart[:4], noisy]))
    assert weights.indistinguishable == ((0, 4),)
    assert weights.totals[0] == pytest.approx(2, abs=1e-4)


def test_a_reference_of_zero_has_no_weight() -> None:
    r = drawn(3, 20)
    r[1] = 0
    weights = fit(r[0] - r[2], r)
    assert weights.zero == (1,) and math.isnan(weights.values[1]) and weights.indistinguishable == ()
    assert weights.values[[0, 2]].tolist() == pytest.approx([1, -1])
    nothing = fit(r[0], torch.zeros(2, 20))
    assert nothing.zero == (0, 1) and nothing.residual == 1 and math.isnan(nothing.condition)


def test_a_gradient_of_zero_has_weights_of_zero() -> None:
    weights = fit(torch.zeros(20), drawn(3, 20))
    assert weights.values.tolist() == [0, 0, 0] and weights.residual == 0


def test_fewer_coordinates_than_references() -> None:
    weights = fit(torch.tensor([3.0]), torch.tensor([[1.0], [2.0]]))
    assert weights.indistinguishable == ((0, 1),) and weights.residual < 1e-12


def test_a_residual_shows_what_no_weights_explain() -> None:
    r = torch.eye(3, 4, dtype=torch.float64)
    assert fit(torch.tensor([3.0, 0.0, 0.0, 4.0]), r).residual == pytest.approx(0.8)


def test_lists_of_layers_and_flat_vectors_are_the_same() -> None:
    shapes, r = ((3, 4), (5,), ()), drawn(2, 18)
    layered = [[part.reshape(s) for part, s in zip(row.split([12, 5, 1]), shapes, strict=True)] for row in r]
    g = [2 * a - b for a, b in zip(*layered, strict=True)]
    mixed: list[Gradient] = [layered[0], r[1]]
    assert fit(g, layered).values.tolist() == pytest.approx([2, -1])
    assert fit(g, r).values.tolist() == pytest.approx([2, -1])
    assert fit(g, mixed).values.tolist() == pytest.approx([2, -1])


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=8).filter(any), st.integers(1, 4000), st.integers(0, 99))
@settings(deadline=None)
def test_a_sample_takes_every_layer_in_proportion(sizes: list[int], sample: int, seed: int) -> None:
    chosen = coordinates(sizes, sample, seed)
    assert sum(map(len, chosen)) >= min(sample, sum(sizes))
    for at, size in zip(chosen, sizes, strict=True):
        assert len(at.unique()) == len(at) <= size
        assert not len(at) or 0 <= int(at.min()) <= int(at.max()) < size
        if sum(sizes) > sample:
            assert abs(len(at) - sample * size / sum(sizes)) < 1
    assert all(torch.equal(a, b) for a, b in zip(chosen, coordinates(sizes, sample, seed), strict=True))


def test_a_large_model_is_sampled_and_its_weights_come_back() -> None:
    layers = [drawn(4, 300, 400), drawn(4, 50_000, seed=1), drawn(4, 7, seed=2)]
    weights = torch.tensor([1.0, -2.0, 0.25, 3.0], dtype=torch.float64)
    g = [torch.tensordot(weights, layer, 1) for layer in layers]
    references = [[layer[m] for layer in layers] for m in range(4)]
    assert sum(map(len, coordinates([layer[0].numel() for layer in layers]))) >= 65_536
    for seed in (0, 1):
        assert fit(g, references, seed=seed).values.tolist() == pytest.approx(weights.tolist(), abs=1e-12)
    one, other = (fit(g[0] + drawn(300, 400, seed=9), [r[0] for r in references], seed=seed) for seed in (0, 1))
    assert one.values.tolist() != other.values.tolist()


@pytest.mark.parametrize(
    ("g", "references", "message"),
    [
        (torch.ones(3), torch.ones(2, 4), "reference 0 has 4 values, the gradient 3"),
        (torch.ones(3), [torch.ones(3), [torch.ones(2)]], "reference 1 has 2 values"),
        (torch.ones(3), torch.ones(0, 3), "0 references for 3 values"),
        (torch.ones(0), torch.ones(1, 0), "1 references for 0 values"),
        (torch.tensor([1.0, math.nan]), torch.ones(1, 2), "the gradient has values that are not finite"),
        (torch.ones(2), torch.tensor([[1.0, math.inf]]), "reference 0 has values that are not finite"),
        (torch.ones(2, dtype=torch.long), torch.ones(1, 2), "no gradient: try .double"),
    ],
)
def test_what_cannot_be_fitted_is_said(g: Tensor, references: Tensor, message: str) -> None:
    with pytest.raises(LabError, match=message) as caught:
        fit(g, references)
    assert "try" in str(caught.value)


def test_distance_by_hand() -> None:
    off = distance(torch.tensor([3.0, 4.0]), torch.tensor([2.0, 0.0]))
    assert (off.norm, off.right_norm, off.norm_ratio, off.projection) == (5.0, 2.0, 2.5, 1.5)
    assert off.relative_error == pytest.approx(math.sqrt(17) / 2) and off.cosine == pytest.approx(0.6)
    nothing = distance(torch.ones(2), torch.zeros(2))
    assert math.isnan(nothing.relative_error) and math.isnan(nothing.projection) and math.isnan(nothing.cosine)
    assert distance(torch.zeros(2), torch.ones(2)).relative_error == 1


def test_gradient_and_flat() -> None:
    model = nn.Linear(2, 1)
    model(torch.tensor([[2.0, 3.0]])).sum().backward()
    model.bias.grad = None
    tensors = gradient(model)
    assert flat(tensors).tolist() == [2, 3, 0] and flat(tensors).dtype == torch.float64
    model.zero_grad(set_to_none=False)
    assert tensors[0].tolist() == [[2, 3]]
