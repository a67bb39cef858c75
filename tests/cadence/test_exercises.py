"""Whole updates as learners write them, right and wrong, and the sentence that each of them gets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from labkit import check
from labkit.cadence.exercises import ADAM_RATIO
from labkit.nets import next_token_loss, valid_tokens


def contributions(model: Any, microbatches: Any) -> Any:
    """The right loss of every microbatch."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    return (next_token_loss(model, tokens, labels, "sum") / N for tokens, labels in microbatches)


def right(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    for loss in contributions(model, microbatches):
        loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def cleared_first(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    model.zero_grad(set_to_none=False)
    sum(contributions(model, microbatches)).backward()
    optimizer.step()
    scheduler.step()


def divided_once(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> float:
    optimizer.zero_grad()
    N = total = 0.0
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum")
        loss.backward()
        total += loss.item()
        N += valid_tokens(labels)
    for p in model.parameters():
        p.grad /= N
    optimizer.step()
    scheduler.step()
    return total / N


def by_closure(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        losses = list(contributions(model, microbatches))
        for loss in losses:
            loss.backward()
        return sum(losses).item()  # type: ignore[union-attr]

    optimizer.step(closure)
    scheduler.step()


@pytest.mark.parametrize("step", [right, cleared_first, divided_once, by_closure])
def test_right_updates_are_accepted(step: Any) -> None:
    verdict = check.step(step)
    assert verdict.passed and verdict.sentence.startswith("Right"), verdict


def per_microbatch(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    for loss in contributions(model, microbatches):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()


def all_per_microbatch(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    for loss in contributions(model, microbatches):
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def schedule_per_microbatch(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    optimizer.zero_grad()
    for loss in contributions(model, microbatches):
        loss.backward()
        scheduler.step()
    optimizer.step()


def schedule_for_four_processes(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    right(model, optimizer, scheduler, microbatches)
    for _ in range(3):
        scheduler.step()


def no_schedule(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    cleared_first(model, optimizer, type("", (), {"step": lambda self: None})(), microbatches)


def schedule_first(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    for loss in contributions(model, microbatches):
        loss.backward()
    scheduler.step()
    optimizer.step()
    optimizer.zero_grad()


def never_cleared(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    for loss in contributions(model, microbatches):
        loss.backward()
    optimizer.step()
    scheduler.step()


def cleared_too_early(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    for loss in contributions(model, microbatches):
        loss.backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    scheduler.step()


def cleared_in_the_loop(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    for loss in contributions(model, microbatches):
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    scheduler.step()


def no_step(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    optimizer.zero_grad()
    for loss in contributions(model, microbatches):
        loss.backward()
    scheduler.step()


def means(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    optimizer.zero_grad()
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels, "mean") / len(microbatches)).backward()
    optimizer.step()
    scheduler.step()


def counted(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    right(model, optimizer, scheduler, microbatches)
    for state in optimizer.state.values():
        state["step"] += len(microbatches) - 1


def decayed(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    right(model, optimizer, scheduler, microbatches)
    with torch.no_grad():
        for p in model.parameters():
            p *= 1 - 0.001 * (len(microbatches) - 1)


def clipped(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    for loss in contributions(model, microbatches):
        loss.backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def breaks_later(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    right(model, optimizer, scheduler, microbatches)
    assert len(microbatches) == 4


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (per_microbatch, ("The optimizer stepped four times in one window (step-per-microbatch)",)),
        (all_per_microbatch, ("step-per-microbatch", "The schedule stepped four times", "schedule-per-microbatch")),
        (schedule_per_microbatch, ("The schedule stepped four times in one window (schedule-per-microbatch)",)),
        (schedule_for_four_processes, ("four times in a window, whatever the number", "schedule-per-process")),
        (no_schedule, ("scheduler.step() never ran, so the learning rate stays",)),
        (schedule_first, ("scheduler.step() ran before optimizer.step()",)),
        (never_cleared, ("Window 2 still holds the gradient of the window before", "stale-gradient", "clear the gra")),
        (cleared_too_early, ("cleared between the last backward and the step: nothing reached the optimizer",)),
        (cleared_in_the_loop, ("got 0, 0, 0, 1 times their right weight (last-microbatch-only)", "zero_grad once")),
        (no_step, ("No optimizer made a step, and no weight moved (no-step)",)),
        (means, ("1.12, 1.02, 3.05, 0.558 times their right weight (mean-of-means)", "count the valid tokens N")),
        (counted, ("Adam's own count advanced by 4, and the optimizer stepped once (adam-count-per-microbatch)",)),
        (decayed, ("The weights were decayed twice in one window (decay-per-microbatch)", "inside the optimizer's")),
        (clipped, ("The gradient was clipped inside",)),
        (breaks_later, ("Line 3 of breaks_later", "raises AssertionError")),
        (lambda model, optimizer, scheduler, microbatches: model.nothing, ("AttributeError",)),
        (lambda model, microbatches: None, ("is called with (model, optimizer, scheduler, microbatches)",)),
        (None, ("is a NoneType and no function",)),
    ],
)
def test_each_wrong_update_gets_its_sentences(step: Any, said: tuple[str, ...]) -> None:
    verdict = check.step(step)
    assert not verdict.passed
    for words in said:
        assert words in verdict.sentence, verdict


def test_a_fault_alone_is_told_alone() -> None:
    for step in (schedule_per_microbatch, schedule_first, no_schedule, never_cleared, counted, decayed):
        verdict = check.step(step)
        assert sum(not ok for _, ok in verdict.checks) == 1, verdict
        assert verdict.sentence.count(".step()") <= 2 and len(verdict.sentence) < 260


@pytest.mark.parametrize(
    "right",
    [
        lambda s, K, b1, b2: (1 - b1**s) / (1 - b1 ** (s * K)) * math.sqrt((1 - b2 ** (s * K)) / (1 - b2**s)),
        lambda s, K, b1, b2: (
            (1 / (1 - b1 ** (s * K)) / math.sqrt(1 / (1 - b2 ** (s * K))))
            / (1 / (1 - b1**s) / math.sqrt(1 / (1 - b2**s)))
        ),
        lambda s, K, b1, b2: (
            torch.tensor((1 - b1**s) / (1 - b1 ** (s * K))) / torch.tensor((1 - b2**s) / (1 - b2 ** (s * K))).sqrt()
        ),
    ],
)
def test_right_ratios_are_accepted(right: Any) -> None:
    assert check.adam_ratio(lambda step, accumulation, beta1, beta2: right(step, accumulation, beta1, beta2)).passed


def test_every_slip_is_told_in_its_own_words() -> None:
    assert len(ADAM_RATIO.wrong) >= 8
    told = set()
    for words, wrong in ADAM_RATIO.wrong.items():
        verdict = check.adam_ratio(
            lambda step, accumulation, beta1, beta2, wrong=wrong: wrong(step, accumulation, beta1, beta2)
        )
        assert not verdict.passed
        told.add(verdict.sentence.partition(" is right: ")[2])
        assert verdict.sentence.endswith(f": {words}."), words
    assert len(told) == len(ADAM_RATIO.wrong)
