"""The rules of cadence: what must happen once in an optimizer step."""

from __future__ import annotations

from collections.abc import Callable

from labkit.cadence.stepping import (
    adam_count_per_microbatch,
    decay_per_microbatch,
    ema_per_microbatch,
    memory_per_microbatch,
    once_per_window,
    schedule_per_microbatch,
    schedule_per_process,
    step_per_microbatch,
)
from labkit.rules import Rule, add, ones


def _rule(word: str, loop: Callable[..., None], changes: str, looks_like: str, fix: str, right: bool = False) -> Rule:
    return Rule(word, loop, ones, looks_like, fix, right=right, topic="cadence", changes=changes)


add(
    _rule(
        "once-per-window",
        once_per_window,
        "",
        "optimizer, schedule and average have counted the same steps, one for K × W microbatches",
        "nothing to fix",
        right=True,
    ),
    _rule(
        "adam-count-per-microbatch",
        adam_count_per_microbatch,
        "Adam's bias correction",
        "Adam's step is K times the optimizer steps; the first updates are too small, then too large, late ones right",
        "count Adam's t once for an optimizer step, beside m and v",
    ),
    _rule(
        "moments-per-microbatch",
        memory_per_microbatch,
        "Adam's m, v and t",
        "Adam's step is K times the optimizer steps; the noisier a microbatch, the smaller the updates",
        "call the optimizer's step once, on the gradient of the whole window",
    ),
    _rule(
        "step-per-microbatch",
        step_per_microbatch,
        "the number of optimizer steps",
        "K times as many optimizer steps as windows; plain SGD hides it, Adam and momentum do not",
        "call the optimizer's step once, after the window's last backward, with the whole learning rate",
    ),
    _rule(
        "momentum-per-microbatch",
        memory_per_microbatch,
        "the momentum buffer",
        "the buffer settles at 1/K of its size, and forgets K times as fast",
        "update the buffer once, with the gradient of the whole window",
    ),
    _rule(
        "decay-per-microbatch",
        decay_per_microbatch,
        "decoupled weight decay",
        "the norm of the weights falls K times as fast; λ/K repairs it",
        "decay once for an optimizer step, inside the optimizer's step",
    ),
    _rule(
        "ema-per-microbatch",
        ema_per_microbatch,
        "the average of the weights",
        "the average follows the weights K times as closely: its decay is decay^K",
        "update the average once, after the optimizer's step",
    ),
    _rule(
        "schedule-per-microbatch",
        schedule_per_microbatch,
        "the learning rate",
        "warmup and decay end K times too early; the schedule's index is K times the optimizer steps",
        "step the schedule once, after the optimizer's step",
    ),
    _rule(
        "schedule-per-process",
        schedule_per_process,
        "the learning rate",
        "warmup and decay end W times too early, and right on one process",
        "step the schedule once on every process; leave it unprepared where the wrapper steps it for all",
    ),
)
