"""Formulas as learners write them, right and wrong, and the sentence that each gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from labkit import check
from labkit.accumulation import token_weights
from labkit.accumulation.exercises.token_formulas import TOKEN_MEAN, TOKEN_WEIGHT
from labkit.exercise.formula import Exercise
from labkit.roofline import attainable
from labkit.roofline.exercises import INTENSITY, MATMUL_TIME


def test_the_loss_per_token_however_it_is_written() -> None:
    for right in (
        lambda sums, counts: sum(sums) / sum(counts),
        lambda sums, counts: torch.tensor(sums).sum() / torch.tensor(counts).sum(),
        lambda sums, counts: torch.tensor(sums, dtype=torch.float32).sum() / sum(counts),
        lambda sums, counts: np.sum(sums) / np.sum(counts),
        lambda sums, counts: sum(s / n * n / sum(counts) for s, n in zip(sums, counts, strict=True) if n),
    ):
        assert check.token_mean(right).passed


TOKEN_MEANS: list[tuple[Any, int, list[str]]] = [
    (
        lambda s, n: sum(a / max(b, 1) for a, b in zip(s, n, strict=True)) / len(n),
        2,
        ["For sums = [8.0, 6.0], counts = [1, 3] your function gives 5, and 3.5 is right", "(mean-of-means)"],
    ),
    (
        lambda s, n: sum(a / b for a, b in zip(s, n, strict=True)) / len(n),
        2,
        ["(mean-of-means)", "“a microbatch without a valid target” line 1 of <lambda>", "ZeroDivisionError"],
    ),
    (
        lambda s, n: float((torch.tensor(s) / torch.tensor(n)).mean()),
        2,
        [
            "(mean-of-means)",
            "“a microbatch without a valid target” your function returns nan, which is no finite number",
        ],
    ),
    (
        lambda s, n: np.mean([a / b for a, b in zip(s, n, strict=True) if b]),
        2,
        ["the mean of the means of those that are not empty"],
    ),
    (
        lambda s, n: sum(a / b for a, b in zip(s, n, strict=True) if b),
        1,
        ["gives 2, and 1 is right: the means are added and never divided (sum-of-means)"],
    ),
    (lambda s, n: sum(s), 0, ["gives 8, and 1 is right: the sums are added and never divided (token-sum)"]),
    (lambda s, n: sum(s) / len(s), 0, ["gives 4, and 1 is right: the total is divided by the number of microbatches"]),
    (lambda s, n: sum(s) / sum(n) / len(n), 1, ["gives 0.5, and 1 is right", "(double-division)"]),
    (lambda s, n: sum(s) // sum(n), 1, ["gives 3, and 3.5 is right: // drops the fraction"]),
    (lambda s, n: s[-1] / n[-1], 1, ["(last-microbatch-only)"]),
    (lambda s, n: sum(n) / sum(s), 1, ["upside down"]),
    (lambda s, n: sum(s) / sum(n) + 1, 0, ["gives 2, and 1 is right: none of the usual slips gives these numbers"]),
    (lambda s, n: print(sum(s) / sum(n)), 0, ["Your function returns None, which is no finite number"]),
    (lambda s, n: str(sum(s) / sum(n)), 0, ["Your function returns a str, which is no finite number"]),
    (lambda s: s, 0, ["Your function takes (s), and is called with (sums, counts)"]),
]


@pytest.mark.parametrize(("function", "passes", "words"), TOKEN_MEANS)
def test_a_wrong_loss_per_token_is_named(function: Any, passes: int, words: list[str]) -> None:
    verdict = check.token_mean(function)
    assert sum(ok for _, ok in verdict.checks) == passes, verdict
    for each in words:
        assert each in verdict.sentence, verdict.sentence


Matmul = Callable[[int, int, int], Any]

INTENSITIES: list[tuple[Matmul, list[str]]] = [
    (lambda b, d, s: b * d * d / (s * (2 * b * d + d * d)), ["gives 0.2424", "a multiply-add is two FLOP"]),
    (lambda b, d, s: 2 * b * d * d / (2 * b * d + d * d), ["gives 1.939, and 0.4848 is right: itemsize is missing"]),
    (lambda b, d, s: 2 * b * d * d / (s * (b * d + d * d)), ["one of the two b × d matrices, input or output"]),
    (lambda b, d, s: 2 * b * d * d / (s * 2 * b * d), ["gives 16", "the d × d weights were not counted"]),
    (lambda b, d, s: 2 * b * d * d / (s * d * d), ["only the d × d weights were counted"]),
    (lambda b, d, s: 2 * b * d * d / (8 * s * (2 * b * d + d * d)), ["bits were counted, not bytes"]),
    (lambda b, d, s: s * (2 * b * d + d * d) / (2 * b * d * d), ["gives 2.062", "upside down, byte per FLOP"]),
    (
        lambda b, d, s: b * d * d / (2 * b * d + d * d),
        ["a multiply-add is two FLOP and was counted as one; itemsize is missing"],
    ),
    (lambda b, d, s: b + 0.5, ["none of the usual slips"]),
]


@pytest.mark.parametrize(("function", "words"), INTENSITIES)
def test_a_wrong_intensity_is_named(function: Matmul, words: list[str]) -> None:
    verdict = check.intensity(function)
    assert not verdict.passed
    for each in words:
        assert each in verdict.sentence, verdict.sentence


INTENSITY_RIGHT: list[Matmul] = [
    lambda b, d, itemsize: 2 * b * d**2 / (itemsize * (2 * b * d + d**2)),
    lambda b, d, itemsize: 2 / itemsize / (2 / d + 1 / b),
    lambda b, d, itemsize: torch.tensor(2.0 * b * d) / (itemsize * (b + b + d)),
]


@pytest.mark.parametrize("function", INTENSITY_RIGHT)
def test_the_right_intensity_however_it_is_written(function: Matmul) -> None:
    assert check.intensity(function).passed


def test_the_right_intensity_is_the_roofline_labs() -> None:
    assert INTENSITY.right(1, 64, 4) == pytest.approx(2 * 64**2 / (4 * (2 * 64 + 64**2)))


WEIGHT_RIGHT: list[Any] = [
    lambda counts, m: sum(counts) / len(counts) / counts[m],
    lambda counts, m: np.mean(counts) / counts[m],
    lambda counts, m: token_weights(counts, "mean-of-means")[m],
]


@pytest.mark.parametrize("function", WEIGHT_RIGHT)
def test_the_weight_of_a_token_however_it_is_written(function: Any) -> None:
    verdict = check.token_weight(function)
    assert verdict.passed and len(verdict.checks) == 5, verdict


WEIGHT_WRONG: list[tuple[Any, list[str]]] = [
    (lambda n, m: 1 / (len(n) * n[m]), ["gives 0.5, and 2 is right: 1/(K·n_m) is what the token weighs, and N times"]),
    (lambda n, m: sum(n) / n[m], ["gives 4, and 2 is right", "nobody divides by K (sum-of-means)"]),
    (lambda n, m: n[m] / sum(n), ["gives 0.25, and 2 is right", "the share that the microbatch should have"]),
    (lambda n, m: 1 / len(n), ["the share that each microbatch gets, 1/K"]),
    (lambda n, m: sum(n) / len(n), ["what a microbatch holds on average, and it is still to be divided by n_m"]),
    (lambda n, m: len(n) * n[m] / sum(n), ["gives 0.5, and 2", "upside down: tokens in short company weigh more"]),
    (lambda n, m: 1, ["gives 1, and 2 is right: that is 1 for every token"]),
    (lambda n, m: 1 / sum(n), ["the right weight 1/N itself"]),
    (lambda n, m: 1 / n[m], ["the weight inside the microbatch's own mean"]),
    (lambda n, m: max(n) / n[m], ["gives 3, and 2", "the longest microbatch stands for N / K"]),
    (lambda n, m: sum(n) // (len(n) * n[m]), ["m = 0 your function gives 0, and 0.6667", "// drops the fraction"]),
    (lambda n, m: 7.0, ["none of the usual slips"]),
    (lambda n, m: n[m + 1], ["IndexError"]),
    (lambda n: n, ["Your function takes (n), and is called with (counts, m)"]),
]


@pytest.mark.parametrize(("function", "words"), WEIGHT_WRONG)
def test_a_wrong_weight_is_named(function: Any, words: list[str]) -> None:
    verdict = check.token_weight(function)
    assert not verdict.passed
    for each in words:
        assert each in verdict.sentence, verdict.sentence


TIME_RIGHT: list[Any] = [
    lambda flop, moved, bandwidth, ceiling: max(flop / ceiling, moved / bandwidth),
    lambda flop, moved, bandwidth, ceiling: flop / ceiling if flop / ceiling > moved / bandwidth else moved / bandwidth,
    lambda flop, moved, bandwidth, ceiling: (
        flop / attainable(flop / moved, bandwidth, ceiling) if flop else moved / bandwidth
    ),
]


@pytest.mark.parametrize("function", TIME_RIGHT)
def test_the_least_time_however_it_is_written(function: Any) -> None:
    verdict = check.matmul_time(function)
    assert verdict.passed and len(verdict.checks) == 5, verdict


TIME_WRONG: list[tuple[Any, list[str]]] = [
    (lambda f, m, B, C: f / C + m / B, ["gives 56, and 50 is right: that is the sum of both times, and at best one"]),
    (lambda f, m, B, C: min(f / C, m / B), ["gives 6, and 50 is right: that is the shorter of the two"]),
    (lambda f, m, B, C: f / C, ["gives 6, and 50 is right: that is the time of the arithmetic alone"]),
    (lambda f, m, B, C: m / B, ["gives 50, and 300 is right: that is the time of the memory alone"]),
    (lambda f, m, B, C: min(f / m * B, C), ["gives 120, and 50 is right: that is the rate in GFLOP/s"]),
    (lambda f, m, B, C: max(f / C, m / B) / 1e3, ["gives 0.05, and 50", "microseconds: FLOP over GFLOP/s is nano"]),
    (lambda f, m, B, C: max(f / C, m / B) * 1e-9, ["that is seconds: FLOP over GFLOP/s is nanoseconds"]),
    (lambda f, m, B, C: max(f / B, m / C), ["gives 75, and 50 is right: bandwidth and ceiling are swapped"]),
    (lambda f, m, B, C: max(f / 2 / C, m / B), ["gives 150, and 300 is right", "counted as one FLOP, and flop holds"]),
    (lambda f, m, B, C: f / m, ["none of the usual slips"]),
    (lambda f, m, B, C: f / min(f / m * B, C), ["In the check “no arithmetic at all”", "ZeroDivisionError"]),
    (lambda f, m: f, ["Your function takes (f, m), and is called with (flop, moved, bandwidth, ceiling)"]),
]


@pytest.mark.parametrize(("function", "words"), TIME_WRONG)
def test_a_wrong_least_time_is_named(function: Any, words: list[str]) -> None:
    verdict = check.matmul_time(function)
    assert not verdict.passed
    for each in words:
        assert each in verdict.sentence, verdict.sentence


@pytest.mark.parametrize("exercise", [TOKEN_MEAN, TOKEN_WEIGHT, INTENSITY, MATMUL_TIME])
def test_no_two_wrong_formulas_give_the_same_numbers(exercise: Exercise) -> None:
    rows = {words: [wrong(*case) for case in exercise.cases.values()] for words, wrong in exercise.wrong.items()}
    for one, other in itertools.combinations(rows, 2):
        if one.count(";") != other.count(";"):
            continue  # the simpler one is told
        assert rows[one] != pytest.approx(rows[other], rel=1e-6), (one, other)
