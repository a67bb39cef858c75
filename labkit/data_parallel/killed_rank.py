"""A rank killed in the middle of a step: the message, how soon it comes, and whether the next run works."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Annotated

import torch.distributed as dist

from labkit import workers
from labkit.declare import Range, quantity
from labkit.errors import LabError


def run_doomed(rank: int, world: int, *, victim: int) -> None:
    """All ranks meet, then one dies, and the others wait for it in a collective."""
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    dist.barrier()


@dataclass(frozen=True)
class Killed:
    """The outcome of a run in which a rank was killed."""

    victim: int = quantity("the rank that was killed")
    said: str = quantity("the sentence that the notebook gets")
    noticed: float = quantity("from the call to the sentence", "s")
    again: float = quantity("from then until new ranks have answered", "s")
    answers: tuple[float, ...] = quantity("the sum of 1 over the ranks, as each new rank has it")


def killed(
    *,
    ranks: Annotated[int, Range(2, 4, unit="ranks", help="W, processes")] = 2,
    victim: Annotated[int, Range(0, 3, help="the rank that is killed")] = 1,
) -> Killed:
    """Kill a rank while the others wait for it, and run again.

    >>> outcome = killed()
    >>> outcome.said.partition(" (")[0]
    'rank 1 of 2 was killed by SIGKILL'
    >>> outcome.answers
    (2.0, 2.0)

    A real SIGKILL. Raises LabError for a rank that does not exist, and under torchrun, which then ends everything.
    """
    if victim >= ranks:
        raise LabError(f"victim = {victim} is no rank of 0 … {ranks - 1}: try {ranks - 1}")
    if dist.is_torchelastic_launched():
        raise LabError("under torchrun a killed rank ends the whole job: try it in a notebook")
    workers.run("labkit.workers:total", ranks, value=1)
    start, said = time.perf_counter(), ""
    try:
        workers.run("labkit.data_parallel.killed_rank:run_doomed", ranks, victim=victim)
    except LabError as error:
        said = str(error)
    noticed = time.perf_counter()
    answers = workers.run("labkit.workers:total", ranks, value=1)
    return Killed(victim, said, noticed - start, time.perf_counter() - noticed, tuple(answers))
