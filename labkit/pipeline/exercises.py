"""The exercises of the pipeline lab: the bubble, and a loss with the scale_grads that goes with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.corpus import Batch
from labkit.denominators import DENOMINATORS, RULES, counts
from labkit.device import quota_threads
from labkit.exercise import sandbox
from labkit.exercise.formula import Exercise
from labkit.exercise.verdict import EMPTY, ROUNDED, Function, Verdict, aside, exercise, refusal, within
from labkit.fit import distance, fit, flat, gradient
from labkit.nets import IGNORE
from labkit.pipeline.stages import data, model
from labkit.pipeline.step import sums
from labkit.pipeline.timing import bubble as right_bubble
from labkit.tolerance import depth, tolerance
from labkit.wording import three

BUBBLES: dict[str, Callable[[int, int], float]] = {
    "": right_bubble,
    "that is the bubble over the time of the work, and asked is its share of the whole step": lambda P, M: (P - 1) / M,
    "filling, working and draining are M + P − 1 slots, not M + P": lambda P, M: (P - 1) / (M + P),
    "a rank waits P − 1 slots: it fills while it works on its first": lambda P, M: P / (M + P - 1),
    "both are one too many: P − 1 slots of M + P − 1": lambda P, M: P / (M + P),
    "that is the share in which a rank works, and the bubble is the rest": lambda P, M: M / (M + P - 1),
    "stages and microbatches are swapped": lambda P, M: (M - 1) / (M + P - 1),
    "the slots of backward passes are missing below: 2 (P − 1) of 2 (M + P − 1)": lambda P, M: (
        2 * (P - 1) / (M + P - 1)
    ),
    "fill and drain were counted twice, M once: it is 2 (P − 1) of 2 (M + P − 1)": lambda P, M: (
        2 * (P - 1) / (M + 2 * (P - 1))
    ),
    "that is the bubble of a single microbatch, and M fills it": lambda P, M: (P - 1) / P,
    "a rank that waits P − 1 slots does so once, not once for each microbatch": lambda P, M: (P - 1) * M / (M + P - 1),
    "those are slots, and their share of M + P − 1 is asked": lambda P, M: float(P - 1),
    "P is missing: more stages, more bubble": lambda P, M: 1 / (M + 1),
    "the number of stages is missing above": lambda P, M: 1 / (M + P - 1),
    "that is in per cent, and a share from 0 to 1 is asked": lambda P, M: 100 * right_bubble(P, M),
    "it was rounded down to a whole number": lambda P, M: float((P - 1) // (M + P - 1)),
}

BUBBLE = Exercise(
    ("stages", "microbatches"),
    {
        "two stages": (2, 4),
        "as many microbatches as stages": (4, 4),
        "many microbatches": (4, 64),
        "fewer microbatches than stages": (8, 3),
        "one microbatch": (3, 1),
        "one stage": (1, 8),
    },
    right_bubble,
    BUBBLES,
)


@exercise
def bubble(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `bubble(stages, microbatches)`: the share of its time that a rank waits, (P − 1) / (M + P − 1).

    >>> bubble(lambda stages, microbatches: (stages - 1) / microbatches).sentence
    'For stages = 2, microbatches = 4 your function gives 0.25, and 0.2 is right: that is the bubble over the time of \
the work, and asked is its share of the whole step.'

    Source: as `labkit.pipeline.bubble`.
    """
    return BUBBLE.judge(function, seconds)


# A loss and its scale_grads.

BATCHES = (  # check, seed, rows, microbatches, whether all counts are equal, which row has no valid token
    ("unequal counts", 1, 4, 4, False, None),
    ("equal counts", 2, 4, 4, True, None),
    ("other numbers of microbatches", 3, 6, 2, False, None),
    ("other numbers of microbatches", 4, 3, 1, False, None),
    ("several rows in a microbatch", 5, 8, 4, False, None),
    (EMPTY, 6, 3, 3, False, 1),
)


@dataclass(frozen=True, eq=False)
class Run:
    """One batch through the schedule."""

    check: str
    targets: Tensor
    microbatches: int
    outcome: sandbox.Outcome
    fault: str
    weights: Tensor  # fitted weight × N of every row with a valid token
    residual: float
    right: bool

    @property
    def batch(self) -> list[Batch]:
        """Its microbatches, of labels that stand one place before their targets."""
        labels = F.pad(self.targets, (1, 0), value=IGNORE)
        return [(each, each) for each in labels.tensor_split(self.microbatches)]

    @property
    def finite(self) -> bool:
        """Whether there is a gradient, with numbers in it."""
        return not self.fault and bool(self.weights.isfinite().all())


