"""The exercises of the cadence lab: a whole update, judged by what reached the optimizer; and a formula."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.accumulation import compare
from labkit.cadence import adam_step_ratio
from labkit.check import sandbox
from labkit.check.accumulation import Run, faults
from labkit.check.formula import Exercise
from labkit.check.sandbox import times, word
from labkit.check.verdict import ROUNDED, Function, Verdict, aside, refused, within
from labkit.corpus import Batch, batch, split
from labkit.declare import percent
from labkit.device import quota_threads
from labkit.fit import flat, gradient
from labkit.nets import Transformer
from labkit.rules import rule

# Three calls one after the other, as in a training: check, seed, sequences, K.
WINDOWS = (("the first window", 399, 9, 4), ("the second window", 2, 6, 3), ("a tail window", 8, 4, 2))
CHECKS = (
    "one optimizer step in a window",
    "its gradient is the token mean of the whole window",
    "nothing is carried into the next window",
    "the schedule moves once, after the step",
)


@dataclass(frozen=True, eq=False)
class Update:
    """What one call did."""

    run: Run  # the gradient that reached the last optimizer step, and its weights
    steps: int  # optimizer steps
    count: int  # by how much Adam's own count moved
    carried: bool  # whether the first backward met a gradient of the window before
    schedule: int  # steps of the schedule
    early: bool  # whether it moved before the optimizer's step
    strayed: float  # how far the weights are from where the optimizer's step alone would put them, over its length

    @property
    def held(self) -> tuple[bool, ...]:
        """The checks, in their order."""
        once = (self.steps, self.count) == (1, 1) and self.strayed <= ROUNDED
        return once, self.steps == 1 and self.run.right, not self.carried, self.schedule == 1 and not self.early


class Watch:
    """A model, its optimizer and its schedule, and what a call does with them."""

    def __init__(self) -> None:
        self.model = _model()
        self.weight = next(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.optimizer.register_step_pre_hook(self._before_step)
        self.weight.register_hook(self._before_backward)

    def call(self, function: Function, check: str, microbatches: list[Batch], seconds: float) -> Update:
        """Call the function, and find what it did."""
        self.taken: list[list[Tensor]] = []
        self.passes, self.carried, self.early, self.start = 0, False, False, self.scheduler.last_epoch
        before, state, left = self._weights(), copy.deepcopy(self.optimizer.state_dict()), gradient(self.model)
        count, given = self._count(), [(tokens.clone(), labels.clone()) for tokens, labels in microbatches]
        outcome = sandbox.run(function, self.model, self.optimizer, self.scheduler, given, seconds=seconds)
        found = (
            [g - old if self.carried else g for g, old in zip(self.taken[-1], left, strict=True)] if self.taken else []
        )
        moved = self.scheduler.last_epoch - self.start
        strayed = self._strayed(before, state) if len(self.taken) == 1 else 0.0
        run = _run(check, before, microbatches, outcome, self.passes, found)
        return Update(run, len(self.taken), self._count() - count, self.carried, moved, self.early, strayed)

    def _before_step(self, optimizer: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Keep the gradient that the step will see; a closure makes it inside the step."""
        closure = arguments[1] if len(arguments) > 1 else named.get("closure")
        if closure is None:
            return self._take()

        def watched() -> Any:
            loss = closure()
            self._take()
            return loss

        return (arguments[0], watched), {}

    def _take(self) -> None:
        self.early |= self.scheduler.last_epoch > self.start and not self.taken
        self.rate = self.optimizer.param_groups[0]["lr"]
        self.taken.append(gradient(self.model))

    def _before_backward(self, _: Tensor) -> None:
        self.carried |= not self.passes and self.weight.grad is not None and bool(self.weight.grad.any())
        self.passes += 1

    def _weights(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.model.state_dict().items()}

    def _count(self) -> int:
        return int(self.optimizer.state[self.weight]["step"]) if self.weight in self.optimizer.state else 0

    def _strayed(self, before: dict[str, Tensor], state: dict[str, Any]) -> float:
        """Make the same step on a copy: nothing else shall move the weights."""
        twin = _model(before)
        optimizer = torch.optim.AdamW(twin.parameters())
        optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = self.rate
        for p, g in zip(twin.parameters(), self.taken[0], strict=True):
            p.grad = g
        optimizer.step()
        start, alone, found = (flat(each) for each in (before.values(), twin.parameters(), self.model.parameters()))
        return float((found - alone).norm() / (alone - start).norm())


