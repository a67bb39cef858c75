"""Exercises on data parallel: the loss of a rank, and a loop that synchronises once a window.

The loop runs in one process, with a stand-in for DistributedDataParallel that arms its all-reduce as the real one does,
in the forward; tests hold the two beside each other on real ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.corpus import Batch, batch, split
from labkit.data_parallel.exercises.ddp_stand_in import Alone
from labkit.device import quota_threads
from labkit.exercise import sandbox
from labkit.exercise.formula import Exercise
from labkit.exercise.verdict import ROUNDED, Function, Verdict, aside, exercise, join, refusal, within
from labkit.fit import fit, flat, gradient
from labkit.nets import Transformer, next_token_loss
from labkit.wording import show, times, word

# The loss of a rank.

DDP = "multiply by world to take that back"


def _over(sum_: float, count: float) -> float:
    """A mean, NaN over nothing."""
    return sum_ / count if count else math.nan


DDP_LOSS = Exercise(
    ("local_sum", "local_count", "global_count", "world"),
    {
        "unequal counts": (12.0, 3, 20, 4),
        "two ranks": (7.0, 5, 8, 2),
        "equal counts": (10.0, 5, 10, 2),
        "one rank": (9.0, 6, 6, 1),
        "a rank without a valid target": (0.0, 0, 10, 2),
    },
    lambda s, n, N, W: s * W / N,
    {
        f"that is S / N, and DDP divides by the number of ranks once more: {DDP}": lambda s, n, N, W: s / N,
        "that is the rank's own token mean, so a token of a short rank weighs more: divide by all ranks' tokens": (
            lambda s, n, N, W: _over(s, n)
        ),
        "max(n, 1) takes the NaN away and not the wrong weight: divide by the tokens of all ranks": (
            lambda s, n, N, W: s / max(n, 1)
        ),
        "world belongs before a sum divided by the tokens of all ranks, and not before the rank's own mean": (
            lambda s, n, N, W: _over(s, n) * W
        ),
        "world belongs before a sum divided by the tokens of all ranks, and max(n, 1) is not their number": (
            lambda s, n, N, W: s / max(n, 1) * W
        ),
        f"it is divided by world, as DDP does anyway: {DDP}": lambda s, n, N, W: s / N / W,
        "world stands in it twice": lambda s, n, N, W: s * W * W / N,
        "it is never divided by the number of tokens": lambda s, n, N, W: s * W,
        "it is the bare sum": lambda s, n, N, W: s,
        "the rank's own mean was divided by world, as DDP does anyway": lambda s, n, N, W: _over(s, n) / W,
        "the share of the tokens is upside down: a mean times local_count / global_count": (
            lambda s, n, N, W: _over(_over(s, n) * N, n) * W
        ),
        "a sum needs no share of the tokens: only a mean does": lambda s, n, N, W: s * n / N * W,
        "both counts and world are upside down: world goes over global_count": (lambda s, n, N, W: _over(s * N, n * W)),
    },
)


@exercise
def ddp_loss(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `ddp_loss(local_sum, local_count, global_count, world)`: what a rank calls backward on, under DDP.

    >>> ddp_loss(lambda local_sum, local_count, global_count, world: local_sum / global_count)
    2 of 5 checks
    For local_sum = 12.0, local_count = 3, global_count = 20, world = 4 your
    function gives 0.6, and 2.4 is right: that is S / N, and DDP divides by
    the number of ranks once more: multiply by world to take that back.
      ✗ unequal counts
      ✗ two ranks
      ✗ equal counts
      ✓ one rank
      ✓ a rank without a valid target

    local_sum: the loss summed over this rank's valid tokens, local_count of them; global_count: those of all ranks.
    """
    return DDP_LOSS.judge(function, seconds)


# A loop that synchronises once.

WINDOWS = (("one all-reduce for four microbatches", 4), ("a window of one microbatch", 1), ("six microbatches", 6))
AFTER = "the window after"
SAME = "all ranks have the same gradient"


@dataclass(frozen=True, eq=False)
class Run:
    """What a loop did to one window."""

    check: str
    K: int
    outcome: sandbox.Outcome
    passes: list[bool]
    late: bool
    entered: int
    calls: int
    weights: Tensor  # of each microbatch's own loss in .grad; 1 is right
    residual: float

    @property
    def all_reduces(self) -> int:
        """How many passes ended in one."""
        return sum(self.passes)

    @property
    def local(self) -> int:
        """Backward passes after the last all-reduce: they stay on their rank."""
        return self.passes[::-1].index(True) if any(self.passes) else len(self.passes)

    @property
    def whole(self) -> bool:
        """Whether every microbatch is in the gradient with its right weight."""
        one = torch.ones_like(self.weights)
        return self.residual <= ROUNDED and torch.allclose(self.weights, one, rtol=ROUNDED, atol=ROUNDED)

    @property
    def same(self) -> bool:
        """Whether all ranks would have the right gradient."""
        return not self.outcome.error and self.whole and not self.local

    @property
    def right(self) -> bool:
        """Whether that took one all-reduce."""
        return self.same and self.all_reduces == 1


