"""The loops, and shared statistics, against torch's BatchNorm on all images at once and exact fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from labkit.errors import LabError
from labkit.fit import flat, gradient
from labkit.images import ConvNet, draw, grouped, split
from labkit.normalization.sync_batchnorm import (
    METHODS,
    accumulated,
    bound,
    in_lockstep,
    lockstep,
    one_batch,
    pooled,
    ranks,
    run,
)
from tests.strategies import settings_of
from tests.test_images import library

torch.set_num_threads(1)

GROUPS = st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=5), min_size=1, max_size=5)


@given(GROUPS)
@settings(deadline=None)
def test_pooled_are_the_moments_of_all_values(groups: list[list[int]]) -> None:
    tensors = [torch.tensor(group, dtype=torch.float64) for group in groups]
    found = pooled(
        torch.stack([each.mean() for each in tensors]),
        torch.stack([each.var(correction=0) for each in tensors]),
        torch.tensor([len(group) for group in groups]),
    )
    values = [Fraction(value) for group in groups for value in group]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    assert [float(each) for each in found] == pytest.approx([float(mean), float(variance)], rel=1e-14, abs=1e-14)


def test_pooled_keeps_channels_apart() -> None:
    x = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = x.split([2, 5])
    found = pooled(
        torch.stack([part.mean(0) for part in parts]),
        torch.stack([part.var(0, correction=0) for part in parts]),
        torch.tensor([2, 5]),
    )
    assert torch.allclose(found[0], x.mean(0), rtol=1e-14) and torch.allclose(found[1], x.var(0, correction=0))


def by_torch(model: ConvNet, parts: list[tuple[Tensor, Tensor]], norm: str = "batch") -> Tensor:
    """Each part in a forward of torch's own modules, its mean loss weighted by its share of the images."""
    B = sum(len(y) for _, y in parts)
    net = library(model, norm)
    losses = [F.cross_entropy(net(x), y) * (len(y) / B) for x, y in parts]
    return flat(torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters())))


@pytest.mark.parametrize("norm", ["batch", "group", "frozen"])
@pytest.mark.parametrize("K", [1, 3, 8])
def test_the_loops_against_torchs_own_modules(norm: str, K: int) -> None:
    model, batch = ConvNet(2, norm, depth=3), draw(2, 8)
    parts = split(*batch, K)
    assert (run(accumulated, model, parts).gradient - by_torch(model, parts, norm)).norm() < 1e-13
    assert (run(one_batch, model, parts).gradient - by_torch(model, [batch], norm)).norm() < 1e-13


@pytest.mark.parametrize("K", [1, 2, 5, 8])
@pytest.mark.parametrize("depth", [1, 4])
def test_lockstep_is_the_whole_batch_and_the_gradient_of_it(K: int, depth: int) -> None:
    model, batch = ConvNet(3, depth=depth), grouped(3, 8, "sorted")
    parts = split(*batch, K)
    result = run(in_lockstep, model, parts)
    right = by_torch(model, [batch])
    assert (result.gradient - right).norm() < 1e-12 * right.norm()
    logits = lockstep(model, [x for x, _ in parts], METHODS["weighted"])
    assert (logits - library(model, "batch")(batch[0])).abs().max() < 1e-12
    assert all((norm.running_mean == 0).all() for norm in model.norms)


def test_each_for_itself_is_accumulation() -> None:
    model, parts = ConvNet(0, depth=3), split(*draw(0, 10), 3)
    loops = (lambda *window: in_lockstep(*window, METHODS["own"]), accumulated)
    found, right = (run(loop, model, parts).gradient for loop in loops)
    assert (found - right).norm() < 1e-13 * right.norm()