def _model(weights: dict[str, Tensor] | None = None) -> Transformer:
    model = Transformer(seed=399, length=33, dtype=torch.float64)
    model.load_state_dict(weights or model.state_dict())
    return model


def _run(
    check: str,
    weights: dict[str, Tensor],
    microbatches: list[Batch],
    outcome: sandbox.Outcome,
    passes: int,
    found: list[Tensor],
) -> Run:
    def hand_over(model: Transformer, _: object) -> None:
        for p, g in zip(model.parameters(), found, strict=True):
            p.grad = g

    measured = compare(_model(weights), microbatches, hand_over) if found and not outcome.error else None
    return Run(check, 399, microbatches, outcome, "", passes, found, measured)


@quota_threads(1)
def step(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `step(model, optimizer, scheduler, microbatches)`: one update, called for window after window.

    >>> def per_microbatch(model, optimizer, scheduler, microbatches):
    ...     for tokens, labels in microbatches:
    ...         next_token_loss(model, tokens, labels, "mean").backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     scheduler.step()
    >>> from labkit.nets import next_token_loss
    >>> print(step(per_microbatch).sentence.partition(":")[0])
    optimizer.step() ran four times in a window of four microbatches (step-per-microbatch)

    A small float64 transformer, AdamW and a LambdaLR; microbatches: a list of (tokens, labels), each [b, T]. Right is
    one optimizer step on the gradient of the window's token mean, one step of the schedule after it, and nothing left
    for the next window. `seconds`: for all windows together.
    """
    if why := refused(function, "model", "optimizer", "scheduler", "microbatches"):
        return Verdict(False, tuple((check, False) for check in CHECKS), why, "")
    watch = Watch()
    updates: list[Update] = []
    for check, seed, sequences, K in WINDOWS:
        left = max(seconds - sum(update.run.outcome.seconds for update in updates), seconds / 5)
        microbatches = split(*batch(seed, sequences, shortest=4, text="made"), K)
        updates.append(watch.call(function, check, microbatches, left))
        if updates[-1].run.outcome.error:
            break
    whole = len(updates) == len(WINDOWS) and not updates[-1].run.outcome.error
    held = [whole and all(each) for each in zip(*(update.held for update in updates), strict=True)]
    sentence = " ".join(_said(updates)) or "Right: one step on the whole window's token mean, then one of the schedule."
    shown = next((update for update in updates if not all(update.held)), updates[0]).run.outcome
    return Verdict(all(held), tuple(zip(CHECKS, held, strict=True)), sentence + aside(shown), shown.printed)


def _said(updates: list[Update]) -> Iterator[str]:
    """Every fault in a sentence, in the order in which a window meets them."""
    first, last = updates[0], updates[-1].run
    if last.outcome.error:
        yield last.outcome.error if len(updates) == 1 else within(last.check, last.outcome.error)
        return
    K = len(first.run.microbatches)
    yield from _optimizer(first, K)
    if any(update.carried for update in updates):
        yield f"The first backward() of a window meets the gradient of the one before (stale-gradient): {CLEAR}."
    runs = [update.run for update in updates if update.steps == 1]
    if runs and not all(run.right for run in runs):
        yield faults(runs)
    yield from _schedule(updates, K)


CLEAR = "call zero_grad() once a window, before its first backward() or after the step"


def _optimizer(update: Update, K: int) -> Iterator[str]:
    if update.steps == 0:
        yield "optimizer.step() never ran, so no weight moved (no-step): call it once, after the last backward()."
    elif update.steps > 1:
        what = f"optimizer.step() ran {times(update.steps)} in a window of {word(K)} microbatches (step-per-microbatch)"
        yield f"{what}: {rule('step-per-microbatch').fix}."
    elif update.count != 1:
        what = f"Adam's own count moved by {update.count} in one update (adam-count-per-microbatch)"
        yield f"{what}: {rule('adam-count-per-microbatch').fix}."
    elif update.strayed > ROUNDED:
        what = f"Something besides optimizer.step() moves the weights, by {percent(update.strayed)} of its update"
        yield f"{what}: leave decay and everything else to the optimizer."


def _schedule(updates: list[Update], K: int) -> Iterator[str]:
    first, counts = updates[0], [update.schedule for update in updates]
    if first.schedule == 0:
        yield "scheduler.step() never ran, so the learning rate stays: call it once, after optimizer.step()."
    elif first.schedule > 1:
        same = len(counts) > 1 and len(set(counts)) == 1
        name = "schedule-per-process" if same else "schedule-per-microbatch"
        where = "every window, whatever it holds" if same else f"a window of {word(K)} microbatches"
        yield f"scheduler.step() ran {times(first.schedule)} in {where} ({name}): {rule(name).fix}."
    elif first.early:
        yield "scheduler.step() ran before optimizer.step(), so the first learning rate is never used: call it after."


CASES = {
    "the first step": (1, 8, 0.9, 0.999),
    "a step in the middle": (30, 8, 0.9, 0.999),
    "a late step": (10_000, 8, 0.9, 0.999),
    "no accumulation": (3, 1, 0.9, 0.999),
    "other betas": (5, 4, 0.8, 0.95),
}
Correction = Callable[[float, int, int], float]
EXPONENT: dict[str, Correction] = {
    "": lambda beta, s, K: (1 - beta**s) / (1 - beta ** (s * K)),
    "the wrong count is step + accumulation, and it is step times accumulation": (
        lambda beta, s, K: (1 - beta**s) / (1 - beta ** (s + K))
    ),
    "the wrong count is accumulation alone, whatever the step": lambda beta, s, K: (1 - beta**s) / (1 - beta**K),
    "the right count is not 1, it is the step": lambda beta, s, K: (1 - beta) / (1 - beta ** (s * K)),
}
TOGETHER: dict[str, Callable[[float, float], float]] = {
    "": lambda m, v: m / math.sqrt(v),
    "the root of the second moment is missing": lambda m, v: m / v,
    "only the first moment's correction is there": lambda m, v: m,
    "only the second moment's correction is there": lambda m, v: 1 / math.sqrt(v),
    "it is upside down, right over wrong": lambda m, v: math.sqrt(v) / m,
    "m and v are multiplied, and the update is m over the root of v": lambda m, v: m * math.sqrt(v),
}


def _ratio(exponent: str, together: str, swapped: bool) -> Callable[..., float]:
    def ratio(s: int, K: int, beta1: float, beta2: float) -> float:
        betas = (beta2, beta1) if swapped else (beta1, beta2)
        m, v = (EXPONENT[exponent](beta, s, K) for beta in betas)
        return TOGETHER[together](m, v)

    return ratio


ADAM_RATIO = Exercise(
    ("step", "accumulation", "beta1", "beta2"),
    CASES,
    lambda s, K, beta1, beta2: adam_step_ratio(s, K, (beta1, beta2)),
    {
        "; ".join(filter(None, (exponent, together, swapped))): _ratio(exponent, together, bool(swapped))
        for swapped in ("", "beta1 and beta2 are swapped")
        for exponent in EXPONENT
        for together in TOGETHER
        if exponent or together or swapped
    }
    | {"that is the right update over itself": lambda s, K, beta1, beta2: 1.0},
)


def adam_ratio(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `adam_ratio(step, accumulation, beta1, beta2)`: the update with t counted per microbatch, over the right.

    >>> adam_ratio(lambda s, K, beta1, beta2: (1 - beta1**s) / (1 - beta1 ** (s * K))).sentence.partition(": ")[2]
    "only the first moment's correction is there."

    Constant gradient, ε = 0. Source: `labkit.cadence.adam_step_ratio`, tested against torch's optimizer.
    """
    return ADAM_RATIO.judge(function, seconds)
