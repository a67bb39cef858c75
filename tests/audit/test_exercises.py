"""Whole steps and counts as learners write them, right and wrong, and the sentence that each of them gets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from labkit import check
from labkit.audit.exercises import CASES, PROBES
from labkit.nets import IGNORE, Transformer, next_token_loss, valid_tokens

torch.set_num_threads(1)

Step = Callable[[Any], Any]
Make = Callable[[nn.Module, Any], Step]


def total(microbatches: Any) -> int:
    return sum(valid_tokens(labels) for _, labels in microbatches)


def build_of(make: Make, dtype: torch.dtype = torch.float64) -> Callable[[], tuple[nn.Module, Step]]:
    def build() -> tuple[nn.Module, Step]:
        model = Transformer(seed=0, width=8, dtype=dtype)
        return model, make(model, AdamW(model.parameters(), lr=1e-3))

    return build


# Right steps, each written in another way.


def plain(model: nn.Module, optimizer: Any) -> Step:
    def step(microbatches: Any) -> None:
        N = total(microbatches)
        for tokens, labels in microbatches:
            (next_token_loss(model, tokens, labels) / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def closure(model: nn.Module, optimizer: Any) -> Step:
    def step(microbatches: Any) -> None:
        def inside() -> Tensor:
            optimizer.zero_grad()
            loss = sum(next_token_loss(model, *each) for each in microbatches) / total(microbatches)
            loss.backward()
            return loss

        optimizer.step(inside)

    return step


def trainer(model: nn.Module, optimizer: Any) -> Step:
    class Trainer:
        def fit(self, microbatches: Any) -> None:
            model.zero_grad()
            N = 0
            for tokens, labels in microbatches:
                next_token_loss(model, tokens, labels).backward()
                N += int((labels[:, 1:] != IGNORE).sum())
            for p in model.parameters():
                p.grad /= N
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return Trainer().fit


@pytest.mark.parametrize("make", [plain, closure, trainer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_right_step_passes_however_it_is_written(make: Make, dtype: torch.dtype) -> None:
    verdict = check.audited(build_of(make, dtype))
    assert verdict.passed and all(ok for _, ok in verdict.checks), verdict
    assert verdict.sentence.startswith("Right. The step equals the token-mean: ")


# Wrong steps.


def loop_of(
    loss: Callable[..., Tensor], each: Callable[[nn.Module, Any], object] = lambda model, optimizer: None
) -> Make:
    def make(model: nn.Module, optimizer: Any) -> Step:
        def step(microbatches: Any) -> None:
            for tokens, labels in microbatches:
                loss(model, tokens, labels, microbatches).backward()
                each(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def mean(model: nn.Module, tokens: Tensor, labels: Tensor, window: Any) -> Tensor:
    return next_token_loss(model, tokens, labels, "mean") / len(window)


def share(model: nn.Module, tokens: Tensor, labels: Tensor, window: Any) -> Tensor:
    return next_token_loss(model, tokens, labels) / total(window)


def uncleared(model: nn.Module, optimizer: Any) -> Step:
    def step(microbatches: Any) -> None:
        for tokens, labels in microbatches:
            share(model, tokens, labels, microbatches).backward()
        optimizer.step()

    return step


def scheduled(model: nn.Module, optimizer: Any) -> Step:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    def step(microbatches: Any) -> None:
        for tokens, labels in microbatches:
            share(model, tokens, labels, microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in microbatches:
            scheduler.step()

    return step


WRONG: list[tuple[Make, int, list[str]]] = [
    (
        loop_of(mean),
        0,
        ["mean-of-means: The microbatches got", "The fix: count the valid tokens N of the whole window"],
    ),
    (
        loop_of(lambda m, t, y, w: next_token_loss(m, t, y, "mean")),
        0,
        ["sum-of-means: The microbatches got 14, 5.09, 3.29, 2.33 times their right weight"],
    ),
    (loop_of(lambda m, t, y, w: next_token_loss(m, t, y)), 0, ["token-sum: The gradient is 56 times the right one"]),
    (loop_of(lambda m, t, y, w: share(m, t, y, w) / len(w)), 0, ["double-division", "0.25 times the right one"]),
    (
        loop_of(lambda m, t, y, w: next_token_loss(m, t, y) / sum(int((y != IGNORE).sum()) for _, y in w)),
        0,
        ["unshifted-count", "0.875 times the right one", "labels[:, 1:]"],
    ),
    (
        loop_of(lambda m, t, y, w: next_token_loss(m, t, y) / sum(y[:, 1:].numel() for _, y in w)),
        0,
        ["padded-count", "divided by 184, padding and all"],
    ),
    (
        loop_of(share, lambda model, optimizer: optimizer.step()),
        0,
        ["step-per-microbatch: The optimizer stepped five times in one window"],
    ),
    (
        loop_of(share, lambda model, optimizer: clip_grad_norm_(model.parameters(), 0.05)),
        0,
        ["clip-per-microbatch: The gradient was clipped to 0.05"],
    ),
    (uncleared, 0, ["stale-gradient: Window 2 still holds the gradient of the window before"]),
    (scheduled, 0, ["schedule-per-microbatch: The schedule stepped four times in one window"]),
    (lambda model, optimizer: lambda microbatches: None, 0, ["no-step: No optimizer made a step"]),
    (lambda model, optimizer: lambda microbatches: 1 / 0, 0, ["No verdict: the step raises ZeroDivisionError"]),
]


@pytest.mark.parametrize(("make", "passes", "words"), WRONG)
def test_a_wrong_step_is_named(make: Make, passes: int, words: list[str]) -> None:
    verdict = check.audited(build_of(make))
    assert not verdict.passed and sum(ok for _, ok in verdict.checks) == passes, verdict
    for each in words:
        assert each in verdict.sentence, verdict.sentence


def test_a_mean_over_nothing_fails_only_where_there_is_nothing() -> None:
    def own_mean(m: nn.Module, t: Tensor, y: Tensor, w: Any) -> Tensor:
        mask = y[:, 1:] != IGNORE
        losses = next_token_loss(m, t, y.clamp(min=0), "none")
        return (losses * mask).sum() / mask.sum() * (valid_tokens(y) / total(w))

    verdict = check.audited(build_of(loop_of(own_mean)))
    assert [ok for _, ok in verdict.checks] == [True, True, False], verdict
    assert verdict.sentence.startswith("In the check “a microbatch without a valid target” ")
    assert "non-finite" in verdict.sentence


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (3, "This is a int and no function"),
        (lambda model: model, "Your function takes (model), and is called with ()"),
        (lambda: None, "build() gives a NoneType and no model with its step: try return model, step"),
        (lambda: (nn.Linear(2, 2), 3), "no model with its step"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: sys.exit(3), "SystemExit"),
    ],
)
def test_what_is_no_build_is_told(build: Any, words: str) -> None:
    verdict = check.audited(build)
    assert not verdict.passed and words in verdict.sentence and len(verdict.checks) == len(PROBES), verdict


def test_an_endless_step_ends() -> None:
    def make(model: nn.Module, optimizer: Any) -> Step:
        def step(microbatches: Any) -> None:
            while True:
                pass

        return step

    verdict = check.audited(build_of(make), seconds=1.5)
    assert not verdict.passed and "was still running" in verdict.sentence


def test_random_numbers_are_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    check.audited(build_of(plain))
    assert torch.equal(torch.get_rng_state(), before)


# Counts.


def solution(K: int, N: int) -> list[int] | None:
    return [1] * (K - 1) + [N - K + 1] if K > 1 and N >= 2 * K else None


def from_the_front(K: int, N: int) -> Any:
    if K == 1 or N / K < 2:
        return None
    return torch.tensor([N - K + 1, *[1] * (K - 1)])


def just_enough(K: int, N: int) -> Any:
    small = N // (2 * K)
    if K < 2 or small < 1:
        return None
    rest, more = divmod(N - small, K - 1)
    return (small, *[rest + (at < more) for at in range(K - 1)])


@pytest.mark.parametrize("function", [solution, from_the_front, just_enough])
def test_telling_counts_pass(function: Any) -> None:
    verdict = check.probe(function)
    assert verdict.passed and verdict.sentence.startswith("Right: on these counts the audit tells"), verdict


def without_none(K: int, N: int) -> list[int]:
    return [1] * (K - 1) + [N - K + 1]


COUNTS: list[tuple[Any, list[str]]] = [
    (lambda K, N: [N // K] * K, ["For K = 4, N = 100 your counts are 25, 25, 25, 25: equal, so every weight is 1"]),
    (lambda K, N: [1] * K, ["your counts are 1, 1, 1, 1, together 4 and not 100"]),
    (lambda K, N: [0] * (K - 1) + [N], ["a microbatch of 0 tokens has no mean, 0/0. Give it 1"]),
    (lambda K, N: [-1] * (K - 1) + [N + K - 1], ["there are no negative tokens"]),
    (lambda K, N: [N / K + 0.5] * K, ["your counts are 25.5, 25.5, 25.5, 25.5: tokens come whole"]),
    (lambda K, N: [N], ["your function returns 1 counts, and there are 4 microbatches"]),
    (lambda K, N: N, ["your function returns 100, a int and no list of counts"]),
    (lambda K, N: "1234", ["a str and no list of counts"]),
    (lambda K, N: None, ["For K = 4, N = 100 your function returns None, and there are such counts"]),
    (
        lambda K, N: [N // K - 1, N // K + 1 + N % K, *[N // K] * (K - 2)] if K > 1 else None,
        ["the heaviest token weighs N / (K n) = 1.04 times its right weight, and 2 is asked for. Make the smallest"],
    ),
    (without_none, ["For K = 1, N = 50 no counts tell the two apart: one microbatch is the whole window. Return None"]),
    (
        lambda K, N: without_none(K, N) if K > 1 else None,
        ["For K = 5, N = 9 no counts tell the two apart: a token alone weighs only 1.8 times its right weight"],
    ),
    (lambda K: K, ["Your function takes (K), and is called with (K, N)"]),
    (lambda K, N: 1 // 0, ["ZeroDivisionError"]),
    (lambda K, N: [float("nan")] * K, ["tokens come whole"]),
    (lambda K, N: ["a"] * K, ["tokens come whole"]),
]


@pytest.mark.parametrize(("function", "words"), COUNTS)
def test_counts_that_tell_nothing_are_told_why(function: Any, words: list[str]) -> None:
    verdict = check.probe(function)
    assert not verdict.passed and not all(ok for _, ok in verdict.checks)
    for each in words:
        assert each in verdict.sentence, verdict.sentence


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=4, max_size=4).filter(lambda counts: sum(counts) <= 99))
def test_counts_are_judged_by_the_weight_of_their_heaviest_token(counts: list[int]) -> None:
    counts = [*counts[:3], 100 - sum(counts[:3])]

    def function(K: int, N: int) -> Any:
        return counts if (K, N) == (4, 100) else solution(K, N)

    heaviest = max(100 / (4 * n) for n in counts)
    assert check.probe(function).passed == (heaviest >= 2)


def test_the_cases_hold_both_kinds() -> None:
    kinds = [solution(K, N) is None for K, N in CASES]
    assert 0 < sum(kinds) < len(kinds)
