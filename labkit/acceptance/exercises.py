"""The exercise of the acceptance test: from the numbers of a record to adopt, reject or cannot tell."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.acceptance.record import ADOPT, REJECT, UNSURE
from labkit.decision import decide
from labkit.exercise import sandbox
from labkit.exercise.verdict import Function, Verdict, aside, exercise, refusal

NAMES = ("base", "candidate", "delta", "tolerance", "margin")
WORDS = (ADOPT, REJECT, UNSURE)
STEADY, FASTER = (100.0, 101.0, 99.0), (120.0, 119.0, 121.0)


@dataclass(frozen=True)
class Case:
    """The numbers of one record, and why each wrong word is wrong."""

    name: str
    why: str
    tokens: tuple[int, int] = (60, 60)  # of the base, of the candidate
    updates: tuple[int, int] = (8, 8)
    skipped: tuple[int, int] = (0, 0)
    before: Sequence[float] = STEADY
    after: Sequence[float] = FASTER
    delta: float = 3e-16
    tolerance: float = 1e-13
    margin: float = 0.03
    other: str = ""  # where "cannot tell" or its opposite needs words of its own

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the function is called with."""
        rates = self.before, self.after
        base, candidate = (
            {
                "tokens": self.tokens[at],
                "updates": self.updates[at],
                "skipped": self.skipped[at],
                "throughputs": list(rates[at]),
            }
            for at in range(2)
        )
        return base, candidate, self.delta, self.tolerance, self.margin

    @property
    def right(self) -> str:
        """The word."""
        same = self.tokens[0] == self.tokens[1] and self.updates[0] == self.updates[1]
        if not (same and self.delta <= self.tolerance and self.skipped[1] <= self.skipped[0]):
            return REJECT
        verdict = decide(self.before, self.after, self.margin).verdict
        return {"faster": ADOPT, "not faster": REJECT}.get(verdict, UNSURE)


NOISY = (100.0, 140.0, 80.0)
CASES = (
    Case("equal and faster", "nothing is wrong with it, and its slowest run beats the fastest of the base by 18 %"),
    Case(
        "another update",
        "the parameters are 0.3 % apart, and rounding explains 1e-13. The speed of another update is no reason",
        delta=3e-3,
        other="the parameters are 0.3 % apart, and rounding explains 1e-13. Equality comes first, whatever the noise",
    ),
    Case("fewer tokens", "it trains on 51 of the 60 valid tokens, a dropped tail", tokens=(60, 51)),
    Case("more tokens", "it trains on 70 valid tokens where the base has 60: a larger batch", tokens=(60, 70)),
    Case("another cadence", "it makes 16 updates where the base makes 8", updates=(8, 16)),
    Case("more skipped updates", "it skipped 2 updates and the base none", skipped=(0, 2)),
    Case(
        "fewer skipped updates",
        "it skipped 1 update and the base 2: only more than the base's count against it",
        skipped=(2, 1),
    ),
    Case(
        "slower",
        "it is 10 % slower",
        after=(90.0, 91.0, 89.5),
        other="it is 10 % slower in every run, and that can be told",
    ),
    Case(
        "faster by less than the margin",
        "it is 1 % faster, and 3 % is the margin that was declared",
        after=(101.0, 101.5, 100.5),
        before=(100.0, 100.1, 99.9),
        other="its best run is 1.6 % faster, so the gain is below the margin of 3 %, and that can be told",
    ),
    Case(
        "a margin of 25 %",
        "it is 20 % faster, and 25 % is the margin that was declared: use the one you are given",
        margin=0.25,
        other="its best run is 22 % faster, so the gain is below the margin of 25 %, and that can be told",
    ),
    Case(
        "one lucky run",
        "one run of 160 pulls the mean up, and the median of the three is that of the base",
        after=(100.0, 99.0, 160.0),
        other="the runs disagree, from 99 to 160: they do not show that it is no faster",
    ),
    Case(
        "noise",
        "the runs overlap, so it may be faster by chance: “cannot tell” is no “adopt”",
        before=NOISY,
        after=(130.0, 150.0, 90.0),
        other="the runs overlap, so it may well be faster: “cannot tell” is no “reject”, more runs would tell",
    ),
    Case(
        "another update in noise",
        "the parameters are 0.3 % apart: that decides, and no speed can mend it",
        delta=3e-3,
        before=NOISY,
        after=(130.0, 150.0, 90.0),
        other="the parameters are 0.3 % apart. That is told already: ask for equality before speed",
    ),
    Case(
        "a difference as large as the tolerance",
        "the parameters are 1e-13 apart, and rounding explains 1e-13: that is still explained",
        delta=1e-13,
    ),
    Case(
        "a difference that is not a number",
        "the parameters are NaN apart, and NaN > tolerance is False: ask whether delta <= tolerance",
        delta=math.nan,
    ),
)


@exercise
def acceptance(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `verdict(base, candidate, delta, tolerance, margin)`: "adopt", "reject" or "cannot tell".

    >>> acceptance(lambda base, candidate, delta, tolerance, margin: "adopt").sentence
    'In “another update” your function says “adopt”, and “reject” is right: the parameters are 0.3 % apart, and \
rounding explains 1e-13. The speed of another update is no reason.'

    base, candidate: dicts of "tokens" (valid, of one update), "updates", "skipped" and "throughputs" (valid tokens/s of
    three runs or more). delta: how far the parameters are apart after one update, relative; tolerance: what rounding
    explains of it. margin: a share. `labkit.decision.decide` may be used, and is what the speed is judged by.
    """
    if why := refusal(function, *NAMES):
        return Verdict(False, tuple((case.name, False) for case in CASES), why, "")
    outcomes: list[sandbox.Outcome] = []
    for case in CASES:
        remaining = seconds - sum(outcome.seconds for outcome in outcomes)
        outcomes.append(sandbox.run(function, *copy.deepcopy(case.arguments), seconds=max(remaining, 0.01)))
    faults = [_fault(case, outcome) for case, outcome in zip(CASES, outcomes, strict=True)]
    outcome = outcomes[next((at for at, words in enumerate(faults) if words), 0)]
    sentence = next(filter(None, faults), "Right in all cases.")
    checks = tuple((case.name, not words) for case, words in zip(CASES, faults, strict=True))
    return Verdict(not any(faults), checks, sentence + aside(outcome), outcome.printed)


def _fault(case: Case, outcome: sandbox.Outcome) -> str:
    """What is wrong with one answer; nothing where it is right."""
    if outcome.error:
        return f"In “{case.name}”: {outcome.error}"
    answer = outcome.value
    if not isinstance(answer, str) or answer not in WORDS:
        allowed = ", ".join(f"“{each}”" for each in WORDS)
        return f"In “{case.name}” your function returns {answer!r}, which is none of {allowed}."
    if answer == case.right:
        return ""
    opposite = case.other and answer in ({REJECT} if case.right == UNSURE else {UNSURE})
    why = case.other if opposite else case.why
    return f"In “{case.name}” your function says “{answer}”, and “{case.right}” is right: {why}."
