"""Orders of unscaling and clipping, against arithmetic by hand, torch's own clip and the whole batch in one pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_

from labkit import clipping, rules
from labkit.accumulation import compare
from labkit.clipping import clip, orders, refusal, stepped_with, taken_apart
from labkit.clipping.ordering import ORDERS, Parts, clip_weight
from labkit.corpus import batch, split
from labkit.errors import LabError
from labkit.fit import flat
from labkit.nets import Transformer
from tests.strategies import settings_of

torch.set_num_threads(1)

WRONG = [word for word in ORDERS if word != "clip-once"]
FREE = 1e5  # a threshold that nothing here reaches


def whole_batch(K: int = 4, seed: int = 0, sequences: int = 8) -> Tensor:
    """The gradient of the mean over all targets, in one forward of all sequences."""
    model, (tokens, labels) = Transformer(seed=seed, dtype=torch.float64), batch(seed, sequences)
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return flat(torch.autograd.grad(loss, list(model.parameters())))


def ran(word: str, K: int, scale: float, max_norm: float, seed: int = 0) -> Tensor:
    model = Transformer(seed=seed, dtype=torch.float64)
    return stepped_with(ORDERS[word][0], model, split(*batch(seed, 8), K), scale, max_norm)


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1.8, 1.9, FREE])
@pytest.mark.parametrize(("K", "exponent"), [(1, 0), (2, 4), (4, 10), (8, 16)])
def test_clip_once_is_torchs_clip_of_the_whole_batch(K: int, exponent: int, max_norm: float) -> None:
    expected = nn.Parameter(torch.zeros(10752, dtype=torch.float64))
    expected.grad = whole_batch()
    clip_grad_norm_([expected], max_norm)
    step = orders(rule="clip-once", accumulation_steps=K, scale_exponent=exponent, max_norm=max_norm)
    off = ran("clip-once", K, 2.0**exponent, max_norm) - expected.grad
    assert step.equal and float(off.norm() / expected.grad.norm()) < 1e-13
    assert step.tolerance.value < 1e-11 and step.norm == pytest.approx(float(expected.grad.norm()), rel=1e-13)
    assert step.right_weight == pytest.approx(min(1.0, max_norm / step.whole), rel=1e-5)


# Two microbatches of equal counts, gradients (6, 0) and (0, 8): G = (3, 4) has the length 5. c = 1, S = 2.
BY_HAND = Parts(torch.tensor([[3.0, 0], [0, 4]], dtype=torch.float64), torch.tensor([0.5, 0.5]).double(), 2.0, 1.0)
WEIGHTS = {
    "clip-once": [1 / 5, 1 / 5],
    "clip-per-microbatch": [1 / 6, 1 / 8],
    "clip-running-sum": [1 / 3 / 17**0.5, 1 / 17**0.5],
    "unscale-early": [1 / 73**0.5, 2 / 73**0.5],
    "unscale-every": [0.5 / 18.25**0.5, 1 / 18.25**0.5],
    "clip-scaled": [1 / 10, 1 / 10],
}


@pytest.mark.parametrize("word", ORDERS)
def test_predicted_weights_are_those_worked_out_by_hand(word: str) -> None:
    assert ORDERS[word][1](BY_HAND).tolist() == pytest.approx(WEIGHTS[word], rel=1e-5)
    free = Parts(BY_HAND.rows, BY_HAND.share, 2.0, 100.0)
    expected = {"unscale-early": [1, 2], "unscale-every": [0.5, 1]}.get(word, [1, 1])
    assert ORDERS[word][1](free).tolist() == expected


class Two(nn.Module):
    """Logits whose gradients are the two of BY_HAND, for a model of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        push = 2 * self.weight[(tokens > 6).long()] * tokens
        return torch.stack([push, torch.zeros_like(push)], -1)


