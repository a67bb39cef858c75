"""The plane of two gradients against norms, cosines and errors taken in the whole space."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import LabError
from labkit.direction import direction
from labkit.fit import distance

SEEDS, SIZES = st.integers(0, 2**31), st.integers(1, 40)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(SEEDS, SIZES, st.integers(1, 9), st.floats(-3, 3))
def test_lengths_angle_and_error_are_those_of_the_whole_space(seed: int, P: int, m: int, power: float) -> None:
    rows = drawn(seed, m, P)
    weights = drawn(seed + 1, m).exp() * 10**power
    parts = weights[:, None] * rows
    G, g = rows.sum(0), parts.sum(0)
    plane, exact = direction(g, G, parts, rows), distance(g, G)
    assert plane.gradient.norm() == pytest.approx(exact.norm_ratio)
    assert math.cos(math.radians(plane.angle)) == pytest.approx(exact.cosine, abs=1e-9)
    assert (plane.gradient - plane.reference).norm() == pytest.approx(exact.relative_error, rel=1e-6, abs=1e-9)
    assert plane.chain[-1].tolist() == pytest.approx(plane.gradient.tolist(), abs=1e-9 * (1 + exact.norm_ratio))
    assert plane.reference_chain[-1].tolist() == pytest.approx([1, 0], abs=1e-9)
    assert 0 <= plane.angle <= 180 and plane.chain.shape == (m + 1, 2)


@given(SEEDS, st.integers(3, 40), st.integers(2, 9), st.floats(0.01, 100))
def test_between_parallel_gradients_the_contributions_are_seen_as_far_apart_as_they_can_be(
    seed: int, P: int, m: int, factor: float
) -> None:
    rows = drawn(seed, m, P)
    G = rows.sum(0)
    plane = direction(factor * G, G, factor * rows, rows)
    assert plane.angle == pytest.approx(0, abs=1e-6) and plane.length_ratio == pytest.approx(factor)
    unit = G / G.norm()
    across = torch.cat([factor * rows, rows]) / G.norm()
    across = across - torch.outer(across @ unit, unit)
    seen = torch.cat([plane.chain.diff(dim=0), plane.reference_chain.diff(dim=0)])[:, 1]
    assert seen.norm() == pytest.approx(float(torch.linalg.matrix_norm(across, 2)), rel=1e-6)


@given(SEEDS, SIZES)
def test_what_lies_outside_the_plane_cancels(seed: int, P: int) -> None:
    rows = drawn(seed, 4, P)
    parts = torch.tensor([1.0, 2, 0, 1])[:, None] * rows
    plane = direction(parts.sum(0), rows.sum(0), parts, rows)
    lengths = rows.norm(dim=1) / rows.sum(0).norm()
    inside = plane.reference_chain.diff(dim=0).norm(dim=1)
    assert bool((inside <= lengths * (1 + 1e-9)).all())
    assert plane.outside == pytest.approx(
        float(
            (parts.norm(dim=1).square() / rows.sum(0).norm() ** 2 - plane.chain.diff(dim=0).square().sum(1))
            .clamp(min=0)
            .max()
            .sqrt()
            .maximum((lengths.square() - inside.square()).clamp(min=0).max().sqrt())
        ),
        abs=1e-6,
    )


def test_one_contribution_along_the_gradient_leaves_the_second_axis_empty() -> None:
    plane = direction(torch.tensor([3.0]), torch.tensor([-1.5]))
    assert plane.gradient.tolist() == [-2, 0] and plane.angle == 180 and plane.outside == 0


@pytest.mark.parametrize(
    ("gradient", "reference", "parts", "words"),
    [
        ([1.0, 2.0], [0.0, 0.0], None, "spans no plane"),
        ([math.nan, 2.0], [1.0, 0.0], None, "spans no plane"),
        ([1.0, 2.0], [math.inf, 0.0], None, "spans no plane"),
        ([1.0, 2.0], [1.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], "miss their gradient by 1"),
    ],
)
def test_what_makes_no_plane_is_refused(
    gradient: list[float], reference: list[float], parts: list[list[float]] | None, words: str
) -> None:
    with pytest.raises(LabError, match=words):
        direction(torch.tensor(gradient), torch.tensor(reference), None if parts is None else torch.tensor(parts))
