"""The exercises of the batch lab: the global batch of a plan, and a plan for a batch that is wanted."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from labkit.batch import cuts
from labkit.exercise import sandbox
from labkit.exercise.formula import Exercise
from labkit.exercise.verdict import Function, Verdict, aside, exercise, refusal, within

# The global batch: a formula.

EVERY = "every device was counted as a replica, but the tp × pp × cp devices of one share their sequences"
PARALLEL: dict[str, Callable[[int, int, int], float]] = {
    "": lambda tp, pp, cp: tp * pp * cp,
    EVERY: lambda tp, pp, cp: 1,
    "the tensor-parallel ranks were counted as replicas": lambda tp, pp, cp: pp * cp,
    "the pipeline-parallel ranks were counted as replicas": lambda tp, pp, cp: tp * cp,
    "the context-parallel ranks were counted as replicas": lambda tp, pp, cp: tp * pp,
    "only tp divides the world, pp and cp do too": lambda tp, pp, cp: tp,
    "only pp divides the world, tp and cp do too": lambda tp, pp, cp: pp,
    "only cp divides the world, tp and pp do too": lambda tp, pp, cp: cp,
    "world is divided by the sum of tp, pp and cp, not by their product": lambda tp, pp, cp: tp + pp + cp,
    "tp, pp and cp multiply the batch, and shall divide the world": lambda tp, pp, cp: 1 / (tp * pp * cp),
}
WORLD = {"": 1, "world is missing, so it is the batch of one replica": 0}
MICROBATCH = {"": 1, "microbatch is missing": 0}
STEPS = {
    "": 1,
    "the accumulation steps are missing": 0,
    "the accumulation steps divide, and every one of them adds sequences": -1,
}


def _batches() -> dict[str, Callable[..., float]]:
    """Every combination of slips, the fewest first; the first is none."""
    whole = itertools.product(MICROBATCH, WORLD, PARALLEL, STEPS)
    slips = [each for each in whole if not (each[1] and each[2])]
    slips.sort(key=lambda each: sum(map(bool, each)))
    return {"; ".join(filter(None, each)): functools.partial(_batch, each) for each in slips}


def _batch(
    slips: tuple[str, str, str, str], microbatch: int, world: int, tp: int, pp: int, cp: int, accumulation: int
) -> float:
    b, there, parallel, K = slips
    replicas = world / PARALLEL[parallel](tp, pp, cp)
    return float(microbatch ** MICROBATCH[b] * replicas ** WORLD[there] * float(accumulation) ** STEPS[K])


GLOBAL_BATCH = Exercise(
    ("microbatch", "world", "tp", "pp", "cp", "accumulation"),
    {
        "one device": (8, 1, 1, 1, 1, 1),
        "data-parallel replicas alone": (4, 8, 1, 1, 1, 8),
        "tensor and pipeline parallel": (8, 64, 4, 2, 1, 4),
        "all three kinds of ranks": (2, 210, 5, 3, 7, 11),
        "one replica of many devices": (16, 24, 2, 3, 4, 5),
    },
    _batches()[""],
    _batches(),
)


@exercise
def global_batch(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `global_batch(microbatch, world, tp, pp, cp, accumulation)`: sequences of one optimizer step.

    >>> print(global_batch(lambda microbatch, world, tp, pp, cp, accumulation: microbatch * world * accumulation))
    2 of 5 checks
    For microbatch = 8, world = 64, tp = 4, pp = 2, cp = 1, accumulation = 4
    your function gives 2048, and 256 is right: every device was counted as
    a replica, but the tp × pp × cp devices of one share their sequences.
      ✓ one device
      ✓ data-parallel replicas alone
      ✗ tensor and pipeline parallel
      ✗ all three kinds of ranks
      ✗ one replica of many devices

    b × world / (tp × pp × cp) × K. Source: as `labkit.batch.plans`.
    """
    return GLOBAL_BATCH.judge(function, seconds)


# A plan for a batch that is wanted.


class Case(NamedTuple):
    """A batch that is wanted, and what the memory allows."""

    tokens: int
    sequence_length: int
    replicas: int
    largest: int


CASES = {
    "the largest microbatch divides": Case(16_777_216, 4096, 128, 4),
    "the largest microbatch does not divide": Case(16_777_216, 4096, 128, 6),
    "a prime number of sequences": Case(13 * 1024 * 8, 1024, 8, 12),
    "more memory than the batch needs": Case(5 * 512 * 16, 512, 16, 48),
    "one replica": Case(30 * 2048, 2048, 1, 7),
    "no plan gives it exactly": Case(1_000_000, 4096, 8, 8),
}


