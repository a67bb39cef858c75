"""What a learner is told about a function: how many checks hold, and one sentence on what it really does."""

from __future__ import annotations

import functools
import html
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

import torch

from labkit.declare import quantity
from labkit.exercise import sandbox
from labkit.learner import one_time_messages, record
from labkit.tolerance import gamma

P = ParamSpec("P")
Function = Callable[..., object]
ROUNDED = gamma(16, torch.float32)  # what a few numbers in float32 on the way explain
EMPTY = "a microbatch without a valid target"  # a check of loops and formulas alike


@dataclass(frozen=True, repr=False)
class Verdict:
    """What a function does, and which of the checks it passes."""

    passed: bool = quantity("whether all checks hold")
    checks: tuple[tuple[str, bool], ...] = quantity("each check, and whether it holds")
    sentence: str = quantity("what the function does, with its number")
    printed: str = quantity("the beginning of what it printed")

    def __repr__(self) -> str:
        rows = [f"  {'✓' if ok else '✗'} {name}" for name, ok in self.checks]
        printed = ["Your function printed:", self.printed] if self.printed else []
        lines = textwrap.wrap(self.sentence, 72, break_long_words=False, break_on_hyphens=False)
        return "\n".join([f"{sum(ok for _, ok in self.checks)} of {len(rows)} checks", *lines, *rows, *printed])

    def _repr_html_(self) -> str:
        """The same words, which a narrow page breaks where it will."""
        rows = "".join(f"<li>{'✓' if ok else '✗'} {html.escape(name)}</li>" for name, ok in self.checks)
        page = f"<p><strong>{sum(ok for _, ok in self.checks)} of {len(self.checks)} checks</strong></p>"
        page += f'<p style="max-width: 72ch">{html.escape(self.sentence)}</p>'
        printed = f"<p>Your function printed:</p><pre>{html.escape(self.printed)}</pre>" if self.printed else ""
        return f'{page}<ul style="list-style: none; padding-left: 1em">{rows}</ul>{printed}'


def exercise(checker: Callable[P, Verdict]) -> Callable[P, Verdict]:
    """Mark a checker, so that `labkit.check` has it, and keep in the learner's record that its exercise was passed.

    >>> exercise(lambda function: Verdict(False, (), "Not yet.", ""))(print)
    0 of 0 checks
    Not yet.
    """

    @functools.wraps(checker)
    def judge(*args: P.args, **options: P.kwargs) -> Verdict:
        verdict = checker(*args, **options)
        if verdict.passed:
            record.passed(checker.__name__)
        for sentence in one_time_messages.take():
            print(sentence)
        return verdict

    judge.exercise = True  # type: ignore[attr-defined]
    return judge


def refusal(function: object, *names: str) -> str:
    """Why it cannot even be called."""
    if not callable(function):
        return f"This is a {type(function).__name__} and no function: hand over the function itself, not its result."
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return ""
    try:
        signature.bind(*names)
    except TypeError:
        return f"Your function takes {signature}, and is called with ({', '.join(names)})."
    return ""


def within(check: str, what: str) -> str:
    """A sentence that holds in one check only.

    >>> within("equal counts", "Your function returns None.")
    'In the check “equal counts” your function returns None.'
    """
    return f"In the check “{check}” {what[0].lower()}{what[1:]}"


def aside(outcome: sandbox.Outcome) -> str:
    """What a function changed besides, or nothing.

    >>> aside(sandbox.run(torch.manual_seed, 0))
    " (It also changed torch's random numbers; that was put back.)"
    """
    return f" (It also changed {' and '.join(outcome.changed)}; that was put back.)" if outcome.changed else ""


def join(items: Sequence[str]) -> str:
    """Items as they are said.

    >>> join(["3", "11", "20"])
    '3, 11 and 20'
    """
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else items[0]
