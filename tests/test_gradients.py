"""Gradients with their contributions, and the entries that a picture shows, by hand and against the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from labkit import LabError, accumulation
from labkit.entries import by_parameter, entries
from labkit.gradients import CHARACTERS, REST, composed


@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(1, 30), st.floats(0, 5))
def test_contributions_and_their_rest_sum_to_the_gradient(seed: int, m: int, P: int, noise: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, weights, extra = (torch.randn(*s, generator=generator).double() for s in ((m, P), (m,), (P,)))
    g = weights @ rows + noise * extra
    both = composed(g, weights[:, None] * rows, rows, [str(k) for k in range(m)], 1e-12)
    assert torch.allclose(both.contributions.sum(0), g, atol=1e-9) and torch.allclose(both.reference, rows.sum(0))
    assert len(both.labels) == len(both.contributions) == len(both.reference_contributions)
    assert (both.labels[-1] == REST) == (len(both.labels) > m)


def test_the_direction_of_a_rule_is_what_its_comparison_says() -> None:
    for rule in accumulation.WINDOW:
        comparison = accumulation.weights(rule=rule)
        plane = comparison.gradients.plane
        assert plane.length_ratio == pytest.approx(comparison.norm_ratio)
        assert math.cos(math.radians(plane.angle)) == pytest.approx(comparison.cosine)
        assert plane.relative_error == pytest.approx(comparison.relative_error, abs=1e-12)
        assert plane.equal == comparison.equal
        assert len(comparison.gradients.labels) == 4


def test_entries_are_the_parameter_itself_where_it_is_small_and_its_largest_part_where_not() -> None:
    model = nn.Linear(3, 2)
    named = list(model.named_parameters())
    G, g = torch.arange(8.0), torch.arange(8.0).flip(0)
    cut = by_parameter(named, g), by_parameter(named, G)
    whole = entries(*cut, "weight")
    assert torch.equal(whole.reference, torch.arange(6.0).view(2, 3).double()) and whole.rows == ("0", "1")
    assert torch.equal(whole.difference, whole.gradient - whole.reference) and whole.largest == 7
    part = entries(*cut, "weight", rows=1, columns=2)
    assert part.rows == ("0",) and part.columns == (0, 1) and part.shape == (2, 3)
    assert entries(*cut, "bias").reference.tolist() == [[6, 7]]


@pytest.mark.parametrize(("name", "words"), [("wait", "try 'weight', 'bias'"), ("", "there is no parameter ''")])
def test_a_parameter_that_is_not_there_is_refused(name: str, words: str) -> None:
    cut = by_parameter(list(nn.Linear(3, 2).named_parameters()), torch.zeros(8))
    with pytest.raises(LabError, match=words):
        entries(cut, cut, name)


def test_rows_of_the_embedding_are_characters() -> None:
    seen = accumulation.weights().gradients.entries("embedding")
    assert len(seen.rows) == 16 and set(seen.rows) <= set(CHARACTERS) and "e" in seen.rows and "space" in seen.rows
    assert len(set(CHARACTERS)) == 128