@exercise
@quota_threads(1)
def pipeline_loss(function: Function, scale_grads: bool = True, *, seconds: float = 5.0) -> Verdict:
    """Judge `loss_fn(logits, targets, N)` and the scale_grads that it is handed over with.

    >>> from labkit.pipeline.stages import share_of_mean, token_mean
    >>> pipeline_loss(share_of_mean, scale_grads=False).passed
    True
    >>> pipeline_loss(share_of_mean).sentence.partition(":")[0]
    'double-division'

    logits [b, T, V] and targets [b, T] of one microbatch, -100 is ignored; N: valid tokens of the whole batch. Together
    they shall leave the gradient of the token mean. Run through a schedule in this process: a backward pass for each
    microbatch, then a division by their number where scale_grads is True.
    """
    checks = dict.fromkeys((check for check, *_ in BATCHES), False)
    why = refusal(function, "logits", "targets", "N")
    if not isinstance(scale_grads, bool):
        why = f"scale_grads = {scale_grads!r} is neither True nor False."
    if why:
        return Verdict(False, tuple(checks.items()), why, "")
    runs: list[Run] = []
    for batch in BATCHES:
        runs.append(run(function, scale_grads, batch, seconds / len(BATCHES)))
        if runs[-1].outcome.late:
            break
    for check in checks:
        results = [each.right for each in runs if each.check == check]
        checks[check] = bool(results) and all(results)
    outcome = next((each for each in runs if not each.right), runs[0]).outcome
    sentence = PRAISE if all(checks.values()) else _sentence(runs, scale_grads)
    return Verdict(all(checks.values()), tuple(checks.items()), sentence + aside(outcome), outcome.printed)


PRAISE = "Right: in every batch, a valid token weighs 1/N, whatever microbatch it stands in."


def run(
    function: Function, scale_grads: bool, batch: tuple[str, int, int, int, bool, int | None], seconds: float
) -> Run:
    """One batch of a check, and the weights in the gradient that it left."""
    check, seed, rows, microbatches, equal, empty = batch
    tokens, targets = data(rows, seed, equal)
    if empty is not None:
        targets[empty] = IGNORE
    whole, N, valid = model(2, seed), int((targets != IGNORE).sum()), (targets != IGNORE).any(1)
    outcome, fault = scheduled(function, scale_grads, whole, (tokens, targets), microbatches, seconds)
    g, S = flat(gradient(whole)), sums(whole, tokens, targets)
    if fault or not g.isfinite().all():
        nothing = torch.full((int(valid.sum()),), math.nan)
        return Run(check, targets, microbatches, outcome, fault, nothing, math.nan, False)
    bound = tolerance(S, count=N, depth=depth(whole), dtype=S.dtype).value
    right = distance(g, S.sum(0) / N).relative_error <= max(ROUNDED, bound)
    weights = fit(g, S[valid])
    return Run(check, targets, microbatches, outcome, fault, weights.values * N, weights.residual, right)


def scheduled(
    function: Function, scale_grads: bool, whole: nn.Module, batch: tuple[Tensor, Tensor], M: int, seconds: float
) -> tuple[sandbox.Outcome, str]:
    """All forwards, then all backwards, then the library's division: GPipe in one process."""
    tokens, targets = batch
    N, losses = int((targets != IGNORE).sum()), []
    for x, y in zip(tokens.tensor_split(M), targets.tensor_split(M), strict=True):
        outcome = sandbox.run(function, whole(x), y.clone(), N, seconds=seconds / M)
        if fault := outcome.error or _fault(outcome.value):
            return outcome, fault
        losses.append(outcome.value)
    for loss in losses:
        loss.backward()  # type: ignore[attr-defined]
    for weight in whole.parameters():
        if scale_grads and weight.grad is not None:
            weight.grad /= M
    return outcome, ""


