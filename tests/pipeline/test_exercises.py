"""Bubbles and pipeline losses as learners write them, right and wrong, and the sentence that each gets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from labkit import check
from labkit.fit import flat, gradient
from labkit.nets import IGNORE
from labkit.pipeline.exercises import BATCHES, BUBBLE, scheduled
from labkit.pipeline.stages import LOSSES, data, model
from labkit.pipeline.step import run_pipeline

torch.set_num_threads(1)


BUBBLE_RIGHT: list[Any] = [
    lambda stages, microbatches: (stages - 1) / (microbatches + stages - 1),
    lambda P, M: 1 - M / (M + P - 1),
    lambda P, M: 1 / (1 + M / (P - 1)) if P > 1 else 0,
    lambda P, M: torch.tensor(P - 1.0, dtype=torch.float64) / (M + P - 1),
]


@pytest.mark.parametrize("function", BUBBLE_RIGHT)
def test_a_bubble_however_it_is_written(function: Any) -> None:
    verdict = check.bubble(function)
    assert verdict.passed and verdict.sentence == "Right in all cases.", verdict


BUBBLE_WRONG: list[tuple[Any, str]] = [
    (lambda P, M: (P - 1) / M, "the bubble over the time of the work"),
    (lambda P, M: (P - 1) / (M + P), "M + P − 1 slots, not M + P"),
    (lambda P, M: P / (M + P - 1), "a rank waits P − 1 slots"),
    (lambda P, M: P / (M + P), "both are one too many"),
    (lambda P, M: M / (M + P - 1), "the share in which a rank works"),
    (lambda P, M: (M - 1) / (P + M - 1), "stages and microbatches are swapped"),
    (lambda P, M: 2 * (P - 1) / (M + P - 1), "the slots of backward passes are missing below"),
    (lambda P, M: 2 * (P - 1) / (M + 2 * P - 2), "fill and drain were counted twice, M once"),
    (lambda P, M: (P - 1) / P, "the bubble of a single microbatch"),
    (lambda P, M: M * (P - 1) / (M + P - 1), "once, not once for each microbatch"),
    (lambda P, M: P - 1, "those are slots"),
    (lambda P, M: 1 / (M + 1), "P is missing"),
    (lambda P, M: 1 / (M + P - 1), "the number of stages is missing above"),
    (lambda P, M: 100 * (P - 1) / (M + P - 1), "in per cent"),
    (lambda P, M: (P - 1) // (M + P - 1), "rounded down to a whole number"),
    (lambda P, M: (P - 1) / (M + P - 1) + 0.01, "none of the usual slips"),
    (lambda P, M: math.nan, "no finite number"),
    (lambda P: P, "is called with (stages, microbatches)"),
]


@pytest.mark.parametrize(("function", "said"), BUBBLE_WRONG)
def test_a_wrong_bubble_is_named(function: Any, said: str) -> None:
    verdict = check.bubble(function)
    assert not verdict.passed and said in verdict.sentence, verdict


def test_no_two_slips_give_the_same_numbers() -> None:
    rows = [tuple(float(f"{wrong(*case):.12g}") for case in BUBBLE.cases.values()) for wrong in BUBBLE.wrong.values()]
    assert len(set(rows)) == len(rows)


# A loss and its scale_grads.


def entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction=reduction)


def by_hand(logits: Tensor, targets: Tensor, N: int) -> Tensor:
    valid = targets != IGNORE
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return -(picked * valid).sum() / N


def hand_mean(logits: Tensor, targets: Tensor, N: int) -> Tensor:
    return by_hand(logits, targets, 1) / (targets != IGNORE).sum()


def row_means(logits: Tensor, targets: Tensor, N: int) -> Tensor:
    counts = (targets != IGNORE).sum(1).clamp(min=1)
    return (entropy(logits, targets, "none").sum(1) / counts).mean()


def row_sums(logits: Tensor, targets: Tensor, N: int) -> Tensor:
    return row_means(logits, targets, N) * len(targets)


def share_of_the_mean(logits: Tensor, targets: Tensor, N: int) -> Tensor:
    n = int((targets != IGNORE).sum())
    return entropy(logits, targets, "mean") * n / N if n else logits.sum() * 0


LOSS_RIGHT: list[Any] = [
    by_hand,
    share_of_the_mean,
    lambda logits, targets, N: entropy(logits, targets, "sum") / N,
    lambda logits, targets, N: entropy(logits, targets, "none").sum().div(N).reshape(1),
]


@pytest.mark.parametrize("function", LOSS_RIGHT)
def test_a_loss_however_it_is_written(function: Any) -> None:
    verdict = check.pipeline_loss(function, scale_grads=False)
    assert verdict.passed and verdict.sentence.startswith("Right: in every batch"), verdict


LOSS_WRONG: list[tuple[Any, bool, list[str]]] = [
    (
        lambda o, t, N: entropy(o, t, "mean"),
        True,
        ["mean-of-means: ", "weigh 5.75, 0.479, 1.92, 0.821 times 1/N", "own mean. scale_grads=True divides by M = 4"],
    ),
    (lambda o, t, N: entropy(o, t, "mean"), False, ["sum-of-means: ", "weigh 23, 1.92, 7.67, 3.29"]),
    (
        lambda o, t, N: entropy(o, t, "sum") / N,
        True,
        ["double-division: ", "weigh 0.25 ", "divides by M = 4 after that"],
    ),
    (lambda o, t, N: entropy(o, t, "sum"), False, ["token-sum: ", "weigh 23 ", "never divided by N"]),
    (
        lambda o, t, N: entropy(o, t, "sum"),
        True,
        ["token-sum: ", "weigh 5.75 ", "never divided by N", "divides by M = 4"],
    ),
    (lambda o, t, N: entropy(o, t, "mean") / 4, False, ["each microbatch's own mean, divided by 4 whatever M is"]),
    (lambda o, t, N: entropy(o, t, "sum") * 4 / N, True, ["the sum over N, multiplied by 4 whatever M is"]),
    (lambda o, t, N: entropy(o, t, "none").mean(), True, ["padded-count: ", "over all targets, the ignored too"]),
    (lambda o, t, N: entropy(o, t, "sum") / len(t), True, ["the sum over the microbatch's rows"]),
    (lambda o, t, N: entropy(o, t, "mean") / N, False, ["each microbatch's own mean, over N once more"]),
    (row_sums, True, ["the sum of each row's own mean. scale_grads=True divides by M = 4"]),
    (row_means, True, ["sequence-means: ", "the mean of each row's own mean"]),
    (hand_mean, True, ["mean-of-means: ", "microbatch without a valid target” the gradient is not finite", "0/0"]),
    (lambda o, t, N: entropy(o, t, "none"), False, ["returns 12 numbers: a loss is one"]),
    (lambda o, t, N: entropy(o, t, "sum").item() / N, False, ["returns a float, and no tensor"]),
    (lambda o, t, N: (entropy(o, t, "sum") / N).detach(), False, ["cut off from the weights"]),
    (lambda o, t, N: None, False, ["returns None, and no tensor"]),
    (lambda o, t, N: o.sum(), False, ["% of your gradient is that of no sum over tokens"]),
    (lambda o, t, N: entropy(o, t, "sum") * 0, False, ["no-step: the gradient is zero"]),
    (lambda o, t, N: 1 / 0, False, ["raises ZeroDivisionError"]),
    (lambda o, t: o, False, ["is called with (logits, targets, N)"]),
    (3, False, ["no function"]),
    (by_hand, "no", ["scale_grads = 'no' is neither True nor False"]),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("function", "scale_grads", "said"), LOSS_WRONG)
def test_a_wrong_loss_is_named(function: Any, scale_grads: bool, said: list[str]) -> None:
    verdict = check.pipeline_loss(function, scale_grads)
    assert not verdict.passed and all(words in verdict.sentence for words in said), verdict


def test_equal_counts_hide_the_mean_of_means_and_the_verdict_shows_it() -> None:
    verdict = check.pipeline_loss(LOSSES["mean"])
    assert [name for name, ok in verdict.checks if ok] == ["equal counts"]
    assert {name for name, _ in verdict.checks} == {name for name, *_ in BATCHES}
    assert "with scale_grads=False" in verdict.sentence


def test_a_loss_that_never_returns_is_stopped() -> None:
    def endless(logits: Tensor, targets: Tensor, N: int) -> Tensor:
        while True:
            pass

    verdict = check.pipeline_loss(endless, seconds=0.5)
    assert "and was stopped" in verdict.sentence and not any(ok for _, ok in verdict.checks)


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_schedule_of_the_checker_leaves_what_the_librarys_own_leaves(loss: str, scale_grads: bool) -> None:
    whole, batch = model(2, 0), data(4, 0)
    outcome, fault = scheduled(LOSSES[loss], scale_grads, whole, batch, 4, 60.0)
    (found,) = run_pipeline([batch], 2, 4, "GPipe", loss, scale_grads, 0)
    mine = flat(gradient(whole))
    assert not fault and not outcome.late and (mine - found).norm() / found.norm() < 1e-14
