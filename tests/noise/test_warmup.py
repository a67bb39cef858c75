"""Warmup against torch's own loop, the borders 2 and 4 of a large learning rate, and decay against pencil."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.noise.warmup import STEPS, decay, left_over, warmup
from tests.frame.driven import extremes

torch.set_num_threads(1)


def alone(rate: float, steps: int, growing: int, seed: int, of: int, which: int) -> Tensor:
    """The losses of one training by autograd and torch's SGD."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (
        each[which].clone().requires_grad_()
        for each in torch.randn(2, of, 64, generator=generator, dtype=torch.float64)
    )
    opt = torch.optim.SGD([u, v], lr=rate)
    losses = []
    for step in range(steps):
        losses.append(((u @ v / 8 - 1) ** 2 / 2).item())
        opt.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / growing)
        x, error = torch.randn(2, 8, 1, of, generator=generator, dtype=torch.float64)[:, :, 0, which]
        opt.zero_grad()
        ((u @ v / 8 * x - x - 0.1 * error) ** 2 / 2).mean().backward()
        opt.step()
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize("which", [0, 4])
def test_every_training_is_what_it_is_alone(which: int) -> None:
    found = warmup(learning_rate=0.5, warmup=20, seeds=5, seed=3)
    assert torch.allclose(found.losses[0, which, :60], alone(0.5, 60, 20, 3, 5, which), rtol=1e-6)
    assert torch.allclose(found.losses[1, which, :60], alone(0.5, 60, 1, 3, 5, which), rtol=1e-6)


def test_curvature_is_the_gauss_newton_eigenvalue() -> None:
    found = warmup(learning_rate=0.5, seeds=4, seed=1)
    u, v = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    jacobian = torch.cat([v, u], 1) / 8  # of f(1)
    largest = torch.stack([torch.linalg.eigvalsh(torch.outer(row, row))[-1] for row in jacobian])
    assert torch.allclose(found.sharpness[1, :, 0], 0.5 * largest)
    assert found.curvature == pytest.approx(float(largest.mean())) and 1.7 < found.curvature < 2.3


def test_the_learning_rate_grows_in_a_line_and_stays() -> None:
    found = warmup(learning_rate=4.0, warmup=100)
    assert found.rate[[0, 49, 99, 100, 300]].tolist() == pytest.approx([0.04, 2.0, 4.0, 4.0, 4.0])
    assert torch.allclose(found.sharpness[0, :, 0] * 100, found.sharpness[1, :, 0])
    assert len(found.rate) == STEPS + 1 == found.losses.shape[2] and torch.equal(
        found.losses[0, :, 0], found.losses[1, :, 0]
    )


def test_below_two_nothing_is_lost_beyond_four_all_is_and_warmup_saves_it() -> None:
    for seed in range(4):
        assert warmup(learning_rate=0.5, seed=seed).lost == (0, 0)  # η λ about 1
        without = warmup(learning_rate=6.0, seed=seed)  # about 12
        assert without.lost[1] == 8 and without.sharpness[1, :, -1].isinf().all()
    found = [warmup(seed=seed).lost for seed in range(6)]
    assert all(saved <= 1 and lost >= 5 for saved, lost in found)
    assert sum(warmup(warmup=10, seed=seed).lost[0] for seed in range(6)) > 10  # too short a warmup


def test_with_warmup_the_curvature_sinks_as_the_rate_rises() -> None:
    found = warmup()
    curvature = found.sharpness[0] / found.rate
    assert (curvature[:, -1] < 0.5 * curvature[:, 0]).all()
    assert (found.sharpness[0, :, -1] < 2.5).all() and float(found.sharpness[0].max()) < 4


def test_lost_is_worse_than_saying_nothing() -> None:
    found = warmup(seeds=16)
    ends = found.losses[:, :, -1]
    assert found.lost == tuple(sum(not loss <= 0.5 for loss in side) for side in ends.tolist())
    assert not found.losses.isnan().any() and not found.sharpness.isnan().any()
    worse = warmup(learning_rate=1.0, warmup=300, seed=2)  # two that end high, and finite
    assert worse.lost == (2, 0) and 0.5 < float(worse.losses[0, :, -1].max()) < 100


def test_decay_by_pencil() -> None:
    found = decay(factor=4, learning_rate=0.01, weight_decay=1.0, updates=10)
    expected = [0.99**40, 0.99**10, 0.98**10, 0.96**10, 0.96**10]
    assert found.left.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.formula.tolist() == pytest.approx(expected, rel=1e-12)
    logs = [math.log(each) / math.log(expected[0]) for each in expected]
    assert found.forgotten.tolist() == pytest.approx(logs) and found.steps == (40, 10, 10, 10, 10)
    assert found.forgotten[1].item() == pytest.approx(1 / 4) and found.forgotten[2].item() == pytest.approx(
        0.5, rel=0.02
    )
    assert found.off <= found.tolerance.value < 1e-9


def test_left_over_is_what_adamw_leaves_and_adam_moves_nothing_else() -> None:
    assert left_over(0.01, 0.0, 50) == 1.0
    assert left_over(0.01, 1.0, 3) == pytest.approx(0.99**3, rel=1e-12)


@pytest.mark.parametrize("run", [warmup, decay])
def test_extremes(run: Any) -> None:
    state = torch.get_rng_state()
    for values in extremes(run):
        found, again = run(**values), run(**values)
        for name, value in vars(found).items():
            other = getattr(again, name)
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other
        if run is decay:
            assert found.off <= found.tolerance.value and (found.left > 0).all()
    assert torch.equal(state, torch.get_rng_state())
