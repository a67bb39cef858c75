"""Which random numbers an image meets, what gradient follows, and what is equal on average."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from labkit import rules
from labkit.corpus import made as targets_of
from labkit.corpus import window
from labkit.errors import LabError
from labkit.fit import flat, gradient
from labkit.images import ConvNet, draw, split
from labkit.normalization.random_streams import UNITS, Net, augment, augmentation, draw_stream, dropout
from labkit.normalization.randomness import SOURCES, Targets, randomness, redraw, targets
from labkit.normalization.sync_batchnorm import accumulated, one_batch
from tests.strategies import settings_of

torch.set_num_threads(1)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("K", "images"), [(2, 24), (5, 17), (16, 64), (8, 8)])
def test_aligned_numbers_restore_equality_and_others_do_not(source: str, K: int, images: int) -> None:
    for p in (0.4, 0.9):
        values: dict[str, Any] = {"source": source, "accumulation_steps": K, "images": images, "probability": p}
        same, other = randomness(aligned=True, **values), randomness(aligned=False, **values)
        assert same.equal and same.differ == 0 and same.one.equal(same.parts)
        assert same.gradient.relative_error < 1e-13 < same.tolerance.value < 1e-9
        assert not other.equal and other.differ > 0.01 and other.gradient.relative_error > 0.01


@pytest.mark.parametrize("source", SOURCES)
def test_without_chance_all_is_equal(source: str) -> None:
    for aligned in (False, True):
        result = randomness(source=source, aligned=aligned, probability=0.0)
        assert result.equal and result.differ == 0
        assert result.one.equal(torch.ones_like(result.one)) or source == "augmentation"
    assert randomness(source="augmentation", probability=0.0).one.unique(dim=0).tolist() == [[0, 0, 1]]


def test_one_microbatch_meets_the_same_numbers_but_a_recomputation_its_own() -> None:
    assert randomness(accumulation_steps=1).equal and randomness(source="augmentation", accumulation_steps=1).equal
    assert not randomness(source="recomputation", accumulation_steps=1).equal


def by_autograd(net: Net, x: Tensor, y: Tensor, masks: Tensor) -> Tensor:
    return flat(torch.autograd.grad(F.cross_entropy(net(x, masks), y), list(net.parameters())))


def test_dropout_by_the_whole_batch_with_the_masks_that_are_shown() -> None:
    found, net, (x, y) = randomness(probability=0.4, seed=2), Net(2), draw(2, 24)
    numbers = draw_stream([24], UNITS, 2), draw_stream([6, 6, 6, 6], UNITS, 2)
    assert found.one.equal((numbers[0] >= 0.4).double()) and found.parts.equal((numbers[1] >= 0.4).double())
    right, wrong = (by_autograd(net, x, y, masks / 0.6) for masks in (found.one, found.parts))
    assert found.gradient.right_norm == pytest.approx(float(right.norm()), rel=1e-12)
    assert found.gradient.relative_error == pytest.approx(float((wrong - right).norm() / right.norm()), rel=1e-10)
    same = found.one == found.parts
    assert same[:6, :24].all() and same[18:, 24:].all()  # both streams begin there, and end there
    assert 0.3 < same[6:, :24].double().mean() < 0.7 and 0.3 < same[:18, 24:].double().mean() < 0.7
    assert dropout(numbers[0], 0.4).equal(found.one / 0.6)


def test_augmentation_by_the_whole_batch_with_the_changes_that_are_shown() -> None:
    found, net, (x, y) = randomness(source="augmentation", seed=4, accumulation_steps=5), Net(4), draw(4, 24)
    assert found.one.equal(augmentation(draw_stream([24], [1] * 5, 4), 0.5)) and found.one.shape == (24, 3)
    masks = torch.ones(24, 36)
    right, wrong = (by_autograd(net, augment(x, chosen), y, masks) for chosen in (found.one, found.parts))
    assert found.gradient.right_norm == pytest.approx(float(right.norm()), rel=1e-12)
    assert found.gradient.relative_error == pytest.approx(float((wrong - right).norm() / right.norm()), rel=1e-10)


@pytest.mark.parametrize("aligned", [False, True])
def test_recomputation_takes_the_loss_of_one_mask_and_the_slopes_of_another(aligned: bool) -> None:
    result = randomness(source="recomputation", aligned=aligned, accumulation_steps=3, probability=0.3, seed=1)
    net, (x, y) = Net(1), draw(1, 24)
    right = by_autograd(net, x, y, result.one / 0.7)
    with torch.no_grad():
        push = (net(x, result.one / 0.7).softmax(1) - F.one_hot(y, 6)) / 24
    wrong = flat(torch.autograd.grad(net(x, result.parts / 0.7), list(net.parameters()), push))
    assert result.gradient.right_norm == pytest.approx(float(right.norm()), rel=1e-12)
    assert result.gradient.norm == pytest.approx(float(wrong.norm()), rel=1e-12)
    off = float((wrong - right).norm() / right.norm())
    assert result.gradient.relative_error == pytest.approx(off, rel=1e-9, abs=1e-13) and aligned == (off < 1e-13)


def test_recomputed_masks_are_torchs_stream() -> None:
    result = randomness(source="recomputation", accumulation_steps=2, images=10, seed=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        masks = [F.dropout(torch.ones(5, 36, dtype=torch.float64), 0.5).sign() for _ in range(4)]
    assert result.one.equal(torch.cat(masks[::2])) and result.parts.equal(torch.cat(masks[1::2]))


@pytest.mark.parametrize("p", [0.2, 0.5, 0.8])
def test_independent_masks_differ_in_two_p_times_one_minus_p(p: float) -> None:
    result = randomness(source="recomputation", probability=p, images=64)
    assert result.differ == pytest.approx(2 * p * (1 - p), abs=0.03)
    shared = (24 + 12) * 16 / (36 * 64)  # the first layer of the first of four microbatches, the last of the last
    regrouped = randomness(probability=p, images=64)
    assert regrouped.differ == pytest.approx(2 * p * (1 - p) * (1 - shared), abs=0.03)


def test_the_tolerance_counts_images_and_depth() -> None:
    result = randomness(images=40, aligned=True)
    assert result.tolerance.terms == 40 + 2 * (6 + 256 + 24 + 12) and result.tolerance.cancellation >= 1


def last(**values: Any) -> Targets:
    *_, found = targets(**values)
    return found


@pytest.mark.parametrize("K", [2, 4, 12])
@pytest.mark.parametrize("draws", [16, 64])
def test_dropout_averages_out_and_batch_norm_does_not(K: int, draws: int) -> None:
    for seed in range(3):
        masks = last(accumulation_steps=K, draws=draws, seed=seed)
        assert masks.falls and "The same distribution" in masks.verdict
        assert masks.difference[-1] < 1.42 * masks.expected[-1]
        bias = last(source="batch norm", accumulation_steps=K, draws=draws, seed=seed)
        assert not bias.falls and "Not even equal on average" in bias.verdict
        assert bias.difference[-1] > 1.42 * bias.expected[-1] and bias.difference[-1] > 0.01


def test_the_averages_by_hand() -> None:
    final = last(draws=18, accumulation_steps=3, seed=6)
    net, (x, y) = Net(6), draw(6, 24)
    sums = torch.zeros(2, sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    apart, single = {}, []
    for number in range(1, 19):
        masks = [2.0 * (draw_stream(sizes, UNITS, 10_000 * number + 6) >= 0.5) for sizes in ([8, 8, 8], [24])]
        pair = torch.stack([by_autograd(net, x, y, each) for each in masks])
        sums += pair
        single.append(pair[0] - pair[1])
        apart[number] = float((sums[0] - sums[1]).norm()) / number
    assert final.draws.tolist() == [4, 8, 16, 18]
    scale = float(sums[1].norm()) / 18
    assert final.difference.tolist() == pytest.approx([apart[n] / scale for n in (4, 8, 16, 18)], rel=1e-10)
    variance = float(torch.stack(single).var(0).sum())
    chance = [math.sqrt(variance / n) / scale for n in (4, 8, 16, 18)]
    assert final.expected.tolist() == pytest.approx(chance, rel=1e-10)


def test_the_bias_of_batch_norm_by_torchs_loop() -> None:
    final = last(source="batch norm", draws=16, accumulation_steps=2, seed=1)
    model, (x, y), generator = ConvNet(1), draw(1, 24), torch.Generator().manual_seed(1)
    right = flat(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))
    total = torch.zeros_like(right)
    for _ in range(16):
        a, b = torch.randperm(24, generator=generator).split(12)
        loss = (F.cross_entropy(model(x[a]), y[a]) + F.cross_entropy(model(x[b]), y[b])) / 2
        total += flat(torch.autograd.grad(loss, list(model.parameters())))
    assert float(final.difference[-1]) == pytest.approx(float((total / 16 - right).norm() / right.norm()), rel=1e-9)


def test_results_come_one_by_one() -> None:
    results = list(targets(draws=20))
    assert [each.done for each in results] == list(range(1, 21))
    assert [each.progress for each in results] == pytest.approx([n / 20 for n in range(1, 21)])
    assert [each.measured for each in results] == [0] * 3 + [1] * 4 + [2] * 8 + [3] * 4 + [4]
    assert results[0].expected.isnan().all() and results[1].expected.isfinite().all()
    assert results[0].verdict == results[6].verdict == "Not enough draws yet." and not results[6].falls
    assert "Averaged over 8 draws" in results[7].verdict
    assert not results[7].difference.equal(results[19].difference)


def made(*difference: float) -> Targets:
    expected = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    return Targets("dropout", torch.tensor([4, 16, 64]), torch.tensor(difference).double(), expected, 64)


def test_beyond_chance_or_not() -> None:
    assert made(1.0, 0.7, 0.35).falls and not made(1.0, 0.7, 0.36).falls  # √2 · 1/4
    assert made(1.0, 0.7, math.nan).falls and not made(1.0, 0.72, math.nan).falls
    assert made(1.0, 0.5, 0.2).verdict == (
        "Averaged over 64 draws the gradients differ by 20 %, where chance alone would leave 25 %. "
        "The same distribution: equal on average, never draw by draw."
    )


def network(p: float) -> nn.Sequential:
    """A net with two layers of torch's own dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = [nn.Flatten(), nn.Linear(256, 16), nn.Dropout(p), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(p)]
        return nn.Sequential(*layers, nn.Linear(8, 6)).double()


