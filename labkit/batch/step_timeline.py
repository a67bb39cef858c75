"""One optimizer step in time, modelled: where the milliseconds of a step go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from labkit.declare import Range, Switch, quantity

Steps = Annotated[int, Range(1, 64, log=True, unit="microbatches", help="K, microbatches of one optimizer step")]


@dataclass(frozen=True)
class Part:
    """A stretch of time in one optimizer step."""

    name: str = quantity("what is done")
    start: float = quantity("from the start of the step", "ms")
    end: float = quantity("from the start of the step", "ms")


@dataclass(frozen=True)
class Timeline:
    """One optimizer step in time."""

    parts: tuple[Part, ...] = quantity("what happens when")
    total: float = quantity("the whole step", "ms")
    forward: float = quantity("K forward passes", "ms")
    backward: float = quantity("K backward passes", "ms")
    waiting: float = quantity("synchronisation that nothing hides", "ms")
    optimizer: float = quantity("the optimizer's own time", "ms")
    hidden: float = quantity("synchronisation that runs beside a backward pass", "ms")
    unaccumulated: float = quantity("K optimizer steps of one microbatch each, for comparison", "ms")


def timeline(
    *,
    accumulation_steps: Steps = 4,
    forward: Annotated[float, Range(1, 1000, log=True, unit="ms", help="one forward pass")] = 60.0,
    backward: Annotated[float, Range(1, 2000, log=True, unit="ms", help="one backward pass")] = 120.0,
    synchronise: Annotated[float, Range(0, 1000, step=10, unit="ms", help="averaging over the replicas, once")] = 90.0,
    optimizer: Annotated[float, Range(0, 500, step=5, unit="ms", help="the update of the weights")] = 30.0,
    overlap: Annotated[
        float, Range(0, 1, step=0.05, help="share of a backward pass beside which synchronisation can run")
    ] = 0.0,
    every_microbatch: Annotated[bool, Switch(help="wrong: synchronised after every backward pass")] = False,
) -> Timeline:
    """One optimizer step in time, modelled: K times forward and backward, then synchronise, then update.

    >>> step = timeline()
    >>> step.total, step.waiting, timeline(every_microbatch=True).waiting
    (840.0, 90.0, 360.0)

    Nothing here is run: five times are added up. Synchronisation costs the passes beside it nothing, and the input
    pipeline and bubbles are left out.
    """
    now, hidden, waiting, parts = 0.0, 0.0, 0.0, []
    for m in range(accumulation_steps):
        middle, end = now + forward, now + forward + backward
        parts += [Part("forward", now, middle), Part("backward", middle, end)]
        now = end
        if every_microbatch or m == accumulation_steps - 1:
            beside = min(synchronise, overlap * backward)
            now = end + synchronise - beside
            parts.append(Part("synchronise", end - beside, now))
            hidden, waiting = hidden + beside, waiting + synchronise - beside
    parts.append(Part("update", now, now + optimizer))
    K, alone = accumulation_steps, synchronise - min(synchronise, overlap * backward)
    single = forward + backward + alone + optimizer
    return Timeline(tuple(parts), now + optimizer, K * forward, K * backward, waiting, optimizer, hidden, K * single)