@exercise
@quota_threads(1)
def no_sync(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge a loop `accumulate(model, microbatches, loss)` that synchronises the ranks once.

    >>> def everywhere(model, microbatches, loss):
    ...     for microbatch in microbatches:
    ...         loss(model, microbatch).backward()
    >>> print(no_sync(everywhere).sentence)
    4 all-reduces for 4 microbatches, and one is enough: no_sync is never used. The fix: forward and backward of all \
but the last microbatch inside model.no_sync().

    model: wrapped by DistributedDataParallel, .grad clear; loss(model, microbatch) is the right share, so that all that
    is left is to call backward on it, once for each microbatch. `seconds`: for all windows together.
    """
    checks = dict.fromkeys([WINDOWS[0][0], SAME, *(check for check, _ in WINDOWS[1:]), AFTER], False)
    if why := refusal(function, "model", "microbatches", "loss"):
        return Verdict(False, tuple(checks.items()), why, "")
    runs: list[Run] = []
    for check, K in (*WINDOWS, (AFTER, 4)):
        if check != AFTER:
            module = Transformer(width=8, dtype=torch.float64)
            model = Alone(module)
        remaining = max(seconds - sum(run.outcome.seconds for run in runs), seconds / 5)
        runs.append(_run(function, check, model, module, K, remaining))
        if runs[-1].outcome.late:
            break
    for run in runs:
        checks[run.check] = run.right
    checks[SAME] = runs[0].same
    wrong = next((run for run in runs if not run.right), None)
    sentence = _fault(wrong, wrong is runs[0]) if wrong else f"Right: {_praise(runs[0])}."
    outcome = (wrong or runs[0]).outcome
    return Verdict(not wrong, tuple(checks.items()), sentence + aside(outcome), outcome.printed)


def _loss(model: nn.Module, microbatch: Batch) -> Tensor:
    return next_token_loss(model, *microbatch, "sum") / 32


def _run(function: Function, check: str, model: Alone, module: Transformer, K: int, seconds: float) -> Run:
    microbatches = split(*batch(K, 2 * K, text="made"), K)
    rows = torch.stack([_own(module, each) for each in microbatches])
    module.zero_grad()
    model.passes.clear()
    model.late.clear()
    model.entered = model.calls = 0
    loss: Callable[[nn.Module, Batch], Tensor] = _loss
    outcome = sandbox.run(function, model, list(microbatches), loss, seconds=seconds)
    total = flat(gradient(module))
    finite = bool(total.isfinite().all())
    weights = fit(total if finite else torch.zeros_like(total), rows)
    late, passes = any(model.late), list(model.passes)
    return Run(check, K, outcome, passes, late, model.entered, model.calls, weights.values, weights.residual)


def _own(model: nn.Module, microbatch: Batch) -> Tensor:
    return flat(torch.autograd.grad(_loss(model, microbatch), list(model.parameters())))


ONCE = "The fix: forward and backward of all but the last microbatch inside model.no_sync()"


def _praise(run: Run) -> str:
    return f"one all-reduce for {word(run.K)} microbatches, with all of them in it, and {word(run.K - 1)} without"


def _fault(run: Run, first: bool) -> str:
    what = run.outcome.error or _silent(run) or _weights(run) or _local(run) or _costly(run)
    return what if first else within(run.check, what)


def _silent(run: Run) -> str:
    if run.passes:
        return ""
    if run.outcome.value is not None:
        return f"Your function returns a {type(run.outcome.value).__name__} and calls no backward()."
    return "backward() was never called on a loss of this model."


def _weights(run: Run) -> str:
    """Whether all microbatches are there, each with its weight."""
    if run.whole:
        return ""
    if not run.weights.any():
        return f"The gradient is zero: backward() ran {times(len(run.passes))}, and .grad was cleared after it."
    if run.residual > ROUNDED:
        return "The gradient is no sum of these losses: call backward on loss(model, microbatch) and leave .grad alone."
    words = join([show(round(w, 4)) for w in run.weights.tolist()]) if run.K > 1 else show(float(run.weights[0]))
    missing = int((run.weights.abs() <= ROUNDED).sum())
    if missing:
        why = f"{missing} of {run.K} did not stay in the gradient: backward once for each, and no zero_grad in the loop"
    elif float(run.weights.max() - run.weights.min()) <= ROUNDED:
        why = "the loss that is given is the right share already, so divide by nothing more"
    else:
        why = "backward once for each, on the loss as it is given"
    return f"The microbatches weigh {words} in .grad, and 1 is right: {why}."


def _local(run: Run) -> str:
    """Whether some stay on their rank."""
    if not run.local:
        return ""
    if not run.all_reduces:
        return f"{_never(run)}: every rank keeps a gradient of its own, and the replicas drift apart. {ONCE}."
    place = len(run.passes) - run.local
    if place == 1:
        return (
            f"The first microbatch is synchronised, and the {word(run.local)} after it stay on their rank: the last "
            f"one has to be, since an all-reduce averages all that is in .grad by then. {ONCE}."
        )
    often = f"{times(run.all_reduces)}, the last time after microbatch {place} of {run.K}"
    return (
        f"The ranks are synchronised {often}: the last {word(run.local)} stay on their rank. Does a K stand in "
        f"the code, or a counter that runs on? Ask whether this is the last of len(microbatches)."
    )


def _never(run: Run) -> str:
    if not run.calls:
        return "No all-reduce ran, since the model itself was never called: model.module knows of no other ranks"
    if run.late:
        return (
            "No all-reduce ran: no_sync was off at a backward, but it is the forward that arms the all-reduce, and "
            "that had passed"
        )
    return "No all-reduce ran, since no_sync is on for the last microbatch too"


def _costly(run: Run) -> str:
    why = "no_sync is never used"
    if run.entered:
        why = (
            "the forward arms the all-reduce, and it stands outside no_sync"
            if run.all_reduces == run.K
            else f"no_sync was entered {times(run.entered)}"
        )
    return f"{run.all_reduces} all-reduces for {run.K} microbatches, and one is enough: {why}. {ONCE}."