@exercise
def plan(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `plan(tokens, sequence_length, replicas, largest)`: the pair (microbatch, accumulation steps).

    >>> print(plan(lambda tokens, S, D, largest: (largest, tokens // (S * D * largest))).sentence)
    In the check “the largest microbatch does not divide” your (6, 5) makes 15,728,640 tokens, 1,048,576 fewer than \
wanted: the remainder is dropped. Take a microbatch that divides the 32 sequences of one replica.

    Right is exactly the wanted tokens, a microbatch of at most `largest`, and of those the fewest accumulation steps;
    a ValueError where no plan gives the tokens exactly. `seconds` is for all cases together.
    """
    if why := refusal(function, *Case._fields):
        return Verdict(False, tuple((check, False) for check in CASES), why, "")
    outcomes: list[sandbox.Outcome] = []
    for case in CASES.values():
        remaining = seconds - sum(outcome.seconds for outcome in outcomes)
        outcomes.append(sandbox.run(function, *case, seconds=max(remaining, 0.01)))
    faults = [_fault(case, outcome) for case, outcome in zip(CASES.values(), outcomes, strict=True)]
    checks = tuple((check, not fault) for check, fault in zip(CASES, faults, strict=True))
    wrong = [at for at, fault in enumerate(faults) if fault]
    at = wrong[0] if wrong else 0
    sentence = (
        within(list(CASES)[at], faults[at])
        if wrong
        else "Right in all cases: exact where it can be, refused where not."
    )
    return Verdict(not wrong, checks, sentence + aside(outcomes[at]), outcomes[at].printed)


def _fault(case: Case, outcome: sandbox.Outcome) -> str:
    """What is wrong with an answer, or nothing."""
    plans = cuts(
        tokens=case.tokens,
        largest_microbatch=case.largest,
        replicas=case.replicas,
        sequence_length=case.sequence_length,
    )
    exact = [(way.microbatch, way.accumulation) for way in plans.exact]
    if any(f" raises {error}" in outcome.error for error in ("ValueError", "LabError")):
        return f"{outcome.error.removesuffix('.')}, and {exact[0]} is a plan." if exact else ""
    if outcome.error:
        return outcome.error
    pair = _pair(outcome.value)
    if pair is None:
        what = textwrap.shorten(repr(outcome.value), 60, placeholder=" …")
        ask = (
            "a ValueError was to be raised" if not exact else "two whole numbers, (microbatch, accumulation), are asked"
        )
        return f"Your function returns {what}, and {ask}."
    return _wrong(case, *pair, exact)


def _pair(value: object) -> tuple[int, int] | None:
    """The two whole numbers of an answer."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    b, K = (float(each) if isinstance(each, numbers.Real) else math.nan for each in value)
    return (int(b), int(K)) if b.is_integer() and K.is_integer() else None


def _wrong(case: Case, b: int, K: int, exact: list[tuple[int, int]]) -> str:
    """What is wrong with a pair, or nothing."""
    if (K, b) in exact[:1] and b != K:
        return f"Your ({b}, {K}) is the right pair the wrong way round: the microbatch comes first."
    if b < 1 or K < 1:
        share = case.tokens // (case.sequence_length * case.replicas)
        return (
            f"Your ({b}, {K}) makes no tokens: one replica has {share} sequences to do, and both numbers are 1 or more."
        )
    if b > case.largest:
        return f"Your ({b}, {K}) takes {b} sequences at once, and the memory of one replica holds {case.largest}."
    if (b, K) in exact:
        return "" if (b, K) == exact[0] else f"Your ({b}, {K}) is exact, but {exact[0]} fits too, with fewer passes."
    tokens = case.sequence_length * b * case.replicas * K
    why = _why(case, b, K, bool(exact))
    return f"Your ({b}, {K}) makes {tokens:,} tokens, {_difference(tokens - case.tokens)}: {why}"


def _difference(tokens: int) -> str:
    return f"{abs(tokens):,} {'more' if tokens > 0 else 'fewer'} than wanted"


def _why(case: Case, b: int, K: int, possible: bool) -> str:
    """How one comes to such a pair, and the fix."""
    S, D = case.sequence_length, case.replicas
    forgotten = {
        S: f"the {D} replicas are forgotten, all of them do it at once. Divide by them too.",
        D: f"tokens were taken for sequences. Divide by the {S:,} tokens of a sequence too.",
        1: f"replicas and sequence length are forgotten. Divide by {D} and by {S:,} too.",
    }
    for each, words in forgotten.items():
        if each != S * D and case.tokens // (each * b) == K:
            return words
    if not possible:
        return f"no plan is exact here, since {S * D:,} does not divide {case.tokens:,}. Say so with a ValueError."
    share = case.tokens // (S * D)
    what = {share // b: "the remainder is dropped", -(-share // b): "it is rounded up"}.get(
        K, "these are other numbers"
    )
    return f"{what}. Take a microbatch that divides the {share} sequences of one replica."
