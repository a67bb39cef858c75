"""Losses and gradients on the device: the CPU's own, and the weights that algebra predicts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from labkit import accumulation, rules
from labkit.accumulation import equivalence
from labkit.corpus import Batch, batch, made, split, window
from labkit.fit import distance, fit, flat, gradient
from labkit.nets import IGNORE, Scalar, Transformer, draw, next_token_loss, sequence_gradients, valid_tokens
from labkit.tolerance import Tolerance, depth, tolerance

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
words = pytest.mark.parametrize("word", accumulation.ALL)
STEPS = 2  # the K declared for the rules that need one: fewer than the three microbatches of the window


def model_on(device: torch.device, dtype: torch.dtype = torch.float64) -> Transformer:
    return Transformer(seed=3, dtype=dtype).to(device)


def window_on(device: torch.device) -> list[Batch]:
    """Eight sequences in microbatches of 3, 3 and 2."""
    return [(tokens.to(device), labels.to(device)) for tokens, labels in split(*batch(0, 8, text="made"), 3)]


def left_by(word: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The gradient that a rule's loop leaves."""
    model = model_on(device, dtype)
    rules.rule(word).run(model, window_on(device), STEPS)
    return flat(gradient(model))


def bound(word: str, dtype: torch.dtype) -> Tolerance:
    """How far apart a rule's gradients may be: Σ of every sequence's share, whichever way it is added."""
    method, microbatches, model = rules.rule(word), window_on(CPU), model_on(CPU)
    counted = window(microbatches, STEPS if method.needs == "steps" else None)
    shares = method.sequence_weights(counted)[:, None] / counted.total * sequence_gradients(model, microbatches)
    return tolerance(shares, count=int(counted.counts.sum()), depth=depth(model), dtype=dtype)


@dtypes
def test_a_seed_draws_the_same_model_bit_by_bit(device: torch.device, dtype: torch.dtype) -> None:
    there = model_on(device, dtype)
    assert torch.equal(flat(there.parameters()), flat(model_on(CPU, dtype).parameters()))
    draw(there, 7)
    assert torch.equal(flat(there.parameters()), flat(Transformer(seed=7, dtype=dtype).parameters()))


def test_a_window_is_counted_alike(device: torch.device) -> None:
    assert window(window_on(device), STEPS) == window(window_on(CPU), STEPS)
    there, here = (sum(valid_tokens(labels) for _, labels in window_on(each)) for each in (device, CPU))
    assert there == here > 0


@dtypes
def test_every_sequence_has_the_same_loss_and_gradient(device: torch.device, dtype: torch.dtype) -> None:
    (there, here), (far, near) = ((make(device), make(CPU)) for make in (lambda d: model_on(d, dtype), window_on))
    for found, right, counts in zip(
        sequence_gradients(there, far), sequence_gradients(here, near), window(near).sequences, strict=True
    ):
        allowed = tolerance([right], count=int(counts), depth=depth(here), dtype=dtype)
        assert distance(found, right).relative_error <= allowed.value
    found, right = (flat(next_token_loss(m, *each, "none") for each in w) for m, w in ((there, far), (here, near)))
    allowed = tolerance([right], count=1, depth=depth(here), dtype=dtype)
    assert distance(found, right).relative_error <= allowed.value


@dtypes
@words
def test_every_rule_leaves_the_same_gradient(device: torch.device, word: str, dtype: torch.dtype) -> None:
    found, right = left_by(word, device, dtype), left_by(word, CPU, dtype)
    allowed = bound(word, dtype).value
    assert distance(found, right).relative_error <= allowed < 0.01


@words
def test_every_rule_gives_the_weights_that_algebra_predicts(device: torch.device, word: str) -> None:
    method, microbatches, model = rules.rule(word), window_on(device), model_on(device)
    counted = window(microbatches, STEPS if method.needs == "steps" else None)
    rows = sequence_gradients(model, microbatches)
    method.run(model, microbatches, STEPS)
    found = gradient(model)
    assert {each.device.type for each in found} == {device.type}
    weights = fit(found, [flat_to(row, found) for row in rows])
    norm = float(flat(found).norm())
    enlarged = 2 * weights.condition * bound(word, torch.float64).value * norm / rows.norm(dim=1)
    assert ((weights.values - method.sequence_weights(counted) / counted.total).abs() <= enlarged).all()
    assert weights.residual <= 2 * bound(word, torch.float64).value and (enlarged * counted.total < 1e-6).all()