def _fault(value: object) -> str:
    """What makes a returned value no loss."""
    if not isinstance(value, Tensor):
        return f"Your function returns {'None' if value is None else f'a {type(value).__name__}'}, and no tensor."
    if value.numel() != 1:
        return f"Your function returns {value.numel()} numbers: a loss is one, add them up."
    if not value.requires_grad:
        return "Your loss is cut off from the weights: by no_grad, detach, item, or a tensor made anew."
    return ""


# Saying it.

DIVIDED = {  # what a loss divides its sum by, and the words for it
    "N": "the sum over N",
    "n": "each microbatch's own mean",
    "1": "the sum, never divided by N",
    "padded": "the mean over all targets, the ignored too",
    "PADDED": "the sum over all targets of the batch, the ignored too",
    "b": "the sum over the microbatch's rows",
    "B": "the sum over the batch's rows",
    "length": "the sum over the length of a row",
    "s b": "the mean of each row's own mean",
    "s": "the sum of each row's own mean",
    "N n": "each microbatch's own mean, over N once more",
}
WORDS = RULES | {("1", 1): "token-sum", ("padded", 1): "padded-count", ("s b", 1): "sequence-means"}
FIX = "return the sum over this microbatch's valid tokens divided by N, with scale_grads=False"


def _sentence(runs: Sequence[Run], scale_grads: bool) -> str:
    """What befell the first batch, or what the weights are, and what befell a later one."""
    failure = next((each for each in runs if not each.finite), None)
    finite = [each for each in runs if each.finite]
    wrong = [each for each in finite if not each.right]
    sentence = _diagnosis(finite, wrong[0], scale_grads) if wrong and failure is not runs[0] else ""
    if failure is None:
        return sentence
    zero = ": a mean over 0 targets is 0/0, the sum over them is 0" if failure.check == EMPTY else ""
    what = failure.fault or f"The gradient is not finite{zero}."
    return what if failure is runs[0] else f"{sentence} {within(failure.check, what)}".strip()


def _diagnosis(runs: Sequence[Run], example: Run, scale_grads: bool) -> str:
    """The word and the words for a way that gives the weights in all batches, or the weights as they are."""
    figures = ", ".join(dict.fromkeys(three(weight) for weight in example.weights.tolist()))
    weigh = f"the tokens of your microbatches weigh {figures} times 1/N"
    if not any(each.weights.abs().max() > ROUNDED for each in runs):
        return f"no-step: the gradient is zero. The fix: {FIX}."
    if max(each.residual for each in runs) <= ROUNDED:
        for (name, words), power in itertools.product(DIVIDED.items(), (0, 1, 2, -1)):
            if _close(_factors(runs, name, power), 1.0):
                word = WORDS.get((name, power), "unknown")
                return f"{word}: {weigh}. {_by(words, power, example.microbatches, scale_grads)} The fix: {FIX}."
        for name, words in DIVIDED.items():
            factors = _factors(runs, name, int(scale_grads))
            always = float(factors[0])
            if _close(factors, always):
                by = f"divided by {three(1 / always)}" if always < 1 else f"multiplied by {three(always)}"
                return f"unknown: {weigh}. Your loss is {words}, {by} whatever M is. The fix: {FIX}."
        return f"unknown: {weigh}, and no usual way gives these weights. The fix: {FIX}."
    return f"unknown: {three(100 * example.residual)} % of your gradient is that of no sum over tokens. The fix: {FIX}."


def _factors(runs: Sequence[Run], name: str, power: int) -> Tensor:
    """The weights found over those of a loss that is divided so, and `power` times by M; 1: that is what it was."""
    c = counts(*(run.batch for run in runs))
    return torch.cat([run.weights for run in runs]) * DENOMINATORS[name].count(c) * c.K**power / c.N


def _close(factors: Tensor, value: float) -> bool:
    return value != 0 and torch.allclose(factors, torch.full_like(factors, value), rtol=ROUNDED, atol=0)


def _by(words: str, power: int, M: int, scale_grads: bool) -> str:
    """How often it was divided by the number of microbatches, and by whom."""
    yours = power - scale_grads
    own = {0: "", 1: f", which it divides by M = {M}", 2: f", which it divides by M² = {M * M}"}
    mine = own.get(yours, f", which it multiplies by {M if yours == -1 else M * M}")
    library = (
        f" scale_grads=True divides by M = {M} after that." if scale_grads else " scale_grads=False divides nothing."
    )
    return f"Your loss is {words}{mine}.{library}"
