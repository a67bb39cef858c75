"""Exercises: a function that a learner wrote goes in, a sentence on what it really does, with its number, comes out.

An accumulation loop is judged by the weights fitted to the gradient it left. It gets a name where one loop of the
tables below predicts the weights found in every hidden window; otherwise the weights are told as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.accumulation import Comparison, compare
from labkit.accumulation.exercises.loops import ALWAYS, DIVIDED, NAMED, ONCE, THEN, WHICH, Loop, Part, predict
from labkit.accumulation.exercises.token_formulas import token_mean as token_mean
from labkit.accumulation.exercises.token_formulas import token_weight as token_weight
from labkit.corpus import Batch, batch, split
from labkit.denominators import Counts, counts
from labkit.device import quota_threads
from labkit.exercise import sandbox
from labkit.exercise.verdict import EMPTY, ROUNDED, Function, Verdict, aside, exercise, join, refusal, within
from labkit.exercise.watched_arguments import LoopArguments
from labkit.fit import fit
from labkit.nets import IGNORE, Transformer, sequence_gradients
from labkit.rules import rule
from labkit.wording import show, times, word

# The hidden windows: check, seed, sequences, shortest and full length, K, and which microbatch is empty. Equal counts
# hide many faults, so where something else is tried the counts are equal.

WINDOWS = (
    ("unequal counts", 399, 9, 4, 32, 4, None),
    ("other numbers of microbatches, 1 among them", 2, 6, 24, 24, 3, None),
    ("other numbers of microbatches, 1 among them", 3, 5, 32, 32, 1, None),
    ("a short tail window", 8, 8, 32, 32, 4, None),
    ("a short tail window", 4, 4, 32, 32, 2, None),
    (EMPTY, 5, 8, 4, 28, 4, 1),
    (EMPTY, 6, 6, 4, 32, 3, 0),
    ("one sequence in each microbatch", 7, 8, 4, 32, 8, None),
)


def _window(seed: int, sequences: int, shortest: int, length: int, K: int, empty: int | None) -> list[Batch]:
    microbatches = split(*batch(seed, sequences, length, shortest=shortest, text="made"), K)
    if empty is not None:
        microbatches[empty][1].fill_(IGNORE)
    return microbatches


# Running a loop.


@dataclass(frozen=True, eq=False)
class Run:
    """What the loop did to one window."""

    check: str
    seed: int
    microbatches: list[Batch]
    outcome: sandbox.Outcome
    fault: str  # what it did to the model or the microbatches, or that it left no gradient
    passes: int  # backward passes that reached .grad
    gradient: list[Tensor]
    comparison: Comparison | None

    @property
    def right(self) -> bool:
        """Whether its gradient is the full batch's, up to rounding."""
        c = self.comparison
        return c is not None and c.relative_error <= max(ROUNDED, c.tolerance.value)

    @property
    def finite(self) -> bool:
        """Whether there is a gradient, and weights in it."""
        return self.comparison is not None and math.isfinite(self.comparison.norm)

    @property
    def weights(self) -> Tensor:
        """Fitted weight × N of every sequence with a valid token."""
        c = self.comparison
        return c.sequence_weights[c.counts > 0] if c else torch.zeros(0)