def flat_to(row: Tensor, like: list[Tensor]) -> list[Tensor]:
    """A flat gradient as one tensor a parameter, on their device."""
    parts = row.split([each.numel() for each in like])
    return [part.reshape(each.shape).to(each) for part, each in zip(parts, like, strict=True)]


@dtypes
def test_a_wrong_rule_is_told_from_the_right_one(device: torch.device, dtype: torch.dtype) -> None:
    right = left_by("token-mean", CPU, dtype)
    for word in accumulation.ALL:
        same = word in ("token-mean", "token-mean-once")
        off = distance(left_by(word, device, dtype), right).relative_error
        assert (off <= bound("token-mean", dtype).value) == same, (word, off)


@words
def test_a_comparison_says_the_same(device: torch.device, word: str) -> None:
    found, right = (accumulation.compare(model_on(each), window_on(each), word, steps=STEPS) for each in (device, CPU))
    allowed = right.norm_ratio * bound(word, torch.float64).value + (1 + right.relative_error) * right.tolerance.value
    assert found.relative_error == pytest.approx(right.relative_error, abs=allowed)
    assert found.equal == right.equal and found.counts.equal(right.counts)
    assert found.map.isnan().equal(right.map.isnan()) and found.map.device == CPU


def test_a_gradient_by_hand(device: torch.device) -> None:
    microbatches = [(tokens.to(device), labels.to(device)) for tokens, labels in made([[[8]], [[3, 2, 1]]])]
    found = accumulation.compare(Scalar().to(device), microbatches, "mean-of-means")
    assert (found.norm, found.right_norm) == pytest.approx((5, 3.5), rel=found.tolerance.value)


def test_a_fit_samples_a_large_gradient_alike(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 200), (90_000,), (7, 11)]
    stacks = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(3)]
    total = [2 * a - 3 * b + 0.5 * c for a, b, c in zip(*stacks, strict=True)]
    here = fit(total, stacks)
    there = fit([each.to(device) for each in total], [[each.to(device) for each in stack] for stack in stacks])
    assert torch.equal(there.values, here.values) and there.residual == here.residual
    assert there.values.tolist() == pytest.approx([2, -3, 0.5], abs=1e-12)


@pytest.mark.parametrize("broken", [None, "averaged", "one_update", "equal_statistics"])
def test_one_update_under_the_conditions(device: torch.device, broken: str | None) -> None:
    found, right = (updated(each, broken) for each in (device, CPU))
    allowed = equivalence.conditions(accumulation_steps=4).tolerance.value
    assert distance(found, right).relative_error <= allowed
    assert (distance(found, updated(CPU, None)).relative_error <= allowed) == (broken is None)


def updated(device: torch.device, broken: str | None) -> Tensor:
    """How far one update in four microbatches moves a net."""
    examples = tuple(each.to(device) for each in equivalence._examples(0)[0])
    net = equivalence.Net(0).to(device)
    if broken != "equal_statistics":
        h = (examples[0] @ net.first.T).detach()
        net.statistics = h.mean(0), h.var(0, correction=0)
    parts = equivalence._parts(examples, 4)
    return equivalence.update(net, parts, averaged=broken != "averaged", one_update=broken != "one_update")


@pytest.mark.parametrize("policy", equivalence.POLICIES)
def test_a_microbatch_without_targets(device: torch.device, policy: str) -> None:
    found = {}
    for each in (device, CPU):
        microbatches = window_on(each)
        microbatches[1][1].fill_(IGNORE)
        found[each] = equivalence._contributions(policy, model_on(each), microbatches)
    (losses, parts), (right_losses, right) = found[device], found[CPU]
    assert [math.isnan(each) for each in losses] == [False, policy != "token mean", False]
    allowed = bound("token-mean", torch.float64).value
    assert losses == pytest.approx(right_losses, rel=allowed, nan_ok=True)
    for at in (0, 2):
        assert distance(parts[at], right[at]).relative_error <= allowed
    assert parts[1].isnan().all() if policy == "masked mean by hand" else not parts[1].any()
