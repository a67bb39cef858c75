"""Noise scales and scaled learning rates as learners write them, right and wrong, and the sentence that each gets."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from labkit import check
from labkit.noise.exercises import NOISE_SCALE, SCALED_RATE

torch.set_num_threads(1)


def written_out(small_norm2: float, small: int, big_norm2: float, big: int) -> float:
    trace = (small_norm2 - big_norm2) / (1 / small - 1 / big)
    gradient = big_norm2 - trace / big
    return trace / gradient


def by_elimination(s2: float, b: int, B2: float, B: int) -> Any:
    rows = torch.tensor([[1.0, 1 / b], [1.0, 1 / B]], dtype=torch.float64)
    G, trace = torch.linalg.solve(rows, torch.tensor([s2, B2], dtype=torch.float64))
    return trace / G


SCALE_RIGHT: list[Any] = [
    written_out,
    by_elimination,
    lambda s2, b, B2, B: b * B * (s2 - B2) / (B * B2 - b * s2),
]


@pytest.mark.parametrize("function", SCALE_RIGHT)
def test_a_noise_scale_however_it_is_written(function: Any) -> None:
    verdict = check.noise_scale(function)
    assert verdict.passed and verdict.sentence == "Right in all cases.", verdict


def trace(s2: float, b: int, B2: float, B: int) -> float:
    return (s2 - B2) / (1 / b - 1 / B)


def norm2(s2: float, b: int, B2: float, B: int) -> float:
    return (B * B2 - b * s2) / (B - b)


SCALE_WRONG: list[tuple[Any, list[str]]] = [
    (
        lambda *a: trace(*a) / a[2],
        ["gives 8, and 16 is right", "‖G‖² is not big_norm2, take tr Σ / big out of it first"],
    ),
    (lambda s2, b, B2, B: b * (s2 - B2) / B2, ["gives 6, and 16", "the noise between the two is not all of it"]),
    (lambda *a: trace(*a) / a[0], ["gives 3.2, and 16", "‖G‖² is not small_norm2, most of which is noise"]),
    (lambda s2, b, B2, B: written_out(s2, B, B2, b), ["small and big are swapped: the small batch has the larger"]),
    (lambda *a: (a[0] - a[2]) / norm2(*a), ["gives 3, and 16", "tr Σ · (1/small − 1/big): divide by that"]),
    (lambda *a: a[1] * (a[0] - a[2]) / norm2(*a), ["gives 12, and 16", "divided by 1/small alone"]),
    (
        lambda s2, b, B2, B: (s2 - B2) / (1 / math.sqrt(b) - 1 / math.sqrt(B)) / norm2(s2, b, B2, B),
        ["gives 12, and 16", "noise falls with b and not with √b"],
    ),
    (trace, ["For small_norm2 = 43.0", "tr Σ alone, and it is still to be divided by ‖G‖²"]),
    (norm2, ["gives 1, and 16", "that is ‖G‖² alone"]),
    (lambda *a: norm2(*a) / trace(*a), ["gives 0.0625, and 16", "it is upside down"]),
    (lambda *a: math.sqrt(written_out(*a)), ["gives 4, and 16", "the root was taken"]),
    (lambda s2, b, B2, B: written_out(s2**2, b, B2**2, B), ["they are squares already"]),
    (lambda *a: trace(*a) / (a[3] * a[2] - a[1] * a[0]), ["gives 1.333, and 16", "the denominator is missing"]),
    (
        lambda s2, b, B2, B: trace(s2, b, B2, B) / ((B * s2 - b * B2) / (B - b)),
        ["gives 2.667, and 16", "in ‖G‖² the batch sizes are swapped"],
    ),
    (lambda s2, b, B2, B: s2 / B2, ["gives 2.5, and 16", "the ratio of the norms, and no batch size"]),
    (lambda s2, b, B2, B: s2 / B2 - 1, ["gives 1.5, and 16", "how far the norms lie apart"]),
    (lambda *a: 7.0, ["gives 7, and 16", "none of the usual slips"]),
    (lambda *a: None, ["Your function returns None, which is no finite number"]),
    (lambda s2, b, B2, B: s2 / 0, ["ZeroDivisionError"]),
    (lambda s2, b: s2, ["Your function takes (s2, b), and is called with (small_norm2, small, big_norm2, big)"]),
    (16.0, ["This is a float and no function"]),
]


@pytest.mark.parametrize(("function", "words"), SCALE_WRONG)
def test_a_wrong_noise_scale_is_named(function: Any, words: list[str]) -> None:
    verdict = check.noise_scale(function)
    assert not verdict.passed
    for each in words:
        assert each in verdict.sentence, verdict.sentence


def factor(batch: int, base: int, rule: str) -> float:
    return batch / base if rule == "linear" else math.sqrt(batch / base)


def with_branches(rate: float, base: int, batch: int, rule: str) -> float:
    if rule == "linear":
        return rate * batch / base
    return rate * (batch / base) ** 0.5


RATE_RIGHT: list[Any] = [
    with_branches,
    lambda rate, base, batch, rule: torch.tensor(rate) * (batch / base) ** {"linear": 1, "sqrt": 0.5}[rule],
    lambda rate, base, batch, rule: rate * math.exp(math.log(batch / base) / (1 + (rule == "sqrt"))),
]


@pytest.mark.parametrize("function", RATE_RIGHT)
def test_a_scaled_rate_however_it_is_written(function: Any) -> None:
    verdict = check.scaled_rate(function)
    assert verdict.passed and len(verdict.checks) == 6, verdict


RATE_WRONG: list[tuple[Any, list[str]]] = [
    (lambda r, b, B, rule: r * B / b, ["rule = sqrt your function gives 0.012, and 0.006", "linear whatever the rule"]),
    (lambda r, b, B, rule: r * math.sqrt(B / b), ["gives 0.2, and 0.4 is right: it is the square root whatever"]),
    (lambda r, b, B, rule: r * factor(B, b, "linear" if rule == "sqrt" else "sqrt"), ["the two rules are swapped"]),
    (lambda r, b, B, rule: r * factor(b, B, rule), ["gives 0.025, and 0.4", "it is upside down"]),
    (
        lambda r, b, B, rule: r * (B / b if rule == "linear" else math.sqrt(b / B)),
        ["gives 0.0015, and 0.006", "upside down for “sqrt” alone"],
    ),
    (lambda r, b, B, rule: r * factor(B, 1, rule), ["gives 102.4, and 0.4", "base is missing"]),
    (lambda r, b, B, rule: r / factor(b, 1, rule), ["batch is missing"]),
    (lambda r, b, B, rule: factor(B, b, rule), ["gives 4, and 0.4", "rate is missing, it is the factor alone"]),
    (
        lambda r, b, B, rule: r * B / b if rule == "linear" else math.sqrt(r * B / b),
        ["the root was taken of the learning rate too"],
    ),
    (
        lambda r, b, B, rule: r * B / b if rule == "linear" else r * math.sqrt(B) / b,
        ["the root was taken of batch alone"],
    ),
    (lambda r, b, B, rule: r * (B / b) ** (1 if rule == "linear" else 2), ["gives 0.048", "the factor was squared"]),
    (lambda r, b, B, rule: max(r, r * factor(B, b, rule)), ["gives 0.4, and 0.05", "it never becomes smaller"]),
    (lambda r, b, B, rule: r * factor(B // b, 1, rule), ["gives 0, and 0.05", "rounded down to a whole number"]),
    (lambda r, b, B, rule: r, ["gives 0.1, and 0.4 is right: the learning rate is left as it was"]),
    (lambda r, b, B, rule: r * (1 + B - b), ["the difference of the batches was taken"]),
    (lambda r, b, B, rule: r + 1, ["none of the usual slips"]),
    (lambda r, b, B, rule: "0.4", ["Your function returns a str, which is no finite number"]),
    (lambda r, b, B, rule: {"linear": r * B / b}[rule], ["KeyError"]),
    (lambda r: r, ["is called with (rate, base, batch, rule)"]),
]


@pytest.mark.parametrize(("function", "words"), RATE_WRONG)
def test_a_wrong_rate_is_named(function: Any, words: list[str]) -> None:
    verdict = check.scaled_rate(function)
    assert not verdict.passed
    for each in words:
        assert each in verdict.sentence, verdict.sentence


@pytest.mark.parametrize("exercise", [NOISE_SCALE, SCALED_RATE])
def test_no_two_wrong_formulas_give_the_same_numbers(exercise: Any) -> None:
    rows = {words: [wrong(*case) for case in exercise.cases.values()] for words, wrong in exercise.wrong.items()}
    for one, other in itertools.combinations(rows, 2):
        assert rows[one] != pytest.approx(rows[other], rel=1e-6), (one, other)


@pytest.mark.parametrize("exercise", [NOISE_SCALE, SCALED_RATE])
def test_an_endless_function_is_stopped(exercise: Any) -> None:
    def endless(*given: Any) -> None:
        while True:
            pass

    assert "was still running" in exercise.judge(endless, 0.2).sentence
