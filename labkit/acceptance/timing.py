"""The fourth gate: valid tokens a second, both sides in turn, timed from update to update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from labkit.acceptance.record import FAILED, PASSED, UNSURE
from labkit.acceptance.side import SEED, TestedStep, update
from labkit.audit.runs import seeded
from labkit.decision import Decision
from labkit.errors import LabError

Clock = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """The runs of both sides, in the order base, candidate."""

    seconds: tuple[tuple[float, ...], tuple[float, ...]]
    throughputs: tuple[tuple[float, ...], tuple[float, ...]]
    updates: int  # of one run


def time_sides(sides: Sequence[TestedStep], runs: int, seconds: float, clock: Clock) -> Timing:
    """Seconds and throughput of each run: warm, A B A B, from before an update to after one.

    A run makes as many updates as the faster side makes in `seconds`, at least one.
    """
    with seeded(SEED):
        steps = [side.build() for side in sides]

        def run(at: int, updates: int) -> float:
            model, step = steps[at]
            settle(model)
            start = clock()
            for _ in range(updates):
                update(step, sides[at].microbatches)
            settle(model)
            return clock() - start

        warm = [[run(at, 1) for at in range(2)] for _ in range(2)][1]  # the first compiles, the second counts
        updates = max(1, math.ceil(seconds / max(min(warm), 1e-9)))
        rounds = [[run(at, updates) for at in range(2)] for _ in range(runs)]
    return _per_second(sides, rounds, updates)


def _per_second(sides: Sequence[TestedStep], rounds: list[list[float]], updates: int) -> Timing:
    base, candidate = (tuple(round[at] for round in rounds) for at in range(2))
    if not min(*base, *candidate) > 0:
        raise LabError(f"a run took {min(*base, *candidate):g} s by this clock: try one that advances")
    rates = [
        tuple(side.tokens * updates / each for each in times)
        for side, times in zip(sides, (base, candidate), strict=True)
    ]
    return Timing((base, candidate), (rates[0], rates[1]), updates)


def settle(model: nn.Module) -> None:
    """Wait for what a GPU still has to do.

    >>> settle(nn.Linear(1, 1))
    """
    if any(p.is_cuda for p in model.parameters()):
        torch.cuda.synchronize()


def check_throughput(decision: Decision) -> tuple[str, str]:
    """The fourth gate: whether the candidate's throughput is higher by the margin."""
    outcome = {"faster": PASSED, "not faster": FAILED}.get(decision.verdict, UNSURE)
    return outcome, decision.explain()
