"""The exercises of the noise lab: the noise scale from two batch sizes, and a learning rate that is scaled."""

from __future__ import annotations

import math
from collections.abc import Callable

from labkit.exercise.formula import Exercise
from labkit.exercise.verdict import Function, Verdict, exercise
from labkit.noise import estimate


def _scale(s2: float, b: int, B2: float, B: int) -> float:
    return _trace(s2, b, B2, B) / _norm(s2, b, B2, B)


def _trace(s2: float, b: int, B2: float, B: int) -> float:
    return estimate(s2, b, B2, B).trace


def _norm(s2: float, b: int, B2: float, B: int) -> float:
    return estimate(s2, b, B2, B).squared_norm


BIASED = "‖G‖² is not big_norm2, take tr Σ / big out of it first"
SCALES: dict[str, Callable[[float, int, float, int], float]] = {
    "": _scale,
    BIASED: lambda s2, b, B2, B: _trace(s2, b, B2, B) / B2,
    f"{BIASED}, and the noise between the two is not all of it": lambda s2, b, B2, B: (s2 - B2) * b / B2,
    "tr Σ / big is in big_norm2 already: take it out, do not add it": lambda s2, b, B2, B: (
        _trace(s2, b, B2, B) / (B2 + _trace(s2, b, B2, B) / B)
    ),
    "in big_norm2 is the noise of the large batch, tr Σ / big, and not that of the small one": lambda s2, b, B2, B: (
        _trace(s2, b, B2, B) / (B2 - _trace(s2, b, B2, B) / b)
    ),
    "‖G‖² is not small_norm2, most of which is noise": lambda s2, b, B2, B: _trace(s2, b, B2, B) / s2,
    "small and big are swapped: the small batch has the larger norm": lambda s2, b, B2, B: _scale(s2, B, B2, b),
    "the excess of small_norm2 is tr Σ · (1/small − 1/big): divide by that": lambda s2, b, B2, B: (
        (s2 - B2) / _norm(s2, b, B2, B)
    ),
    "the excess is divided by 1/small alone, and 1/big of the noise is in big_norm2 too": lambda s2, b, B2, B: (
        b * (s2 - B2) / _norm(s2, b, B2, B)
    ),
    "noise falls with b and not with √b": lambda s2, b, B2, B: (s2 - B2) / (b**-0.5 - B**-0.5) / _norm(s2, b, B2, B),
    "that is tr Σ alone, and it is still to be divided by ‖G‖²": _trace,
    "that is ‖G‖² alone": _norm,
    "it is upside down, ‖G‖² / tr Σ": lambda s2, b, B2, B: 1 / _scale(s2, b, B2, B),
    "the root was taken, and the noise scale is a ratio of squares": lambda s2, b, B2, B: math.sqrt(
        _scale(s2, b, B2, B)
    ),
    "the norms were squared, and they are squares already": lambda s2, b, B2, B: _scale(s2**2, b, B2**2, B),
    "‖G‖² is (big · big_norm2 − small · small_norm2) / (big − small), and the denominator is missing": (
        lambda s2, b, B2, B: _trace(s2, b, B2, B) / (B * B2 - b * s2)
    ),
    "in ‖G‖² the batch sizes are swapped: it is big · big_norm2 − small · small_norm2": lambda s2, b, B2, B: (
        _trace(s2, b, B2, B) * (B - b) / (B * s2 - b * B2)
    ),
    "that is the ratio of the norms, and no batch size is in it": lambda s2, b, B2, B: s2 / B2,
    "that is how far the norms lie apart over the large one, and no batch size is in it": lambda s2, b, B2, B: (
        s2 / B2 - 1
    ),
}

NOISE_SCALE = Exercise(
    ("small_norm2", "small", "big_norm2", "big"),
    {
        "noise and gradient": (5.0, 4, 2.0, 16),
        "a batch of one": (43.0, 1, 4.3125, 64),
        "hardly any noise": (9.5, 2, 9.03125, 32),
        "noise that drowns the gradient": (12.625, 8, 3.25, 32),
        "sizes that do not divide each other": (2.5, 10, 1.5, 25),
    },
    _scale,
    SCALES,
)