def test_a_run_says_what_every_forward_added() -> None:
    model, parts = ConvNet(1, "group"), split(*draw(1, 9), 4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    result = run(accumulated, model, parts)
    assert result.parts.shape == (4, len(result.gradient)) and result.logits.shape == (9, 6)
    assert result.logits.equal(torch.cat([model(x) for x, _ in parts]))
    for part, added in zip(parts, result.parts, strict=True):
        alone = by_torch(model, [part], "group") * len(part[1]) / 9
        assert (alone - added).norm() < 1e-14
    assert result.gradient.equal(flat(gradient(model))) and run(in_lockstep, ConvNet(0), parts).parts.shape[0] == 1
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_the_bound_counts_what_is_added() -> None:
    model, parts = ConvNet(0, depth=2), torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    found = bound(model, parts, images=10, right=5.0)
    fan_in = 9 + 72 + 4 + 8  # two kernels; weight and bias of two normalisations; the head
    assert found.terms == 2560 + 2 * (fan_in + 2 * 2560) and found.cancellation == 7 / 5


@pytest.mark.parametrize("share", [0.05, 0.25, 1 / 3, 0.5, 0.9])
@pytest.mark.parametrize("R", [2, 3, 4])
def test_weighted_statistics_alone_are_right(share: float, R: int) -> None:
    found = {method: ranks(method=method, ranks=R, images=40, first_share=share, seed=1) for method in METHODS}
    even = len(set(found["own"].counts)) == 1
    assert even == (share * R == 1 and R != 3)
    assert [each.equal for each in found.values()] == [False, even, True]
    assert found["own"].gradient.relative_error > 0.01
    assert even or found["rank means"].gradient.relative_error > 1e-3
    assert found["weighted"].gradient.relative_error < 1e-13
    assert sum(found["own"].counts) == 40 and len(found["own"].counts) == R
    assert found["own"].counts[0] == round(share * 40)


def test_the_mean_of_rank_means_is_off_as_algebra_says() -> None:
    drift = ranks(method="rank means", images=24, first_share=0.25)
    (a, b), (v, w) = drift.rank_means, drift.rank_variances
    assert drift.counts == (6, 18)
    assert drift.right_mean == pytest.approx(a / 4 + 3 * b / 4, rel=1e-13)
    assert drift.mean - drift.right_mean == pytest.approx((1 / 2 - 1 / 4) * (a - b), rel=1e-9)
    assert drift.variance == pytest.approx((v + w) / 2 + ((a - b) / 2) ** 2, rel=1e-13)
    assert drift.right_variance == pytest.approx(v / 4 + 3 * w / 4 + 3 / 16 * (a - b) ** 2, rel=1e-13)
    own, weighted = ranks(method="own"), ranks(method="weighted")
    assert (own.mean, own.variance) == (own.rank_means[0], own.rank_variances[0])
    assert weighted.mean == pytest.approx(weighted.right_mean, rel=1e-13)
    assert weighted.variance == pytest.approx(weighted.right_variance, rel=1e-12)
    assert own.rank_means == weighted.rank_means == drift.rank_means


@pytest.mark.parametrize("seed", range(6))
def test_the_figures_are_of_the_channel_whose_ranks_differ_most(seed: int) -> None:
    found, (x, _) = ranks(seed=seed), grouped(seed, 24, "sorted")
    h = F.conv2d(x, ConvNet(seed).kernels[0], padding=1).detach()
    means = torch.stack([h[:6].mean((0, 2, 3)), h[6:].mean((0, 2, 3))])
    assert found.channel == int((means[0] - means[1]).abs().argmax())
    assert found.rank_means == pytest.approx(means[:, found.channel].tolist(), rel=1e-13)
    assert found.right_variance == pytest.approx(h[:, found.channel].var(correction=0).item(), rel=1e-13)


def test_each_rank_for_itself_is_what_torch_makes_of_it() -> None:
    found, (x, y) = ranks(method="own", composition="shuffled"), draw(0, 24)
    model = ConvNet(0)
    own, right = by_torch(model, [(x[:6], y[:6]), (x[6:], y[6:])]), by_torch(model, [(x, y)])
    assert found.gradient.norm == pytest.approx(float(own.norm()), rel=1e-12)
    assert found.gradient.relative_error == pytest.approx(float((own - right).norm() / right.norm()), rel=1e-9)


@given(settings_of(ranks))
@settings(max_examples=30, deadline=None)
def test_a_rank_without_images_is_refused_with_a_share_that_works(values: dict[str, Any]) -> None:
    try:
        drift = ranks(**values)
    except LabError as refused:
        drift = ranks(**{**values, "first_share": float(str(refused).rpartition("try ")[2])})
        assert min(drift.counts) == 1
    assert min(drift.counts) >= 1 and drift.equal in (True, False)
    assert repr(ranks(**{**values, "first_share": drift.counts[0] / sum(drift.counts)})) == repr(drift)


def test_the_sentence_of_a_refusal() -> None:
    said = "first share = 0.9 gives it 7 of 8 images, and 1 to the other 3 ranks, none may be empty: try 0.6250"
    with pytest.raises(LabError, match=said):
        ranks(images=8, ranks=4, first_share=0.9)
    with pytest.raises(LabError, match=r"gives it 0 of 8 images, .*: try 0.1250"):
        ranks(images=8, first_share=0.05)