@pytest.mark.parametrize("word", ORDERS)
@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_every_order_steps_with_the_gradient_worked_out_by_hand(word: str, max_norm: float) -> None:
    labels = torch.ones(1, 2, dtype=torch.long)
    microbatches = [(torch.tensor([[6, 0]]), labels), (torch.tensor([[8, 0]]), labels)]
    model = Two()
    parts = taken_apart(model, microbatches, 2.0, max_norm)
    assert parts.rows.tolist() == [[3, 0], [0, 4]] and parts.norms.tolist() == [6, 8]
    g = stepped_with(ORDERS[word][0], model, microbatches, 2.0, max_norm)
    free = {"unscale-early": [1, 2], "unscale-every": [0.5, 1]}.get(word, [1, 1])
    weights = WEIGHTS[word] if max_norm == 1 else free
    assert g.tolist() == pytest.approx([3 * weights[0], 4 * weights[1]], rel=1e-5)
    assert model.weight.tolist() == pytest.approx((-0.1 * g).tolist()), "the optimizer has stepped with it"


@pytest.mark.parametrize("word", ORDERS)
@pytest.mark.parametrize(("K", "exponent", "max_norm"), [(1, 3, 1.0), (3, 1, 0.5), (4, 10, FREE), (8, 4, 2.0)])
def test_fitted_weights_are_the_predicted_ones(word: str, K: int, exponent: int, max_norm: float) -> None:
    step = orders(rule=word, accumulation_steps=K, scale_exponent=exponent, max_norm=max_norm)
    size = float(step.predicted.max())
    assert (step.weights - step.predicted).abs().max() < 1e-13 * step.condition * size
    assert step.residual < 1e-13 and step.norms.shape == step.counts.shape == (K,)
    rows = taken_apart(Transformer(dtype=torch.float64), split(*batch(0, 8), K), 2.0**exponent, max_norm).rows
    assert step.norm == pytest.approx(float((step.predicted @ rows).norm()), rel=1e-12)


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("exponent", [1, 8, 15])
def test_unscaled_after_the_first_microbatch_the_others_weigh_s(K: int, exponent: int) -> None:
    step = orders(rule="unscale-early", accumulation_steps=K, scale_exponent=exponent)
    S = 2.0**exponent
    assert step.weights.tolist() == pytest.approx([1.0, *[S] * (K - 1)], rel=1e-9, abs=1e-11 * S)
    assert not step.equal and not step.refused


@pytest.mark.parametrize("K", [2, 4])
def test_unscaled_after_every_microbatch_the_early_ones_vanish(K: int) -> None:
    step = orders(rule="unscale-every", accumulation_steps=K, scale_exponent=4)
    assert step.weights.tolist() == pytest.approx([16.0**-m for m in reversed(range(K))], rel=1e-9)
    assert step.refused.startswith("RuntimeError: unscale_() has already been called")


def test_a_clip_while_scaled_is_a_clip_at_c_over_s() -> None:
    found, right = orders(rule="clip-scaled", scale_exponent=8, max_norm=2.56), orders(rule="clip-once", max_norm=0.01)
    assert found.norm == pytest.approx(0.01, rel=1e-5) and right.norm == pytest.approx(0.01, rel=1e-3)
    assert found.relative_error == pytest.approx(1 - 0.01 / found.whole, rel=1e-5)


def test_clipping_each_microbatch_weighs_by_its_own_length() -> None:
    step = orders(rule="clip-per-microbatch", max_norm=1.0)
    assert step.weights.tolist() == pytest.approx((1 / step.norms).tolist(), rel=1e-6)
    assert step.norms.min() > step.whole > 1


@pytest.mark.parametrize("word", WRONG)
def test_every_wrong_order_differs_by_what_its_weights_say(word: str) -> None:
    step = orders(rule=word, scale_exponent=4, max_norm=1.0)
    rows = taken_apart(Transformer(dtype=torch.float64), split(*batch(0, 8), 4), 16, 1.0).rows
    right = step.right_weight * rows.sum(0)
    assert step.relative_error == pytest.approx(float((step.predicted @ rows - right).norm() / right.norm()), rel=1e-9)
    assert step.relative_error > 0.1 and not step.equal


