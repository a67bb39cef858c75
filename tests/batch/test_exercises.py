"""Global batches and plans as learners write them, right and wrong, and the sentence that each of them gets."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import LabError, batch, check
from labkit.batch.exercises import CASES, GLOBAL_BATCH
from labkit.exercise.verdict import Verdict

Formula = Callable[..., Any]


def on_one_line(verdict: Verdict) -> str:
    return " ".join(str(verdict).split())


# The global batch.


def by_the_library(b: int, world: int, tp: int, pp: int, cp: int, K: int) -> int:
    return batch.plan(microbatch=b, world=world, tp=tp, pp=pp, cp=cp, accumulation=K).global_batch


def one_after_another(b: int, world: int, tp: int, pp: int, cp: int, K: int) -> int:
    return b * K * (world // tp // pp // cp)


def in_torch(b: int, world: int, tp: int, pp: int, cp: int, K: int) -> torch.Tensor:
    return b * world * torch.tensor(K) / torch.tensor([tp, pp, cp]).prod()


def counted(b: int, world: int, tp: int, pp: int, cp: int, K: int) -> int:
    firsts = range(0, world, tp * pp * cp)
    return sum(1 for _ in firsts for _ in range(K) for _ in range(b))


@pytest.mark.parametrize("function", [by_the_library, one_after_another, in_torch, counted])
def test_a_right_global_batch_passes_however_it_is_written(function: Formula) -> None:
    assert check.global_batch(function).passed


BATCHES: list[tuple[Formula, int, list[str]]] = [
    (
        lambda b, world, tp, pp, cp, K: b * world * K,
        2,
        ["world = 64", "gives 2048, and 256 is right", "every device was counted as a replica"],
    ),
    (lambda b, w, tp, pp, cp, K: b * w / (tp * pp * cp), 1, ["gives 32, and 256 is right: the accumulation steps are"]),
    (lambda b, w, tp, pp, cp, K: b * w // tp * K, 2, ["gives 512, and 256 is right: only tp divides the world"]),
    (lambda b, w, tp, pp, cp, K: b * w / pp * K, 2, ["only pp divides the world, tp and cp do too"]),
    (lambda b, w, tp, pp, cp, K: b * w / cp * K, 2, ["gives 2048, and 256", "only cp divides the world"]),
    (lambda b, w, tp, pp, cp, K: b * w / (tp * pp) * K, 3, ["the context-parallel ranks were counted as replicas"]),
    (lambda b, w, tp, pp, cp, K: b * w / (tp * cp) * K, 2, ["the pipeline-parallel ranks were counted as replicas"]),
    (lambda b, w, tp, pp, cp, K: b * w / (pp * cp) * K, 2, ["the tensor-parallel ranks were counted as replicas"]),
    (lambda b, w, tp, pp, cp, K: b * w / (tp + pp + cp) * K, 0, ["the sum of tp, pp and cp, not by their product"]),
    (lambda b, w, tp, pp, cp, K: b * w * tp * pp * cp * K, 2, ["tp, pp and cp multiply the batch"]),
    (lambda b, w, tp, pp, cp, K: b * K, 2, ["gives 32, and 256 is right: world is missing"]),
    (lambda b, w, tp, pp, cp, K: w / (tp * pp * cp) * K, 0, ["gives 1, and 8 is right: microbatch is missing"]),
    (
        lambda b, w, tp, pp, cp, K: b * w / (tp * pp * cp) / K,
        1,
        ["gives 4, and 256", "every one of them adds sequences"],
    ),
    (
        lambda b, w, tp, pp, cp, K: b * w,
        1,
        ["every device was counted as a replica", "; the accumulation steps are missing"],
    ),
    (lambda b, w, tp, pp, cp, K: b, 1, ["world is missing, so it is the batch of one replica; the accumulation steps"]),
    (lambda b, w, tp, pp, cp, K: b + 1, 0, ["gives 9, and 8 is right: none of the usual slips"]),
    (lambda b, w, tp, pp, cp, K: None, 0, ["returns None, which is no finite number"]),
    (lambda b, w, K: b * w * K, 0, ["takes (b, w, K), and is called with (microbatch, world, tp"]),
]


@pytest.mark.parametrize(("function", "passes", "words"), BATCHES)
def test_a_wrong_global_batch_is_named(function: Formula, passes: int, words: list[str]) -> None:
    verdict = check.global_batch(function)
    assert sum(ok for _, ok in verdict.checks) == passes, verdict
    for each in words:
        assert each in verdict.sentence, verdict.sentence


def test_the_right_global_batch_is_the_planners() -> None:
    for b, world, tp, pp, cp, K in GLOBAL_BATCH.cases.values():
        found = batch.planner(microbatch=b, world=world, tp=tp, pp=pp, cp=cp, accumulation_steps=K)
        assert GLOBAL_BATCH.right(b, world, tp, pp, cp, K) == found.global_batch


def test_no_two_wrong_formulas_give_the_same_numbers() -> None:
    rows = {words: [f(*case) for case in GLOBAL_BATCH.cases.values()] for words, f in GLOBAL_BATCH.wrong.items()}
    for one, other in itertools.combinations(rows, 2):
        if one.count(";") == other.count(";") and bool(one) == bool(other):
            assert rows[one] != pytest.approx(rows[other], rel=1e-6), (one, other)


# The plan for a wanted batch.


def smallest_steps(tokens: int, S: int, D: int, largest: int) -> tuple[int, int]:
    for b in range(largest, 0, -1):
        if tokens % (S * D * b) == 0:
            return b, tokens // (S * D * b)
    raise ValueError(f"{tokens} tokens cannot be cut")


def from_the_steps(tokens: int, S: int, D: int, largest: int) -> list[int]:
    share, rest = divmod(tokens, S * D)
    if rest:
        raise LabError("no")
    K = next(K for K in range(1, share + 1) if share % K == 0 and share // K <= largest)
    return [share // K, K]


def by_max(tokens: int, S: int, D: int, largest: int) -> tuple[float, np.int64]:
    b = max(b for b in range(1, largest + 1) if tokens % (S * D * b) == 0)
    return float(b), np.int64(tokens // (S * D * b))


def by_the_experiment(tokens: int, S: int, D: int, largest: int) -> tuple[int, int]:
    found = batch.cuts(tokens=tokens, largest_microbatch=largest, replicas=D, sequence_length=S)
    if not found.exact:
        raise ValueError
    return found.best.microbatch, found.best.accumulation


@pytest.mark.parametrize("function", [smallest_steps, from_the_steps, by_max, by_the_experiment])
def test_a_right_plan_passes_however_it_is_written(function: Formula) -> None:
    verdict = check.plan(function)
    assert verdict.passed and on_one_line(verdict).startswith("6 of 6 checks Right in all cases"), verdict


def nearest(tokens: int, S: int, D: int, largest: int) -> tuple[int, int]:
    found = batch.cuts(tokens=tokens, largest_microbatch=largest, replicas=D, sequence_length=S)
    return found.best.microbatch, found.best.accumulation


def refuses(tokens: int, S: int, D: int, largest: int) -> tuple[int, int]:
    if tokens % (S * D * largest):
        raise ValueError("the largest microbatch does not divide")
    return largest, tokens // (S * D * largest)


PLANS: list[tuple[Formula, int, list[str]]] = [
    (
        lambda tokens, S, D, largest: (largest, tokens // (S * D * largest)),
        1,
        [
            "“the largest microbatch does not divide” your (6, 5) makes 15,728,640 tokens, 1,048,576 fewer than wanted",
            "the remainder is dropped. Take a microbatch that divides the 32 sequences of one replica.",
        ],
    ),
    (
        lambda tokens, S, D, largest: (largest, math.ceil(tokens / (S * D * largest))),
        1,
        ["your (6, 6) makes 18,874,368 tokens, 2,097,152 more than wanted: it is rounded up. Take a microbatch"],
    ),
    (
        lambda tokens, S, D, largest: (1, tokens // (S * D)),
        1,
        ["your (1, 32) is exact, but (4, 8) fits too, with fewer"],
    ),
    (
        lambda tokens, S, D, largest: (tokens // (S * D), 1),
        1,
        ["your (32, 1) takes 32 sequences at once, and the memory of one replica holds 4"],
    ),
    (
        lambda tokens, S, D, largest: (largest, tokens // (S * largest)),
        0,
        ["your (4, 1024) makes 2,147,483,648 tokens", "the 128 replicas are forgotten, all of them do it at once"],
    ),
    (
        lambda tokens, S, D, largest: (largest, tokens // (D * largest)),
        0,
        ["tokens were taken for sequences. Divide by the 4,096 tokens of a sequence too"],
    ),
    (
        lambda tokens, S, D, largest: (largest, tokens // largest),
        0,
        ["replicas and sequence length are forgotten. Divide by 128 and by 4,096 too"],
    ),
    (
        lambda tokens, S, D, largest: smallest_steps(tokens, S, D, largest)[::-1],
        1,
        ["your (8, 4) is the right pair the wrong way round: the microbatch comes first"],
    ),
    (
        nearest,
        5,
        ["“no plan gives it exactly” your (1, 31) makes 1,015,808 tokens, 15,808 more", "Say so with a ValueError"],
    ),
    (
        refuses,
        2,
        ["line 3 of refuses", "raises ValueError: the largest microbatch does not divide, and (4, 8) is a plan"],
    ),
    (
        lambda tokens, S, D, largest: (largest, tokens / (S * D * largest)),
        1,
        ["your function returns (6, 5.333333333333333), and two whole numbers, (microbatch, accumulation), are asked"],
    ),
    (
        lambda tokens, S, D, largest: smallest_steps(tokens, S, D, largest) if tokens % (S * D) == 0 else None,
        5,
        ["“no plan gives it exactly” your function returns None, and a ValueError was to be raised"],
    ),
    (
        lambda tokens, S, D, largest: (0, tokens // (S * D)),
        0,
        ["your (0, 32) makes no tokens: one replica has 32 sequences to do, and both numbers are 1 or more"],
    ),
    (
        lambda tokens, S, D, largest: (largest + 1, tokens // (S * D * (largest + 1))),
        0,
        ["your (5, 6) takes 5 sequences at once, and the memory of one replica holds 4"],
    ),
    (
        lambda tokens, S, D, largest: (7, 4) if D == 1 else smallest_steps(tokens, S, D, largest),
        5,
        ["“one replica” your (7, 4) makes 57,344 tokens, 4,096 fewer than wanted: the remainder is dropped. Take a"],
    ),
    (lambda tokens, S, D, largest: (3, 7), 0, ["makes 11,010,048 tokens, 5,767,168 fewer", "these are other numbers"]),
    (lambda tokens, S, D, largest: 1 / 0, 0, ["raises ZeroDivisionError"]),
    (
        lambda tokens, S, D: (1, 1),
        0,
        ["Your function takes (tokens, S, D), and is called with (tokens, sequence_length"],
    ),
    (lambda tokens, S, D, largest: "4, 8", 0, ["your function returns '4, 8', and two whole numbers"]),
    (lambda tokens, S, D, largest: (True, 8), 0, ["your (1, 8) makes"]),
    (lambda tokens, S, D, largest: (math.nan, math.inf), 0, ["your function returns (nan, inf)"]),
]


@pytest.mark.parametrize(("function", "passes", "words"), PLANS)
def test_a_wrong_plan_is_named(function: Formula, passes: int, words: list[str]) -> None:
    verdict = check.plan(function)
    assert not verdict.passed and sum(ok for _, ok in verdict.checks) == passes, verdict
    for each in words:
        assert each in verdict.sentence, verdict.sentence


def test_a_plan_that_never_ends_is_stopped() -> None:
    def for_ever(tokens: int, S: int, D: int, largest: int) -> None:
        while True:
            pass

    start = time.monotonic()
    verdict = check.plan(for_ever, seconds=0.2)
    assert "was still running after 0.2 s" in verdict.sentence and not any(ok for _, ok in verdict.checks)
    assert time.monotonic() - start < 5


def test_what_a_plan_prints_and_changes_is_told() -> None:
    def loud(tokens: int, S: int, D: int, largest: int) -> tuple[int, int]:
        print("trying", tokens)
        torch.manual_seed(0)
        return smallest_steps(tokens, S, D, largest)

    verdict = check.plan(loud)
    assert verdict.passed and verdict.printed == "trying 16777216"
    assert verdict.sentence.endswith("(It also changed torch's random numbers; that was put back.)")


@given(st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.lists(st.integers() | st.none()), st.binary()))
@settings(max_examples=60)
def test_whatever_a_function_returns_there_is_a_verdict(value: object) -> None:
    for judge in (check.plan, check.global_batch):
        verdict = judge(lambda *_: value)
        assert not verdict.passed and verdict.sentence.endswith((".", "?")) and len(str(verdict)) < 1500


@pytest.mark.parametrize("check_", CASES)
def test_the_cases_differ_in_what_they_try(check_: str) -> None:
    case = CASES[check_]
    share, rest = divmod(case.tokens, case.sequence_length * case.replicas)
    assert bool(rest) == (check_ == "no plan gives it exactly")
    assert (share % case.largest == 0) == (check_ == "the largest microbatch divides")