@exercise
def noise_scale(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `noise_scale(small_norm2, small, big_norm2, big)`: tr Σ / ‖G‖² from mean squared norms at two batch sizes.

    >>> print(noise_scale(lambda s2, small, b2, big: (s2 - b2) / (1 / small - 1 / big) / b2))
    0 of 5 checks
    For small_norm2 = 5.0, small = 4, big_norm2 = 2.0, big = 16 your
    function gives 8, and 16 is right: ‖G‖² is not big_norm2, take tr Σ /
    big out of it first.
      ✗ noise and gradient
      ✗ a batch of one
      ✗ hardly any noise
      ✗ noise that drowns the gradient
      ✗ sizes that do not divide each other

    E‖g_b‖² = ‖G‖² + tr Σ / b at both sizes. Source: as `labkit.noise.estimate`.
    """
    return NOISE_SCALE.judge(function, seconds)


# A learning rate for another batch.


def _rate(rate: float, base: int, batch: int, rule: str) -> float:
    return rate * math.pow(batch / base, 1.0 if rule == "linear" else 0.5)


def _other(rule: str) -> str:
    return "sqrt" if rule == "linear" else "linear"


RATES: dict[str, Callable[[float, int, int, str], float]] = {
    "": _rate,
    "it is linear whatever the rule": lambda r, b, B, rule: r * B / b,
    "it is the square root whatever the rule": lambda r, b, B, rule: r * math.sqrt(B / b),
    "the two rules are swapped": lambda r, b, B, rule: _rate(r, b, B, _other(rule)),
    "it is upside down: a larger batch takes a larger learning rate": lambda r, b, B, rule: _rate(r, B, b, rule),
    "upside down for “sqrt” alone": lambda r, b, B, rule: (
        _rate(r, b, B, rule) if rule == "linear" else _rate(r, B, b, rule)
    ),
    "base is missing: it is batch / base that counts": lambda r, b, B, rule: _rate(r, 1, B, rule),
    "batch is missing: it is batch / base that counts": lambda r, b, B, rule: _rate(r, b, 1, rule),
    "rate is missing, it is the factor alone": lambda r, b, B, rule: _rate(1.0, b, B, rule),
    "the root was taken of the learning rate too": lambda r, b, B, rule: (
        r * B / b if rule == "linear" else math.sqrt(r * B / b)
    ),
    "for “sqrt” the root was taken of batch alone": lambda r, b, B, rule: (
        r * B / b if rule == "linear" else r * math.sqrt(B) / b
    ),
    "for “sqrt” the factor was squared": lambda r, b, B, rule: r * B / b if rule == "linear" else r * (B / b) ** 2,
    "it never becomes smaller, and for a smaller batch it has to": lambda r, b, B, rule: max(r, _rate(r, b, B, rule)),
    "batch / base was rounded down to a whole number": lambda r, b, B, rule: _rate(r, 1, B // b, rule),
    "the learning rate is left as it was": lambda r, b, B, rule: r,
    "the difference of the batches was taken, and not their ratio": lambda r, b, B, rule: r * (1 + B - b),
}

SCALED_RATE = Exercise(
    ("rate", "base", "batch", "rule"),
    {
        "linear, four times the batch": (0.1, 256, 1024, "linear"),
        "square root, four times the batch": (0.003, 64, 256, "sqrt"),
        "linear, a smaller batch": (0.4, 512, 64, "linear"),
        "square root, a smaller batch": (0.02, 96, 24, "sqrt"),
        "linear, a ratio that is no whole number": (0.05, 48, 120, "linear"),
        "the same batch": (0.7, 32, 32, "sqrt"),
    },
    _rate,
    RATES,
)


@exercise
def scaled_rate(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `scaled_rate(rate, base, batch, rule)`: the learning rate for `batch`, from one that suits `base`.

    >>> scaled_rate(lambda rate, base, batch, rule: rate * batch / base).sentence
    'For rate = 0.003, base = 64, batch = 256, rule = sqrt your function gives 0.012, and 0.006 is right: it is linear \
whatever the rule.'

    rule: "linear", rate × batch / base, or "sqrt", rate × √(batch / base).
    """
    return SCALED_RATE.judge(function, seconds)