@pytest.mark.parametrize("word", [word for word in WRONG if word.startswith("clip")])
def test_without_a_clip_the_orders_of_clipping_are_right(word: str) -> None:
    assert orders(rule=word, scale_exponent=10, max_norm=FREE).equal
    assert not orders(rule=word, scale_exponent=10, max_norm=0.5).equal


@pytest.mark.parametrize("word", [word for word in WRONG if word.startswith("unscale")])
def test_a_scale_of_one_hides_the_orders_of_unscaling(word: str) -> None:
    assert (
        orders(rule=word, scale_exponent=0, max_norm=1.0).equal
        and orders(rule=word, scale_exponent=0, max_norm=FREE).equal
    )
    assert not orders(rule=word, scale_exponent=1, max_norm=FREE).equal


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_the_clip_weight_is_torchs(norm: float, max_norm: float) -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.tensor([norm], dtype=torch.float64)
    clip_grad_norm_([weight], max_norm)
    assert clip_weight(norm, max_norm) == pytest.approx(float(weight.grad) / norm, rel=1e-12)


def test_the_scaler_is_torchs_and_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def watch(name: str) -> None:
        real = getattr(GradScaler, name)

        def counted(self: GradScaler, *rest: Any) -> Any:
            called.append(name)
            return real(self, *rest)

        monkeypatch.setattr(GradScaler, name, counted)

    for name in ("scale", "unscale_", "step", "update"):
        watch(name)
    ran("clip-once", 4, 16, 1.0)
    assert called == [*["scale"] * 4, "unscale_", "step", "update"]


def test_a_scale_that_is_no_power_of_two_costs_float32_digits() -> None:
    off = ran("clip-once", 4, 1000.0, FREE) - ran("clip-once", 4, 1024.0, FREE)
    assert 1e-9 < float(off.norm() / whole_batch().norm()) < 2**-24


def test_torch_refuses_a_second_unscale_and_its_words_are_shown() -> None:
    assert refusal(8) == "RuntimeError: unscale_() has already been called on this optimizer since the last update()."
    assert orders(rule="unscale-every", accumulation_steps=1).refused == ""


# Clipped once, and each.


@pytest.mark.parametrize("K", [2, 4, 8])
@pytest.mark.parametrize("max_norm", [0.1, 0.7, 1.3, 2.4, 3.0, 10.0])
def test_measured_lengths_and_angle_lie_on_the_modelled_curves(K: int, max_norm: float) -> None:
    clips = clip(max_norm=max_norm, accumulation_steps=K)
    at = int((clips.thresholds - max_norm).abs().argmin())
    near = slice(max(at - 1, 0), at + 2)
    for measured, curve in ((clips.once, clips.modelled_once), (clips.each, clips.modelled_each)):
        assert curve[near].min() * (1 - 1e-5) <= measured <= curve[near].max() * (1 + 1e-5)
    assert clips.modelled_angle[near].min() - 0.01 <= clips.angle <= clips.modelled_angle[near].max() + 0.01
    assert clips.once == pytest.approx(min(max_norm, clips.whole), rel=2e-5)
    assert clips.clipped == int((clips.norms > max_norm).sum())


def test_clipping_each_by_vectors() -> None:
    means = [r / s for r, s in zip(*parts_of(), strict=True)]
    shares = parts_of()[1]
    expected = sum((s * g * min(1, 1.5 / float(g.norm())) for s, g in zip(shares, means, strict=True)), torch.zeros(1))
    clips = clip(max_norm=1.5)
    G = whole_batch() * (1.5 / float(whole_batch().norm()))
    assert clips.each == pytest.approx(float(expected.norm()), rel=1e-5)
    cosine = float(F.cosine_similarity(expected, G, dim=0))
    assert clips.cosine == pytest.approx(cosine, rel=1e-7)
    assert clips.angle == pytest.approx(math.degrees(math.acos(cosine)), rel=1e-5)
    assert clips.relative_error == pytest.approx(float((expected - G).norm() / G.norm()), rel=1e-4)


