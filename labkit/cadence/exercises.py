"""The exercises of the cadence lab: a whole update, judged by the audit; and a formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.audit import Report, audit
from labkit.cadence import adam_step_ratio
from labkit.corpus import Batch, batch, split
from labkit.device import quota_threads
from labkit.errors import LabError
from labkit.exercise import sandbox
from labkit.exercise.formula import Exercise
from labkit.exercise.verdict import Function, Verdict, aside, exercise, refusal
from labkit.nets import Transformer, next_token_loss, valid_tokens

WINDOWS = ((399, 9, 4, 2), (2, 6, 3, 1))  # seed, sequences, K, and how often the step is called
CHECKS = {
    "one optimizer step in a window": ("no-step", "step-", "adam-", "moments-", "momentum-", "decay-", "ema-"),
    "its gradient is the token mean of the whole window": (),  # every other word
    "nothing is carried into the next window": ("stale-gradient", "carried-over"),
    "the schedule moves once, after the step": ("schedule-",),
}
OTHERS = tuple(start for starts in CHECKS.values() for start in starts)


def loss_sum(model: Transformer, microbatch: Batch) -> tuple[Tensor, int]:
    """The objective of the exercise, as a sum."""
    return next_token_loss(model, *microbatch, "sum"), valid_tokens(microbatch[1])


class Trial:
    """A learner's function as a step, and how its schedule stood at its optimizer's first step."""

    def __init__(self, function: Function, seconds: float) -> None:
        self.function, self.seconds, self.early = function, seconds, False
        self.outcome: sandbox.Outcome | None = None

    def build(self) -> tuple[Transformer, Callable[[list[Any]], object]]:
        """A model with its step, the same weights each time."""
        model = Transformer(seed=399, length=33, dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

        def first(*_: Any) -> None:
            self.early |= scheduler.last_epoch == 1 and not optimizer.state

        def step(microbatches: list[Any]) -> None:
            copies = [(tokens.clone(), labels.clone()) for tokens, labels in microbatches]
            outcome = sandbox.run(self.function, model, optimizer, scheduler, copies, seconds=self.seconds)
            self.outcome = outcome if self.outcome is None or outcome.error else self.outcome
            if outcome.error:
                raise LabError(outcome.error)

        optimizer.register_step_pre_hook(first)
        return model, step


@exercise
@quota_threads(1)
def step(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `step(model, optimizer, scheduler, microbatches)`: one update, called for window after window.

    >>> from labkit.nets import next_token_loss
    >>> def per_microbatch(model, optimizer, scheduler, microbatches):
    ...     for tokens, labels in microbatches:
    ...         next_token_loss(model, tokens, labels, "mean").backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     scheduler.step()
    >>> step(per_microbatch).passed
    False

    A small float64 transformer, AdamW and a LambdaLR; microbatches: a list of (tokens, labels), each [b, T]. Right is
    one optimizer step on the gradient of the window's token mean, one step of the schedule after it, and nothing left
    for the next window. Judged by `labkit.audit.audit`. `seconds`: for one call.
    """
    if why := refusal(function, "model", "optimizer", "scheduler", "microbatches"):
        return Verdict(False, tuple((check, False) for check in CHECKS), why, "")
    trial = Trial(function, seconds)
    try:
        reports = [
            audit(trial.build, split(*batch(seed, B, shortest=4, text="made"), K), loss_sum, windows=windows)
            for seed, B, K, windows in WINDOWS
        ]
    except LabError as error:
        fault = trial.outcome.error if trial.outcome and trial.outcome.error else f"{error}."
        return Verdict(False, tuple((check, False) for check in CHECKS), fault, "")
    results, fault = _results(reports, trial.early), _sentence(reports, trial.early)
    assert trial.outcome
    sentence = fault or "Right: one step on the whole window's token mean, then one of the schedule."
    return Verdict(
        all(results), tuple(zip(CHECKS, results, strict=True)), sentence + aside(trial.outcome), trial.outcome.printed
    )


def _results(reports: list[Report], early: bool) -> list[bool]:
    words = {word for report in reports for word in report.faults}
    others = {word for word in words if not word.startswith(OTHERS)}
    results = [not any(word.startswith(begin) for word in words) if begin else not others for begin in CHECKS.values()]
    results[1] &= not any(report.clips for report in reports)
    results[3] &= not early and all(report.schedule_steps == 1 for report in reports)
    return results


def _sentence(reports: list[Report], early: bool) -> str:
    """Every fault of the first audit that found some, with its numbers and its fix."""
    report = next((each for each in reports if each.faults), reports[0])
    lines = [f"{fault.said[:-1]} ({fault.word}). The fix: {fault.fix}." for fault in report.details]
    if report.clips:
        lines.append("The gradient was clipped inside: leave that out here.")
    if report.schedule_steps == 0:
        lines.append("scheduler.step() never ran, so the learning rate stays: call it once, after optimizer.step().")
    elif early and report.schedule_steps == 1:
        lines.append("scheduler.step() ran before optimizer.step(), so the first rate is never used: call it after.")
    return " ".join(lines)


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


@exercise
def adam_ratio(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `adam_ratio(step, accumulation, beta1, beta2)`: the update with t counted per microbatch, over the right.

    >>> adam_ratio(lambda s, K, beta1, beta2: (1 - beta1**s) / (1 - beta1 ** (s * K))).sentence.partition(": ")[2]
    "only the first moment's correction is there."

    Constant gradient, ε = 0. Source: `labkit.cadence.adam_step_ratio`, tested against torch's optimizer.
    """
    return ADAM_RATIO.judge(function, seconds)