@exercise
@quota_threads(1)
def accumulate(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge a loop `accumulate(model, microbatches)` that shall leave the gradient of the token mean in .grad.

    >>> from labkit import rules
    >>> accumulate(rules.token_mean_once).passed
    True
    >>> print(accumulate(rules.token_sum).sentence.partition(" (")[0])
    Your gradient is 134.00 times the full batch's: four sums were added and never divided

    microbatches: a list of (tokens, labels), each [b, T]. The model is a small float64 transformer in training mode,
    its .grad is clear at the start, and nothing else of it may change. A loop is right where its gradient is the full
    batch's up to rounding. `seconds`: for all windows together; what stops a loop is contained by `sandbox.run`.
    """
    checks = dict.fromkeys((check for check, *_ in WINDOWS), False)
    if why := refusal(function, "model", "microbatches"):
        return Verdict(False, tuple(checks.items()), why, "")
    runs: list[Run] = []
    for check, seed, *window in WINDOWS:
        remaining = max(seconds - sum(run.outcome.seconds for run in runs), seconds / 5)
        runs.append(_run(function, check, seed, _window(seed, *window), remaining))
        if runs[-1].outcome.late:
            break
    right = [run.right for run in runs] + [False] * (len(WINDOWS) - len(runs))
    for check in checks:
        checks[check] = all(ok for ok, row in zip(right, WINDOWS, strict=True) if row[0] == check)
    outcome = next((run for run in runs if not run.right), runs[0]).outcome
    sentence = _praise(runs) if all(checks.values()) else _faults(runs)
    return Verdict(all(checks.values()), tuple(checks.items()), sentence + aside(outcome), outcome.printed)


def _run(function: Function, check: str, seed: int, microbatches: list[Batch], seconds: float) -> Run:
    arguments = LoopArguments(_model(seed), microbatches)
    outcome = sandbox.run(function, arguments.model, arguments.microbatches, seconds=seconds)
    fault = "" if outcome.error else arguments.fault(outcome.value)
    measured = not outcome.error and not fault
    comparison = compare(_model(seed), microbatches, arguments.hand_over) if measured else None
    return Run(check, seed, microbatches, outcome, fault, arguments.passes, arguments.gradient, comparison)


def _model(seed: int) -> Transformer:
    return Transformer(seed=seed, length=33, dtype=torch.float64)


# Saying it.

Finding = tuple[str, str]  # what is wrong, and the fix


def _praise(runs: list[Run]) -> str:
    comparisons = [run.comparison for run in runs if run.comparison]
    worst, bound = max(each.relative_error for each in comparisons), min(each.tolerance.value for each in comparisons)
    right = "Right: in every window a valid token weighs 1/N"
    if all(each.equal for each in comparisons):
        return f"{right}; the relative error is at most {worst:.1g}, and rounding alone explains {bound:.1g}."
    return f"{right}, but for a relative error of {worst:.1g}, as of a number in float32 on the way."


def _faults(runs: list[Run]) -> str:
    """What befell the first window, or else what the weights are, and what befell a later one."""
    failure = next((run for run in runs if not run.finite), None)
    finite = [run for run in runs if run.finite]
    wrong = [run for run in finite if not run.right]
    sentence, fix = _diagnosis(finite, wrong[0]) if wrong and failure is not runs[0] else ("", "")
    if failure:
        zero = ": a mean over 0 targets is 0/0, the sum over them is 0" if failure.check == EMPTY else ""
        what = failure.outcome.error or failure.fault or f"The gradient is not finite{zero}."
        return f"{sentence} {within(failure.check, what)}".strip() if failure is not runs[0] else what
    return f"{sentence} {fix and f'The fix: {fix}.'}".strip()


def _diagnosis(runs: list[Run], example: Run) -> Finding:
    """What wrong gradients are; `shown` is the window that the numbers come from."""
    if not any(run.weights.any() for run in runs):
        return f"The gradient is zero: backward() ran {times(example.passes)}, and .grad was cleared after it.", ""
    if all(run.comparison.residual <= ROUNDED for run in runs if run.comparison):
        return _loop(runs, example) or _clipped(runs) or _plainly(example)
    return _clipped(runs) or _other_loss(example) or _plainly(example)


def _loop(runs: list[Run], example: Run) -> Finding | None:
    """The simplest loop that predicts every weight; None where others as simple would differ in another window."""
    f, everywhere = counts(*(run.microbatches for run in runs)), counts(*(_window(*row[1:]) for row in WINDOWS))
    weights = torch.cat([run.weights for run in runs])
    candidates = [loop for loop in itertools.product(WHICH, DIVIDED, THEN) if _close(predict(loop, f), weights)]
    if not candidates:
        return _always(f, weights, example) if len(runs) > 2 else None
    best = min(candidates, key=_cost)
    equals = [predict(loop, everywhere) for loop in candidates if _cost(loop) == _cost(best)]
    return _story(best, example, THEN[best[2]]) if all(_close(each, equals[0]) for each in equals) else None


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=ROUNDED, atol=1e-9 * float(other.abs().max()), equal_nan=True)


def _cost(loop: Loop) -> int:
    return WHICH[loop[0]].cost + DIVIDED[loop[1]].cost + THEN[loop[2]].cost


def _always(f: Counts, weights: Tensor, example: Run) -> Finding | None:
    """A loop of the tables times one number that is the same in every window."""
    for which, divided in itertools.product(WHICH, DIVIDED):
        base = predict((which, divided, ""), f)
        factor = float(base @ weights / (base @ base))
        if factor and _close(factor * base, weights):
            by = f"divided by {show(1 / factor)}" if abs(factor) < 1 - ROUNDED else f"multiplied by {show(factor)}"
            return _story((which, divided, "always"), example, replace(ALWAYS, words=ALWAYS.words.format(by=by)))
    return None


def _story(loop: Loop, example: Run, then: Part) -> Finding:
    """How much, by the fitted weights; why, in the words of the tables; and the fix."""
    which, divided, f = WHICH[loop[0]], DIVIDED[loop[1]], counts(example.microbatches)
    figures = {name: f"{float(values[0]):g}" for name, values in vars(f).items()}
    figures |= {"k": figures["K"], "K": word(int(f.K[0])), "never": "" if then.words else " and never divided"}
    name = f" ({NAMED[loop]})" if loop in NAMED else ""
    fix = rule(NAMED[loop]).fix if loop in NAMED else next(each.fix for each in (which, divided, then) if each.cost)
    story = f"{figures['K']} {divided.words}{then.words}".format_map(figures)
    if not which.cost:
        return f"{_amount(example.weights, f.s)}: {story}{name}.", fix
    weight = _number(float(example.weights[which.value(f) > 0].mean()))
    besides = f"; besides, {story}" if divided.cost or then.cost else ""
    once = example.passes == 1 and loop[0] == "last"
    how = f"{which.words} in your gradient, with {weight} times the right weight".format_map(figures)
    return f"{how}: backward() ran {times(example.passes)}{besides}{name}.", ONCE if once else fix


def _amount(weights: Tensor, tokens: Tensor) -> str:
    low, high, mean = float(weights.min()), float(weights.max()), float(weights @ tokens / tokens.sum())
    if math.isclose(low, high, rel_tol=ROUNDED):
        return f"Your gradient is {_number(mean)} times the full batch's"
    if math.isclose(mean, 1, rel_tol=ROUNDED):
        return f"In your gradient single tokens weigh {_number(low)} to {_number(high)} times what they should"
    span = f"{_number(low)} to {_number(high)} for single ones"
    return f"Your gradient is {_number(mean)} times the full batch's, averaged over its tokens ({span})"


def _number(value: float) -> str:
    if ROUNDED < abs(value - 1) < 0.005:
        return f"{value:.6f}"
    return f"{value:.2f}" if 0.0995 <= abs(value) < 1000 else f"{value:.3g}" if abs(value) > 1e-9 else "0"


def _clipped(runs: list[Run]) -> Finding | None:
    """A length that is the same in all windows, where the right ones differ."""
    comparisons = [run.comparison for run in runs if run.comparison]
    norms, rights = [each.norm for each in comparisons], [each.right_norm for each in comparisons]
    if len(runs) < 3 or max(norms) > min(norms) * (1 + ROUNDED):
        return None
    span = f"the full batch's {_number(min(rights))} to {_number(max(rights))}"
    sentence = f"Your gradient has the length {_number(norms[0])} in every window, {span}: it was clipped inside."
    return sentence, "leave that to the caller, once the gradient is complete"


# Other losses: the microbatches with which next_token_loss gives the gradients they are made of.
OTHER_LOSSES: tuple[tuple[str, str, Callable[[Tensor, Tensor], list[Batch]]], ...] = (
    (
        "Your loss judges the logits at t by the label at t, not by the next one: the shift is missing.",
        "take logits[:, :-1] and labels[:, 1:], as next_token_loss does",
        lambda tokens, labels: [(F.pad(tokens, (0, 1)), F.pad(labels, (1, 0), value=IGNORE))],
    ),
    (
        "Your loss judges the padding too, as if its label were 0.",
        "leave the labels -100 as they are, and cross_entropy ignores them",
        lambda tokens, labels: [(tokens, labels), (tokens, torch.where(labels == IGNORE, 0, IGNORE))],
    ),
)


def _other_loss(example: Run) -> Finding | None:
    for sentence, fix, pieces in OTHER_LOSSES:
        microbatches = [each for pair in example.microbatches for each in pieces(*pair)]
        rows = sequence_gradients(_model(example.seed), microbatches)
        if fit(example.gradient, rows).residual <= ROUNDED:
            return sentence, fix
    return None


def _plainly(example: Run) -> Finding:
    """The weights as they are, without a name."""
    c = example.comparison
    assert c
    if c.residual > ROUNDED:
        share = f"{_number(100 * c.residual)} % of its length comes from elsewhere"
        return f"Your gradient is no weighted sum of the microbatches' gradients: {share}.", ""
    valid = c.counts > 0
    weights, tokens, what = c.sequence_weights[valid], c.counts[valid], "sequences"
    if _close(c.token_weights[c.microbatch][valid], weights):
        tokens = torch.stack([c.counts[c.microbatch == m].sum() for m in range(len(example.microbatches))])
        weights, what = c.token_weights, "microbatches"
    sizes, values = join([f"{n:g}" for n in tokens.tolist()]), join([_number(w) for w in weights.tolist()])
    return f"The {what} of {sizes} tokens got {values} times the right weight: a loop that has no name here.", ""