def parts_of() -> tuple[list[Tensor], list[float]]:
    """S_m / N and n_m / N of the default window, from torch's own means."""
    model, pieces = Transformer(dtype=torch.float64), split(*batch(0, 8), 4)
    counts = [int((labels[:, 1:] >= 0).sum()) for _, labels in pieces]
    means = [F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) for tokens, labels in pieces]
    shares = [n / sum(counts) for n in counts]
    rows = [
        flat(torch.autograd.grad(share * loss, list(model.parameters())))
        for share, loss in zip(shares, means, strict=True)
    ]
    return rows, shares


def test_one_microbatch_or_a_high_threshold_makes_no_difference() -> None:
    assert clip(accumulation_steps=1).relative_error < 1e-14
    clips = clip(max_norm=10.0)
    assert clips.relative_error < 1e-14 and clips.clipped == 0 and clips.once == pytest.approx(clips.whole)
    assert clips.angle < 1e-4


def test_a_window_that_is_clipped_everywhere_keeps_its_angle_and_error() -> None:
    low, high = clip(max_norm=0.2), clip(max_norm=1.0)
    assert low.clipped == high.clipped == 4
    assert low.angle == pytest.approx(high.angle) and high.once / low.once == pytest.approx(5, rel=1e-5)
    assert low.relative_error == pytest.approx(high.relative_error, rel=1e-5)


# The table.


@pytest.mark.parametrize("word", [*ORDERS, "overflow-disagreement"])
def test_the_table_has_every_order(word: str) -> None:
    rule = rules.rule(word)
    assert rule.topic == "clipping" and rule.right == (word == "clip-once") and rule.loop.__doc__
    assert len(rule.looks_like) > 20 and rule.fix and bool(rule.changes) != rule.right


@pytest.mark.parametrize("word", ORDERS)
def test_the_table_runs_an_order_with_scale_1024_and_threshold_1(word: str) -> None:
    model, microbatches = Transformer(dtype=torch.float64), split(*batch(0, 8), 4)
    comparison = compare(model, microbatches, word)
    expected = orders(rule=word, scale_exponent=10, max_norm=1.0)
    assert comparison.norm == pytest.approx(expected.norm, rel=1e-9)
    assert comparison.token_weights.tolist() == pytest.approx(expected.weights.tolist(), rel=1e-6, abs=1e-9)
    assert comparison.predicted.isnan().all()


@pytest.mark.parametrize("run", [orders, clip])
@given(data=st.data())
@settings(max_examples=20)
def test_what_is_declared_runs_the_same_twice(run: Any, data: st.DataObject) -> None:
    values = data.draw(settings_of(run))
    before = torch.get_rng_state()
    try:
        assert repr(run(**values)) == repr(run(**values))
    except LabError as refused:
        assert "accumulation steps = " in str(refused)
        assert run(**{**values, "accumulation_steps": int(str(refused).rpartition("try ")[2])})
    assert torch.equal(torch.get_rng_state(), before)


@given(settings_of(orders))
@settings(max_examples=20)
def test_any_order_at_any_setting_has_the_weights_predicted(values: dict[str, Any]) -> None:
    try:
        step = orders(**values)
    except LabError:
        return
    size = float(step.predicted.max())
    assert (step.weights - step.predicted).abs().max() < 1e-12 * step.condition * size
    assert step.equal or step.rule != "clip-once"


def test_the_experiments_stand_in_one_module() -> None:
    assert all(callable(getattr(clipping, name)) for name in ("orders", "clip", "underflow", "overflow", "ranks"))
