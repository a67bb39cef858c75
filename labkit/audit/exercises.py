"""The exercises of the audit lab: a whole training step, judged by the audit; and counts that tell faults apart."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from labkit.audit import Report, audit
from labkit.audit import probe as probes
from labkit.audit.bug_hunt.suspects import loss_sum
from labkit.device import quota_threads
from labkit.errors import LabError
from labkit.exercise import sandbox
from labkit.exercise.verdict import Function, Verdict, aside, exercise, refusal, within
from labkit.nets import IGNORE, VOCABULARY
from labkit.wording import three

EMPTIED = "a microbatch without a valid target"
# The hidden probes: check, K. Each step is called twice, so that what one window leaves to the next is seen.
PROBES = (("unequal microbatches", 4), ("another number of microbatches", 3), (EMPTIED, 4))


@exercise
@quota_threads(1)
def audited(build: Function, *, seconds: float = 10.0) -> Verdict:
    """Judge `build() -> (model, step)`, where step(microbatches) makes one update of the token mean, by the audit.

    >>> from torch.optim import SGD
    >>> from labkit.nets import Transformer, next_token_loss
    >>> def build():
    ...     model = Transformer(seed=0)
    ...     def step(microbatches):
    ...         for tokens, labels in microbatches:
    ...             next_token_loss(model, tokens, labels, "mean").backward()
    ...         SGD(model.parameters(), lr=0.1).step()
    ...     return model, step
    >>> audited(build).sentence.partition(" times")[0].rpartition(". ")[2]
    'sum-of-means: The microbatches got 14, 5.09, 3.29, 2.33'

    microbatches: a list of (tokens, labels), each [2, T], tokens below 128. `seconds`: for all probes together.
    """
    checks = dict.fromkeys((check for check, _ in PROBES), False)
    if why := refusal(build):
        return Verdict(False, tuple(checks.items()), why, "")
    outcomes: list[sandbox.Outcome] = []
    sentence = ""
    for check, K in PROBES:
        remaining = seconds - sum(outcome.seconds for outcome in outcomes)
        outcomes.append(sandbox.run(_report, build, K, check == EMPTIED, seconds=max(remaining, 0.01)))
        report = outcomes[-1].value
        checks[check] = isinstance(report, Report) and report.right
        what = "" if checks[check] else outcomes[-1].error or _words(report)
        sentence = sentence or (what and (what if check == PROBES[0][0] else within(check, what)))
    outcome = outcomes[list(checks.values()).index(False) if sentence else 0]
    first: Any = outcomes[0].value
    sentence = sentence or f"Right. {first.explain()}"
    return Verdict(all(checks.values()), tuple(checks.items()), sentence + aside(outcome), outcome.printed)


def _report(build: Any, K: int, emptied: bool) -> Report | str:
    """What the audit says, or why it cannot say anything."""
    microbatches = probes(VOCABULARY, accumulation=K)
    if emptied:
        microbatches[1][1].fill_(IGNORE)
    try:
        return audit(build, microbatches, loss_sum, windows=2)
    except LabError as error:
        return f"No verdict: {error}"


def _words(report: object) -> str:
    return " ".join(report.explain().splitlines()) if isinstance(report, Report) else str(report)


# Counts that tell a mean of means from a token mean.

CASES = ((4, 100), (2, 11), (8, 64), (3, 6), (1, 50), (5, 9))
CHECKS = (
    "K counts that sum to N",
    "a heaviest token of twice its right weight, or more",
    "None where no counts can do it",
)


@exercise
def probe(function: Function, *, seconds: float = 2.0) -> Verdict:
    """Judge `counts(K, N)`: K counts, in all N, that give a token twice its weight under the mean of means, or None.

    >>> probe(lambda K, N: [1] * (K - 1) + [N - K + 1] if K > 1 and N >= 2 * K else None).passed
    True
    >>> probe(lambda K, N: [N // K] * K).sentence.partition(":")[0]
    'For K = 4, N = 100 your counts are 25, 25, 25, 25'

    Each count is a whole number, 1 or more: a microbatch without a target has no mean. Under the mean of means a token
    of microbatch m weighs N / (K n_m) times what it should, so N / K must be at least twice the smallest count.
    """
    if why := refusal(function, "K", "N"):
        return Verdict(False, tuple((check, False) for check in CHECKS), why, "")
    failed: dict[str, str] = {}
    outcomes = [sandbox.run(function, K, N, seconds=seconds / len(CASES)) for K, N in CASES]
    for (K, N), outcome in zip(CASES, outcomes, strict=True):
        check, what = (CHECKS[0], outcome.error) if outcome.error else _fault(outcome.value, K, N)
        if what:
            failed.setdefault(check, what if outcome.error else f"For K = {K}, N = {N} {what}")
    sentence = next(iter(failed.values()), "Right: on these counts the audit tells a mean of means from a token mean.")
    return Verdict(not failed, tuple((check, check not in failed) for check in CHECKS), sentence, outcomes[0].printed)


def _fault(value: Any, K: int, N: int) -> tuple[str, str]:
    """The check that fails, and why; two empty words where none does."""
    possible = K > 1 and N >= 2 * K
    if value is None:
        return (
            (CHECKS[1], "your function returns None, and there are such counts: make one small.")
            if possible
            else ("", "")
        )
    if not possible:
        why = (
            "one microbatch is the whole window"
            if K == 1
            else f"a token alone weighs only {three(N / K)} times its right weight"
        )
        return CHECKS[2], f"no counts tell the two apart: {why}. Return None."
    what = _no_counts(value, K, N)
    return (CHECKS[0], what) if what else _telling([int(n) for n in value], K, N)


def _no_counts(value: Any, K: int, N: int) -> str:
    """Why these are no K counts of N tokens."""
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return f"your function returns {value!r}, a {type(value).__name__} and no list of counts."
    items = [each.item() if hasattr(each, "item") else each for each in value]
    figures = ", ".join(map(str, items))
    if len(items) != K:
        return f"your function returns {len(items)} counts, and there are {K} microbatches."
    if not all(isinstance(n, numbers.Real) and float(n).is_integer() for n in items):
        return f"your counts are {figures}: tokens come whole."
    if min(items) < 0:
        return f"your counts are {figures}: there are no negative tokens."
    if min(items) == 0:
        return f"your counts are {figures}: a microbatch of 0 tokens has no mean, 0/0. Give it 1."
    if sum(items) != N:
        return f"your counts are {figures}, together {sum(items)} and not {N}."
    return ""


def _telling(counts: Sequence[int], K: int, N: int) -> tuple[str, str]:
    heaviest = N / (K * min(counts))
    if heaviest >= 2:
        return "", ""
    figures = ", ".join(map(str, counts))
    if heaviest == 1:
        return CHECKS[1], f"your counts are {figures}: equal, so every weight is 1, and the two methods look the same."
    sentence = f"the heaviest token weighs N / (K n) = {three(heaviest)} times its right weight, and 2 is asked for"
    return CHECKS[1], f"your counts are {figures}: {sentence}. Make the smallest smaller."
