"""Whole steps and scale rules as learners write them, right and wrong, and the sentence that each of them gets."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from labkit import check
from labkit.clipping import ordering
from labkit.clipping.exercises import CASES, NEXT_SCALE
from labkit.clipping.exercises.faults import ALL, CLIPPED, SHARED, UNSCALED, predict
from labkit.clipping.ordering import Parts
from labkit.nets import next_token_loss

torch.set_num_threads(1)

Step = Callable[[Any, Any, Any, Any, float], Any]


def mean(model: Any, pair: Any, K: int) -> Tensor:
    return next_token_loss(model, *pair, "mean") / K


# Right steps, each written in another way.


def as_documented(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "mean") / len(microbatches)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def clipped_by_hand(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> float:
    optimizer.zero_grad(set_to_none=False)
    for pair in microbatches:
        scaler.scale(mean(model, pair, len(microbatches))).backward()
    scaler.unscale_(optimizer)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    if norm > max_norm:
        for p in model.parameters():
            p.grad *= max_norm / norm
    scaler.step(optimizer)
    scaler.update()
    return float(norm)


def one_backward(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
    model.zero_grad()
    loss = torch.stack([next_token_loss(model, *pair, "mean") for pair in microbatches]).mean()
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()


RIGHT: list[Step] = [as_documented, clipped_by_hand, one_backward]


@pytest.mark.parametrize("step", RIGHT)
def test_a_right_step_passes_however_it_is_written(step: Step) -> None:
    verdict = check.clipped_step(step)
    assert verdict.passed and all(ok for _, ok in verdict.checks), verdict
    assert "Right: unscaled once, clipped once" in verdict.sentence


# Wrong steps, of one shape.


def order(
    inside: Callable[..., Any] = lambda *_: None,
    after: Callable[..., Any] = lambda model, optimizer, scaler, c: (
        scaler.unscale_(optimizer),
        clip_grad_norm_(model.parameters(), c),
        scaler.step(optimizer),
        scaler.update(),
    ),
    share: Callable[[int], float] = lambda K: K,
) -> Step:
    def step(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
        optimizer.zero_grad()
        for at, pair in enumerate(microbatches):
            scaler.scale(mean(model, pair, 1) / share(len(microbatches))).backward()
            inside(at, model, optimizer, scaler, max_norm)
        after(model, optimizer, scaler, max_norm)

    return step


def clip(model: Any, c: float) -> None:
    clip_grad_norm_(model.parameters(), c)


def divide(model: Any, by: float) -> None:
    for p in model.parameters():
        p.grad /= by


def to_the_length(model: Any, c: float) -> None:
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    divide(model, float(norm / c))


def finish(optimizer: Any, scaler: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


def each_by_itself(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
    total = [torch.zeros_like(p) for p in model.parameters()]
    for pair in microbatches:
        optimizer.zero_grad()
        scaler.scale(mean(model, pair, len(microbatches))).backward()
        clip(model, max_norm * scaler.get_scale())
        for kept, p in zip(total, model.parameters(), strict=True):
            kept += p.grad
    for kept, p in zip(total, model.parameters(), strict=True):
        p.grad = kept
    finish(optimizer, scaler)


def no_zero_grad(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
    for pair in microbatches:
        scaler.scale(mean(model, pair, len(microbatches))).backward()
    scaler.unscale_(optimizer)
    clip(model, max_norm)
    finish(optimizer, scaler)


def zero_grad_in_the_loop(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
    for pair in microbatches:
        optimizer.zero_grad()
        scaler.scale(mean(model, pair, len(microbatches))).backward()
    scaler.unscale_(optimizer)
    clip(model, max_norm)
    finish(optimizer, scaler)


def unscaled_by_hand_at_each(at: int, model: Any, optimizer: Any, scaler: Any, c: float) -> None:
    divide(model, scaler.get_scale())


def no_scale(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
    for pair in microbatches:
        mean(model, pair, len(microbatches)).backward()
    scaler.unscale_(optimizer)
    clip(model, max_norm)
    finish(optimizer, scaler)


def by_hand_alone(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
    optimizer.zero_grad()
    for pair in microbatches:
        scaler.scale(mean(model, pair, len(microbatches))).backward()
    scaler.unscale_(optimizer)
    clip(model, max_norm)
    optimizer.step()
    scaler.update()


def stepped_by_hand(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
    as_documented(model, optimizer, scaler, microbatches, max_norm)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)


def yields(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> Any:
    yield as_documented(model, optimizer, scaler, microbatches, max_norm)


WRONG: list[tuple[Step, int, list[str]]] = [
    (
        order(lambda at, m, o, s, c: s.unscale_(o) if at == 0 else None, lambda m, o, s, c: (clip(m, c), finish(o, s))),
        0,
        [
            "weigh 1, 1024, 1024 and 1024",
            "the first microbatch was unscaled, and the later ones never were: they are S = 1024 times larger",
        ],
    ),
    (
        order(lambda at, m, o, s, c: s.unscale_(o)),
        0,
        ["unscale_() has already been called on this optimizer", "Unscale once a window, after the loop."],
    ),
    (
        order(unscaled_by_hand_at_each, lambda m, o, s, c: (clip(m, c), o.step(), s.update())),
        0,
        ["No inf checks were recorded prior to update", "Call update after scaler.step"],
    ),
    (
        order(unscaled_by_hand_at_each, lambda m, o, s, c: (clip(m, c), o.step())),
        0,
        [
            "9.313e-10",
            "the sum so far was unscaled after every microbatch, so the first one was 4 times. The fix: after the",
        ],
    ),
    (
        order(after=lambda m, o, s, c: (clip(m, c), finish(o, s))),
        2,
        [
            "“a gradient that is too long” each microbatch weighs 0.0002509 in the step, and 0.257 is",
            "it was clipped while still scaled, so that the threshold is max_norm / S",
        ],
    ),
    (
        order(after=lambda m, o, s, c: finish(o, s)),
        2,
        [
            "In the check “a gradient that is too long” each microbatch weighs 1 in the step, and 0.257 is right",
            "nothing was clipped before",
        ],
    ),
    (
        order(after=lambda m, o, s, c: (s.step(o), clip(m, c), s.update())),
        2,
        ["“a gradient that is too long”", "nothing was clipped before the step"],
    ),
    (
        order(after=lambda m, o, s, c: (clip(m, c), o.step())),
        0,
        ["nothing was unscaled, so all is S = 1024 times too large before the clip"],
    ),
    (
        order(after=lambda m, o, s, c: (divide(m, s.get_scale()), clip(m, c), finish(o, s))),
        0,
        [
            "Each microbatch weighs 0.0009766 in the step, and 1 is right",
            "it was unscaled twice, as by hand and by the scaler",
        ],
    ),
    (
        order(lambda at, m, o, s, c: clip(m, c * s.get_scale()), lambda m, o, s, c: finish(o, s)),
        2,
        ["“a gradient that is too long”", "the clip stands in the loop, and clips the sum so far again and again"],
    ),
    (
        order(lambda at, m, o, s, c: clip(m, c), lambda m, o, s, c: finish(o, s)),
        2,
        ["the clip stands in the loop, and clips the sum so far again and again"],
    ),
    (
        each_by_itself,
        2,
        ["“a gradient that is too long”", "each microbatch was clipped by itself. The fix: after the loop"],
    ),
    (
        order(after=lambda m, o, s, c: (s.unscale_(o), to_the_length(m, c), finish(o, s))),
        3,
        ["it was brought to the length max_norm even where it is shorter"],
    ),
    (
        order(after=lambda m, o, s, c: (s.unscale_(o), clip_grad_value_(m.parameters(), 1e-4), finish(o, s))),
        0,
        ["no weighted sum of the microbatches' gradients", "clip_grad_value_ does not"],
    ),
    (
        order(share=lambda K: 1),
        3,
        ["Each microbatch weighs 4 in the step", "the means of the 4 microbatches are added and not divided by 4"],
    ),
    (order(share=lambda K: K * K), 2, ["Each microbatch weighs 0.25 in", "divided by 4 once more"]),
    (
        zero_grad_in_the_loop,
        0,
        ["weigh 0, 0, 0 and 1 in the step", "only the last microbatch is left, as if zero_grad stood in the loop"],
    ),
    (no_zero_grad, 3, ["“the window after” the gradient of the window before is still in the step, with the weight"]),
    (
        order(lambda at, m, o, s, c: (s.unscale_(o), clip(m, c), finish(o, s), o.zero_grad()), lambda *_: None),
        0,
        ["The optimizer stepped four times in one window: step once, after the loop."],
    ),
    (
        order(after=lambda m, o, s, c: (s.unscale_(o), clip(m, c), s.step(o))),
        0,
        ["scaler.update() is never called: after an overflow the scale would stay too large"],
    ),
    (
        order(after=lambda m, o, s, c: (s.unscale_(o), clip(m, c), finish(o, s), s.update())),
        0,
        ["No inf checks were recorded prior to update", "Call update after scaler.step, once a window."],
    ),
    (
        by_hand_alone,
        4,
        ["“an overflow, and the window after” the optimizer stepped with inf: scaler.step(optimizer) skips"],
    ),
    (no_scale, 0, ["_scale is None", "The loss was never scaled: scaler.scale(loss).backward()."]),
    (
        order(after=lambda m, o, s, c: (s.unscale_(o), clip(m, c))),
        0,
        ["The optimizer never stepped, and backward() ran four times: end with scaler.step(optimizer)."],
    ),
    (stepped_by_hand, 0, ["The weights changed by more than the optimizer's step"]),
    (
        order(after=lambda m, o, s, c: (s.step(o), s.unscale_(o), clip(m, c), s.update())),
        0,
        ["unscale_() is being called after step()", "Unscale and clip before the step, or they come too late."],
    ),
    (lambda model, optimizer, scaler, microbatches, max_norm: None, 0, ["never stepped, and backward() ran no times"]),
    (yields, 0, ["Nothing in your function ran: with yield or async"]),
    (lambda model: None, 0, ["Your function takes (model), and is called with (model, optimizer, scaler,"]),
]


@pytest.mark.parametrize(("step", "passes", "words"), WRONG)
def test_a_wrong_step_is_told_in_the_sentence_meant_for_it(step: Step, passes: int, words: list[str]) -> None:
    verdict = check.clipped_step(step)
    assert not verdict.passed and sum(ok for _, ok in verdict.checks) == passes, verdict
    for each in words:
        assert each in verdict.sentence, verdict.sentence


@pytest.mark.parametrize("word", [word for word in ordering.ORDERS if word != "clip-once"])
def test_every_wrong_order_of_the_table_fails(word: str) -> None:
    assert not check.clipped_step(ordering.ORDERS[word][0]).passed


def test_the_inf_of_a_skipped_step_may_not_stay() -> None:
    calls: list[int] = []

    def step(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
        calls.append(1)
        before = scaler.get_scale()
        no_zero_grad(model, optimizer, scaler, microbatches, max_norm)
        if scaler.get_scale() == before:
            optimizer.zero_grad()

    verdict = check.clipped_step(step)
    assert [ok for _, ok in verdict.checks] == [True] * 4 + [False] and len(calls) == 7
    assert "its inf is still in .grad; clear it once a window" in verdict.sentence


def test_a_scale_that_is_set_by_hand_is_seen() -> None:
    def step(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
        before = scaler.get_scale()
        as_documented(model, optimizer, scaler, microbatches, max_norm)
        scaler._scale.fill_(before)

    verdict = check.clipped_step(step)
    assert [ok for _, ok in verdict.checks] == [True] * 4 + [False]
    assert "The scale went from 8 to 8: scaler.step has to find the overflow" in verdict.sentence.replace(
        "the scale", "The scale"
    )


def test_no_two_slips_give_the_same_weights_in_all_windows() -> None:
    generator = torch.Generator().manual_seed(0)
    windows = [
        Parts(torch.randn(K, 9, generator=generator).double(), torch.full((K,), 1 / K).double(), 2.0**log, c)
        for _, _, K, log, c, _ in CASES
    ]
    single = [slips for slips in ALL if sum(map(bool, slips)) == 1]
    assert len(single) == len(SHARED) + len(UNSCALED) + len(CLIPPED) - 3
    for one, other in itertools.combinations([("", "", ""), *single], 2):
        same = [torch.allclose(predict(one, w), predict(other, w), rtol=1e-6, atol=0) for w in windows]
        assert not all(same), (one, other)


BY_HAND = Parts(torch.tensor([[3.0, 0], [0, 4]], dtype=torch.float64), torch.tensor([0.5, 0.5]).double(), 8.0, 1.0)


@pytest.mark.parametrize(
    ("slips", "weights"),
    [
        (("", "", ""), [1 / 5, 1 / 5]),
        (("sum", "", "none"), [2, 2]),
        (("again", "", "none"), [1 / 2, 1 / 2]),
        (("last", "", "none"), [0, 1]),
        (("", "early", "none"), [1, 8]),
        (("", "every", "none"), [1 / 8, 1]),
        (("", "never", "none"), [8, 8]),
        (("", "twice", "none"), [1 / 8, 1 / 8]),
        (("", "", "scaled"), [1 / 40, 1 / 40]),
        (("", "", "each"), [1 / 3, 1 / 4]),
        (("", "", "each scaled"), [1 / 24, 1 / 32]),
        (("", "", "always"), [1 / 5, 1 / 5]),
        (("again", "", "always"), [1 / 5, 1 / 5]),
        (("", "", "running"), [1 / 3 / 17**0.5, 1 / 17**0.5]),
        (("", "", "running scaled"), [1 / 24 / 1025**0.5, 1 / 1025**0.5]),
        (("", "twice", ""), [1 / 40, 1 / 40]),
        (("", "twice before", ""), [1 / 8, 1 / 8]),
    ],
)
def test_the_weights_of_a_slip_by_hand(slips: Any, weights: list[float]) -> None:
    assert predict(slips, BY_HAND).tolist() == pytest.approx(weights, rel=2e-5)


ACTIONS: list[Callable[..., Any]] = [
    as_documented,
    no_zero_grad,
    zero_grad_in_the_loop,
    lambda m, o, s, b, c: o.step(),
    lambda m, o, s, b, c: s.update(2.0),
    lambda m, o, s, b, c: [setattr(p, "grad", torch.full_like(p, float("nan"))) for p in m.parameters()],
    lambda m, o, s, b, c: [setattr(p, "grad", None) for p in list(m.parameters())[1:]],
    lambda m, o, s, b, c: delattr(m, "embedding"),
    lambda m, o, s, b, c: m.float(),
    lambda m, o, s, b, c: setattr(m, "forward", None),
    lambda m, o, s, b, c: b.clear(),
    lambda m, o, s, b, c: o.param_groups.clear(),
    lambda m, o, s, b, c: 1 / 0,
    lambda m, o, s, b, c: sys.exit(3),
    lambda m, o, s, b, c: print("x" * 10_000),
]


@given(st.lists(st.sampled_from(ACTIONS), max_size=4))
@settings(max_examples=40)
def test_whatever_a_function_does_there_is_a_verdict(actions: list[Callable[..., Any]]) -> None:
    def garbage(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
        for action in actions:
            action(model, optimizer, scaler, microbatches, max_norm)

    verdict = check.clipped_step(garbage)
    assert len(verdict.checks) == 5 and verdict.passed == all(ok for _, ok in verdict.checks)
    assert verdict.sentence.endswith((".", "?", ")")) and len(str(verdict)) < 1500


def test_an_endless_step_is_stopped() -> None:
    def endless(model: Any, optimizer: Any, scaler: Any, microbatches: Any, max_norm: float) -> None:
        while True:
            pass

    assert "was still running" in check.clipped_step(endless, seconds=0.2).sentence


# The next scale.


@pytest.mark.parametrize(
    "function",
    [
        lambda scale, overflow, good_steps, interval: (
            scale * 0.5 if overflow else scale * 2 if good_steps + 1 >= interval else scale
        ),
        lambda scale, overflow, good_steps, interval: scale * 2 ** (-1 if overflow else (good_steps + 1) // interval),
        lambda s, bad, n, of: torch.tensor(s) / 2 if bad else torch.tensor(s) * (1 + (n + 1 == of)),
    ],
)
def test_the_next_scale_however_it_is_written(function: Any) -> None:
    assert check.next_scale(function).passed


SCALES: list[tuple[Any, int, list[str]]] = [
    (lambda s, bad, n, of: s / 2 if bad else s, 3, ["gives 1024, and 2048 is right: it never grows"]),
    (lambda s, bad, n, of: s if bad or n + 1 < of else 2 * s, 3, ["gives 65536, and 32768 is right: it never shrinks"]),
    (lambda s, bad, n, of: s / 2 if bad else 2 * s, 4, ["it doubles after every good step"]),
    (lambda s, bad, n, of: s / 2 if bad else 2 * s if n >= of else s, 3, ["it never grows"]),
    (
        lambda s, bad, n, of: 2 * s if bad else s / 2 if n + 1 == of else s,
        1,
        ["it doubles after an overflow and halves"],
    ),
    (lambda s, bad, n, of: 2 * s if n + 1 == of else s / 2 if bad else s, 4, ["although the step overflowed"]),
    (lambda s, bad, n, of: 1 if bad else 2 * s if n + 1 == of else s, 3, ["an overflow brings it down to 1"]),
    (
        lambda s, bad, n, of: 2 * s if not bad and n + 1 == of else s / 2,
        4,
        ["it shrinks after every step without growth"],
    ),
    (lambda s, bad, n, of: 0.5 if bad else 2.0 if n + 1 == of else 1.0, 0, ["the factor and not the scale"]),
    (lambda s, bad, n, of: s / 2 if bad else s + 2 * (n + 1 == of), 3, ["it grows by 2 and not by a factor of 2"]),
    (lambda s, bad, n, of: s + 1, 0, ["none of the usual slips"]),
    (lambda s, bad, n, of: None, 0, ["Your function returns None, which is no finite number"]),
]


@pytest.mark.parametrize(("function", "passes", "words"), SCALES)
def test_a_wrong_next_scale_is_named(function: Any, passes: int, words: list[str]) -> None:
    verdict = check.next_scale(function)
    assert sum(ok for _, ok in verdict.checks) == passes, verdict
    for each in words:
        assert each in verdict.sentence, verdict.sentence


def test_no_two_wrong_scales_give_the_same_numbers() -> None:
    rows = {words: [wrong(*case) for case in NEXT_SCALE.cases.values()] for words, wrong in NEXT_SCALE.wrong.items()}
    for one, other in itertools.combinations(rows, 2):
        assert rows[one] != pytest.approx(rows[other], rel=1e-6), (one, other)
