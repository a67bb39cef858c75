"""A schedule of the learning rate, against optimizer steps and against samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from labkit.declare import Choice, Range, quantity
from labkit.errors import LabError

EVALUATE_EVERY = 100
GROWTH_INTERVAL = 2000  # torch.amp.GradScaler's: so many successes in a row double the loss scale
RULES = ("once-per-window", "schedule-per-microbatch", "schedule-per-process")
Method = Annotated[str, Choice(RULES, help="how often the schedule steps for one optimizer step")]
Steps = Annotated[int, Range(1, 16, log=True, unit="microbatches", help="K, microbatches of one optimizer step")]


def warmup_cosine(warmup: float, last: float) -> Callable[[float], float]:
    """Learning rate over its base at an index of the schedule: a line from 0 to 1, then a cosine to 0, where it stays.

    >>> [round(warmup_cosine(10, 30)(index), 3) for index in (0, 5, 10, 20, 30, 40)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """

    def factor(index: float) -> float:
        if index < warmup:
            return index / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (index - warmup) / (last - warmup))))

    return factor


@dataclass(frozen=True, eq=False)
class Schedules:
    """A schedule stepped by a rule, beside the correct one, and other things that are counted in microbatches."""

    rule: str = quantity("the rule's word")
    updates: Tensor = quantity("optimizer steps made, 0 … U")
    samples: Tensor = quantity("sequences seen until then", "sequences")
    right: Tensor = quantity("learning rate of the next update over its base, [U + 1]")
    wrong: Tensor = quantity("the same by the rule, [U + 1]")
    warmup_ends: int = quantity("optimizer steps after which the warmup is over", "optimizer steps")
    wrong_warmup_ends: int = quantity("the same by the rule", "optimizer steps")
    wrong_ends: int = quantity("optimizer steps after which the learning rate is 0, by the rule", "optimizer steps")
    area_ratio: float = quantity("Σ learning rates by the rule / Σ right ones, over all updates")
    evaluations_right: int = quantity("evaluations, one every 100 optimizer steps")
    evaluations_wrong: int = quantity("evaluations, one every 100 microbatches")
    scaler_growths_right: int = quantity("doublings of the loss scale, one after 2000 optimizer steps in a row")
    scaler_growths_wrong: int = quantity("doublings of the loss scale, one after 2000 microbatches in a row")


def schedules(
    *,
    rule: Method = "schedule-per-microbatch",
    accumulation_steps: Steps = 8,
    world_size: Annotated[int, Range(1, 8, log=True, unit="replicas", help="W, data-parallel replicas")] = 4,
    microbatch: Annotated[int, Range(1, 64, log=True, unit="sequences", help="b, sequences of one microbatch")] = 4,
    warmup: Annotated[int, Range(0, 200, unit="optimizer steps", help="updates until the full learning rate")] = 100,
    updates: Annotated[int, Range(100, 1000, unit="optimizer steps", help="U, updates of the whole training")] = 500,
) -> Schedules:
    """Warmup and cosine by torch's LambdaLR, stepped once for an optimizer step, K times, or once for every process.

    >>> schedule = schedules()
    >>> schedule.warmup_ends, schedule.wrong_warmup_ends, schedule.wrong_ends
    (100, 13, 63)

    No gradient is needed to count. Raises LabError for a warmup that leaves no update for the decay.
    """
    if warmup >= updates:
        raise LabError(f"warmup = {warmup} of {updates} updates leaves none for the decay: try {updates - 1}")
    K, W = accumulation_steps, world_size
    times = {"once-per-window": 1, "schedule-per-microbatch": K, "schedule-per-process": W}[rule]
    right, _ = run_schedule(warmup_cosine(warmup, updates), updates, 1)
    wrong, index = run_schedule(warmup_cosine(warmup, updates), updates, times)
    at = torch.arange(updates + 1)
    return Schedules(
        rule,
        at,
        at * microbatch * K * W,
        right,
        wrong,
        warmup_ends=warmup,
        wrong_warmup_ends=int((index >= warmup).nonzero()[0]),
        wrong_ends=int((index >= updates).nonzero()[0]),
        area_ratio=float(wrong[:-1].sum() / right[:-1].sum()),
        evaluations_right=evaluations(updates, 1),
        evaluations_wrong=evaluations(updates, K),
        scaler_growths_right=growths(updates, 1),
        scaler_growths_wrong=growths(updates, K),
    )


def run_schedule(factor: Callable[[float], float], updates: int, times: int) -> tuple[Tensor, Tensor]:
    """Learning rate over its base and index of a schedule, before the first update and after each, [U + 1] each.

    >>> run_schedule(lambda index: 1 - index / 4, updates=2, times=2)
    (tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64), tensor([0, 2, 4]))
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = LambdaLR(optimizer, factor)
    rates, index = [optimizer.param_groups[0]["lr"]], [scheduler.last_epoch]
    for _ in range(updates):
        optimizer.step()
        for _ in range(times):
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        index.append(scheduler.last_epoch)
    return torch.tensor(rates, dtype=torch.float64), torch.tensor(index)


def evaluations(updates: int, times: int) -> int:
    """How often a loop evaluates that counts so many times for an optimizer step.

    >>> evaluations(250, 1), evaluations(250, 8)
    (2, 20)
    """
    evaluated = 0
    for count in range(1, updates * times + 1):
        if count % EVALUATE_EVERY == 0:
            evaluated += 1
    return evaluated


def growths(updates: int, times: int) -> int:
    """How often a loss scaler grows that is updated so many times for an optimizer step, where nothing overflows.

    >>> growths(1000, 1), growths(1000, 8)
    (0, 4)
    """
    successes = grown = 0
    for _ in range(updates * times):
        successes += 1
        if successes == GROWTH_INTERVAL:
            grown += 1
            successes = 0
    return grown
