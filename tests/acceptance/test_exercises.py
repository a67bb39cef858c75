"""Verdicts as learners write them, right and wrong, and the sentence that each gets."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from labkit import check
from labkit.acceptance.exercises import CASES
from labkit.decision import decide

torch.set_num_threads(1)
WORDS = {"faster": "adopt", "not faster": "reject", "cannot tell": "cannot tell"}


def same(base: Any, candidate: Any) -> bool:
    return bool(base["tokens"] == candidate["tokens"] and base["updates"] == candidate["updates"])


def speed(base: Any, candidate: Any, margin: float) -> str:
    return WORDS[decide(base["throughputs"], candidate["throughputs"], margin).verdict]


def step_by_step(base: Any, candidate: Any, delta: float, tolerance: float, margin: float) -> str:
    for name in ("tokens", "updates"):
        if base[name] != candidate[name]:
            return "reject"
    if not delta <= tolerance:
        return "reject"
    if candidate["skipped"] > base["skipped"]:
        return "reject"
    found = decide(base["throughputs"], candidate["throughputs"], margin)
    if found.verdict == "faster":
        return "adopt"
    return "reject" if found.verdict == "not faster" else "cannot tell"


def by_hand(base: Any, candidate: Any, delta: float, tolerance: float, margin: float) -> str:
    """With three runs each the interval is from the least to the greatest ratio."""
    before, after = base["throughputs"], candidate["throughputs"]
    if not (same(base, candidate) and delta <= tolerance and candidate["skipped"] <= base["skipped"]):
        return "reject"
    if min(after) / max(before) > 1 + margin:
        return "adopt"
    return "reject" if max(after) / min(before) <= 1 + margin else "cannot tell"


def in_one_line(b: Any, c: Any, delta: float, tolerance: float, margin: float) -> str:
    right = (b["tokens"], b["updates"]) == (c["tokens"], c["updates"]) and delta <= tolerance
    return speed(b, c, margin) if right and c["skipped"] - b["skipped"] <= 0 else "reject"


@pytest.mark.parametrize("function", [step_by_step, by_hand, in_one_line])
def test_a_right_verdict_however_it_is_written(function: Any) -> None:
    found = check.acceptance(function)
    assert found.passed and found.sentence == "Right in all cases." and len(found.checks) == len(CASES), found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def but(**slip: Any) -> Any:
    """The right one with one slip: a check left out, or the speed told in another way."""

    def function(base: Any, candidate: Any, delta: float, tolerance: float, margin: float) -> str:
        tells = {
            "tokens": base["tokens"] == candidate["tokens"],
            "updates": base["updates"] == candidate["updates"],
            "delta": delta <= tolerance,
            "skipped": candidate["skipped"] <= base["skipped"],
        }
        tells |= {name: told(base, candidate, delta, tolerance) for name, told in slip.items() if name in tells}
        if not all(tells.values()):
            return "reject"
        told = slip.get("speed", speed)
        return str(told(base, candidate, margin))

    return function


def always(*_: Any) -> bool:
    return True


def by_means(base: Any, candidate: Any, margin: float) -> str:
    return "adopt" if mean(candidate["throughputs"]) > (1 + margin) * mean(base["throughputs"]) else "reject"


def by_medians(base: Any, candidate: Any, margin: float) -> str:
    before, after = (statistics.median(side["throughputs"]) for side in (base, candidate))
    return "adopt" if after > (1 + margin) * before else "reject"


def speed_first(base: Any, candidate: Any, delta: float, tolerance: float, margin: float) -> str:
    told = speed(base, candidate, margin)
    return told if told != "adopt" else step_by_step(base, candidate, delta, tolerance, margin)


WRONG: list[tuple[str, Any, list[str]]] = [
    (
        "adopts on speed alone",
        lambda b, c, d, t, m: speed(b, c, m),
        ["In “another update” your function says “adopt”", "The speed of another update is no reason"],
    ),
    (
        "adopts everything",
        lambda b, c, d, t, m: "adopt",
        ["the parameters are 0.3 % apart, and rounding explains 1e-13"],
    ),
    ("rejects everything", lambda b, c, d, t, m: "reject", ["In “equal and faster”", "nothing is wrong with it"]),
    ("ignores tokens", but(tokens=always), ["In “fewer tokens”", "51 of the 60 valid tokens, a dropped tail"]),
    ("only fewer tokens", but(tokens=lambda b, c, *_: c["tokens"] >= b["tokens"]), ["In “more tokens”", "70 valid"]),
    ("ignores updates", but(updates=always), ["In “another cadence”", "16 updates where the base makes 8"]),
    ("ignores skipped", but(skipped=always), ["In “more skipped updates”", "skipped 2 updates and the base none"]),
    (
        "skipped must be equal",
        but(skipped=lambda b, c, *_: c["skipped"] == b["skipped"]),
        ["In “fewer skipped updates” your function says “reject”", "only more than the base's"],
    ),
    (
        "ignores the margin",
        but(speed=lambda b, c, m: speed(b, c, 0)),
        ["In “faster by less than the margin” your function says “adopt”", "1 % faster, and 3 % is the margin"],
    ),
    (
        "its own margin",
        but(speed=lambda b, c, m: speed(b, c, 0.03)),
        ["In “a margin of 25 %”", "20 % faster, and 25 % is the margin", "use the one you are given"],
    ),
    ("means", but(speed=by_means), ["In “one lucky run” your function says “adopt”", "pulls the mean up"]),
    (
        "medians without a spread",
        but(speed=by_medians),
        ["In “one lucky run” your function says “reject”", "they do not show that it is no faster"],
    ),
    (
        "cannot tell taken for adopt",
        but(speed=lambda b, c, m: "reject" if speed(b, c, m) == "reject" else "adopt"),
        ["In “one lucky run” your function says “adopt”"],
    ),
    (
        "cannot tell taken for adopt where the median is faster",
        but(speed=lambda b, c, m: by_medians(b, c, m) if by_medians(b, c, m) == "adopt" else speed(b, c, m)),
        ["In “noise” your function says “adopt”", "“cannot tell” is no “adopt”"],
    ),
    (
        "speed before equality",
        speed_first,
        ["In “another update in noise” your function says “cannot tell”", "ask for equality before speed"],
    ),
    (
        "strictly less than the tolerance",
        but(delta=lambda b, c, d, t: d < t),
        ["In “a difference as large as the tolerance”", "that is still explained"],
    ),
    (
        "a NaN passes",
        but(delta=lambda b, c, d, t: not d > t),
        ["In “a difference that is not a number”", "NaN > tolerance is False"],
    ),
    (
        "slower is open",
        but(speed=lambda b, c, m: "adopt" if speed(b, c, m) == "adopt" else "cannot tell"),
        ["In “slower” your function says “cannot tell”", "10 % slower in every run, and that can be told"],
    ),
    ("a Decision's word", lambda b, c, d, t, m: "faster", ["returns 'faster', which is none of “adopt”, “reject”"]),
    ("a boolean", lambda b, c, d, t, m: True, ["returns True, which is none of"]),
    ("nothing", lambda b, c, d, t, m: None, ["returns None, which is none of"]),
    ("another name", lambda b, c, d, t, m: b["valid"], ["In “equal and faster”: ", "KeyError"]),
    (
        "too few arguments",
        lambda base, candidate: "adopt",
        ["Your function takes (base, candidate), and is called with"],
    ),
    ("no function", "adopt", ["This is a str and no function"]),
]


@pytest.mark.parametrize(("function", "words"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG])
def test_a_wrong_verdict_gets_its_sentence(function: Any, words: list[str]) -> None:
    found = check.acceptance(function)
    assert not found.passed
    for each in words:
        assert each in found.sentence, found.sentence


def test_every_case_is_needed() -> None:
    """No check is one that only a function fails which fails another before."""
    alone = {found.checks[at][0] for each in WRONG for found in [check.acceptance(each[1])] for at in [first(found)]}
    assert alone >= {case.name for case in CASES}


def first(found: Any) -> int:
    return next(at for at, (_, ok) in enumerate(found.checks) if not ok)


def test_the_right_words_are_those_of_the_cases() -> None:
    for case in CASES:
        base, candidate, delta, tolerance, margin = case.arguments
        assert by_hand(base, candidate, delta, tolerance, margin) == case.right, case.name
    assert {case.right for case in CASES} == {"adopt", "reject", "cannot tell"}


def test_what_it_changes_and_prints_is_said() -> None:
    def loud(base: Any, candidate: Any, delta: float, tolerance: float, margin: float) -> str:
        print("deciding")
        base["throughputs"].clear()
        return "adopt"

    found = check.acceptance(loud)
    assert found.printed.startswith("deciding") and not found.passed
    assert check.acceptance(step_by_step).passed, "no case was changed"


def test_an_endless_one_is_stopped() -> None:
    def endless(*_: Any) -> str:
        while True:
            pass

    assert not check.acceptance(endless, seconds=0.3).passed
