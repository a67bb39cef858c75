"""Statistics of microbatches and what helps, against torch's own modules on all images at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labkit import rules
from labkit.errors import LabError
from labkit.fit import flat
from labkit.images import ConvNet, draw, grouped, split
from labkit.normalization import remedies, statistics
from labkit.normalization.sync_batchnorm import accumulated, run
from tests.normalization.test_sync_batchnorm import by_torch
from tests.strategies import settings_of
from tests.test_images import library

torch.set_num_threads(1)

EXPERIMENTS = (statistics, remedies)
INDEPENDENT = ("group", "layer", "frozen")


@pytest.mark.parametrize("norm", INDEPENDENT)
@pytest.mark.parametrize("composition", ["shuffled", "sorted"])
@pytest.mark.parametrize(("K", "images", "depth"), [(1, 8, 1), (4, 32, 2), (5, 17, 3), (16, 64, 4), (8, 8, 2)])
def test_what_looks_at_one_image_is_equal(norm: str, composition: str, K: int, images: int, depth: int) -> None:
    result = statistics(norm=norm, composition=composition, accumulation_steps=K, images=images, depth=depth)
    assert result.equal and result.gradient.relative_error < 1e-13 < result.tolerance.value < 1e-8
    assert result.outputs < 1e-14 and result.loss == pytest.approx(result.right_loss, rel=1e-13)
    assert all(each.relative_error < 1e-12 for each in result.per_layer.values())
    assert math.isnan(result.running_mean) and math.isnan(result.running_variance)


@pytest.mark.parametrize("composition", ["shuffled", "sorted"])
@pytest.mark.parametrize(("K", "images", "depth"), [(2, 64, 1), (4, 32, 2), (5, 17, 3), (16, 64, 4), (8, 8, 2)])
def test_batch_norm_is_not(composition: str, K: int, images: int, depth: int) -> None:
    found = statistics(composition=composition, accumulation_steps=K, images=images, depth=depth)
    assert not found.equal and found.gradient.relative_error > 1e-3 and found.outputs > 1e-3
    assert abs(found.loss - found.right_loss) > 1e-5 and found.running_mean > 0.01 and found.running_variance > 0.001


def test_one_microbatch_is_the_one_batch() -> None:
    result = statistics(accumulation_steps=1)
    assert result.equal and result.gradient.relative_error == result.outputs == 0 and result.loss == result.right_loss
    assert result.running_mean == result.running_variance == 0


@pytest.mark.parametrize("composition", ["shuffled", "sorted"])
def test_loss_gradient_and_outputs_by_torchs_own_modules(composition: str) -> None:
    result = statistics(composition=composition, accumulation_steps=3, images=20, depth=3, seed=6)
    model, (x, y) = ConvNet(6, depth=3), grouped(6, 20, composition)
    parts = split(x, y, 3)
    wrong, right = by_torch(model, parts), by_torch(model, [(x, y)])
    assert result.gradient.norm == pytest.approx(float(wrong.norm()), rel=1e-12)
    assert result.gradient.right_norm == pytest.approx(float(right.norm()), rel=1e-12)
    assert result.gradient.relative_error == pytest.approx(float((wrong - right).norm() / right.norm()), rel=1e-10)
    logits = torch.cat([library(model, "batch")(part).detach() for part, _ in parts])
    whole = library(model, "batch")(x).detach()
    assert result.loss == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-13)
    assert result.right_loss == pytest.approx(F.cross_entropy(whole, y).item(), rel=1e-13)
    assert result.outputs == pytest.approx(float((logits - whole).norm() / whole.norm()), rel=1e-10)


def test_the_layers_make_up_the_whole() -> None:
    found, model = statistics(depth=3), ConvNet(0, depth=3)
    assert list(found.per_layer) == [name for name, _ in model.named_parameters()]
    square = sum((each.relative_error * each.right_norm) ** 2 for each in found.per_layer.values())
    assert math.sqrt(square) == pytest.approx(found.gradient.relative_error * found.gradient.right_norm, rel=1e-12)


def test_images_and_statistics_of_each_microbatch() -> None:
    result = statistics(composition="sorted", accumulation_steps=3, images=20, seed=2)
    x, y = grouped(2, 20, "sorted")
    assert result.images.equal(x[:, 0]) and result.labels.equal(y)
    assert result.microbatch.tolist() == [0] * 7 + [1] * 7 + [2] * 6
    h = F.conv2d(x, ConvNet(2).kernels[0], padding=1).detach()
    assert torch.allclose(result.mean, h.mean((0, 2, 3)), rtol=1e-13)
    assert torch.allclose(result.variance, h.var((0, 2, 3), correction=0), rtol=1e-13)
    for m in range(3):
        part = h[result.microbatch == m]
        assert torch.allclose(result.means[m], part.mean((0, 2, 3)), rtol=1e-13)
        assert torch.allclose(result.variances[m], part.var((0, 2, 3), correction=0), rtol=1e-13)


@pytest.mark.parametrize("momentum", [0.01, 0.1, 1.0])
def test_running_statistics_by_the_recursion(momentum: float) -> None:
    result = statistics(momentum=momentum, accumulation_steps=4, images=24, depth=1)
    mean, variance = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    n = 6 * 256
    for m in range(4):
        mean = (1 - momentum) * mean + momentum * result.means[m]
        variance = (1 - momentum) * variance + momentum * result.variances[m] * n / (n - 1)
    right_mean = momentum * result.mean
    right_variance = (1 - momentum) + momentum * result.variance * 4 * n / (4 * n - 1)
    assert result.running_mean == pytest.approx(float((mean - right_mean).norm() / right_mean.norm()), rel=1e-10)
    off = float((variance - right_variance).norm() / right_variance.norm())
    assert result.running_variance == pytest.approx(off, rel=1e-10)


def test_sorting_by_class_is_worse() -> None:
    for seed in range(5):
        shuffled, by_class = (statistics(composition=each, seed=seed) for each in ("shuffled", "sorted"))
        assert by_class.gradient.relative_error > shuffled.gradient.relative_error
        assert by_class.means.std(0).mean() > 1.5 * shuffled.means.std(0).mean()
        assert by_class.right_loss == pytest.approx(shuffled.right_loss, rel=1e-12)


def by_name(**values: Any) -> dict[str, Any]:
    return {row.name: row for row in remedies(**values).rows}


@pytest.mark.parametrize("composition", ["shuffled", "sorted"])
@pytest.mark.parametrize(("K", "images", "depth"), [(4, 24, 2), (3, 10, 1), (16, 64, 4), (8, 8, 3)])
def test_which_remedies_are_the_one_batch(composition: str, K: int, images: int, depth: int) -> None:
    found = by_name(composition=composition, accumulation_steps=K, images=images, depth=depth, seed=1)
    assert [name for name, row in found.items() if not row.equal] == [
        "microbatch statistics",
        "batch statistics held constant",
    ]
    assert all(row.relative_error < 1e-12 < row.tolerance < 1e-8 for row in found.values() if row.equal)
    assert all(row.relative_error > 1e-3 for row in found.values() if not row.equal)
    assert list(found)[2:] == ["synchronised", "frozen", "group", "layer"]
    assert len({row.cost for row in found.values()}) == 5


@pytest.mark.parametrize("K", [1, 4])
def test_statistics_held_constant_by_torchs_own_modules(K: int) -> None:
    x, y = grouped(3, 20, "sorted")
    model = ConvNet(3, depth=3, momentum=1.0)
    usual = library(model, "batch")
    for module in usual:
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    right = torch.autograd.grad(F.cross_entropy(usual(x), y), list(model.parameters()))
    for at, module in enumerate(each for each in usual if isinstance(each, nn.BatchNorm2d)):
        n = 20 * 256 // 4**at
        assert module.running_var is not None
        module.running_var *= (n - 1) / n
        module.eval()
    held = torch.autograd.grad(F.cross_entropy(usual(x), y), list(model.parameters()))
    expected = float((flat(held) - flat(right)).norm() / flat(right).norm())
    found = by_name(composition="sorted", accumulation_steps=K, images=20, depth=3, seed=3)
    assert found["batch statistics held constant"].relative_error == pytest.approx(expected, rel=1e-9)


def test_the_fault_in_both_experiments_is_the_same_number() -> None:
    values: dict[str, Any] = {"composition": "sorted", "accumulation_steps": 5, "images": 22, "depth": 2, "seed": 8}
    found = by_name(**values)
    names = {"microbatch statistics": "batch", **{norm: norm for norm in INDEPENDENT}}
    for name, norm in names.items():
        other = statistics(norm=norm, **values)
        assert found[name].relative_error == other.gradient.relative_error
        assert found[name].tolerance == other.tolerance.value


def test_one_microbatch_needs_no_remedy_but_held_statistics_are_still_wrong() -> None:
    found = by_name(accumulation_steps=1)
    assert found["microbatch statistics"].relative_error == 0 and found["microbatch statistics"].equal
    assert not found["batch statistics held constant"].equal


def test_the_rule_in_the_table() -> None:
    rule = rules.rule("batch-dependent-layer")
    assert rule.topic == "normalization" and not rule.right and rule.loop is accumulated
    assert rule.changes == "the statistics that the layer normalises by" and len(rule.looks_like) > 20
    model, parts = ConvNet(0), split(*draw(0, 12), 3)
    for _ in range(2):
        rule.run(model, parts)
        assert (flat(p.grad for p in model.parameters()) - run(accumulated, ConvNet(0), parts).gradient).norm() < 1e-15


def test_more_microbatches_than_images_are_refused_with_a_remedy() -> None:
    for experiment in EXPERIMENTS:
        with pytest.raises(LabError, match="accumulation steps = 16 is outside 1 … 8, the number of images: try 8"):
            experiment(images=8, accumulation_steps=16)
        experiment(images=8, accumulation_steps=8)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_what_is_declared_runs_the_same_twice(experiment: Callable[..., Any], data: st.DataObject) -> None:
    values, before = data.draw(settings_of(experiment)), torch.get_rng_state()
    try:
        assert repr(experiment(**values)) == repr(experiment(**values))
    except LabError as refused:
        assert experiment(**{**values, "accumulation_steps": int(str(refused).rpartition("try ")[2])})
    assert torch.get_rng_state().equal(before)