def ran(loop: Any, model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    model.zero_grad()
    loop(model, parts)
    return flat(gradient(model))


def test_the_rule_draws_its_masks_anew() -> None:
    rule, before = rules.rule("nondeterministic"), torch.get_rng_state()
    assert rule.topic == "randomness" and not rule.right and rule.loop is redraw
    assert rule.changes == "the random numbers that each image meets" and len(rule.looks_like) > 20
    batch, model = draw(0, 12), network(0.5)
    four, same, two = (ran(redraw, model, split(*batch, K)) for K in (4, 4, 2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert ran(redraw, model, split(*batch, 4)).equal(four)
    assert four.equal(same) and (four - two).norm() > 0.1 * two.norm()
    assert torch.get_rng_state().equal(before)
    still = network(0.0)
    right = ran(one_batch, still, [batch])
    for loop in (redraw, accumulated):
        assert (ran(loop, still, split(*batch, 5)) - right).norm() < 1e-14
    assert rule.weights(window(targets_of([[[1]], [[2]]]))).isnan().all()


def test_more_microbatches_than_images_are_refused_with_a_remedy() -> None:
    with pytest.raises(LabError, match="accumulation steps = 9 is outside 1 … 8, the number of images: try 8"):
        randomness(images=8, accumulation_steps=9)
    assert randomness(images=8, accumulation_steps=8).one.shape == (8, 36)


@given(settings_of(randomness))
@settings(max_examples=30, deadline=None)
def test_what_is_declared_runs_the_same_twice(values: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    try:
        result = randomness(**values)
    except LabError as refused:
        values["accumulation_steps"] = int(str(refused).rpartition("try ")[2])
        result = randomness(**values)
    assert repr(result) == repr(randomness(**values))
    assert result.equal or result.differ > 0
    assert torch.get_rng_state().equal(before)


@given(settings_of(targets))
@settings(max_examples=8, deadline=None)
def test_declared_targets_begin_the_same_twice(values: dict[str, Any]) -> None:
    first, second = (next(targets(**values)) for _ in range(2))
    assert repr(first) == repr(second) and first.done == 1 and first.draws[-1] == values.get("draws", 128)
    assert first.draws.unique().tolist() == first.draws.tolist()
