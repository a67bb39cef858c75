"""How an optimizer step spends its time on real ranks: microbatches, all-reduces, the optimizer's step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from labkit import workers
from labkit.data_parallel.compare import Ranks
from labkit.data_parallel.hook import Span, record_span
from labkit.declare import Range, quantity
from labkit.device import Spread

WIDTH, LAYERS = 256, 4  # four matrices of 0.25 MiB
TIMES = 5  # steps that are measured

Ticks = list[float]  # perf_counter seconds: the start, the end of every microbatch, the end of the optimizer's step
Step = tuple[Ticks, list[Span]]


def accumulate(model: DistributedDataParallel, microbatches: Sequence[Tensor], now: Ticks) -> None:
    """K microbatches, the last one synchronised."""
    with model.no_sync():
        for x in microbatches[:-1]:
            model(x).square().mean().backward()
            now.append(time.perf_counter())
    model(microbatches[-1]).square().mean().backward()
    now.append(time.perf_counter())


def accumulate_alone(model: DistributedDataParallel, microbatches: Sequence[Tensor], now: Ticks) -> None:
    """The same work with no synchronisation at all: for comparison only."""
    with model.no_sync():
        for x in microbatches:
            model(x).square().mean().backward()
            now.append(time.perf_counter())


def update(optimizer: Optimizer, now: Ticks) -> None:
    """The optimizer's own step."""
    optimizer.step()
    optimizer.zero_grad()
    now.append(time.perf_counter())


def run_steps(rank: int, world: int, *, K: int, rows: int, cap: float, repeats: int) -> tuple[list[Step], list[Ticks]]:
    """Steps with one synchronisation, and in turn with none, timed on this rank."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model, spans = DistributedDataParallel(layers, bucket_cap_mb=cap), list[Span]()
    model.register_comm_hook(spans, record_span)
    optimizer = SGD(model.parameters(), lr=1e-3)
    microbatches = [torch.randn(rows, WIDTH) for _ in range(K)]

    def step(microsteps: Callable[[DistributedDataParallel, Sequence[Tensor], Ticks], None]) -> Ticks:
        spans.clear()
        dist.barrier()
        now = [time.perf_counter()]
        microsteps(model, microbatches, now)
        update(optimizer, now)
        return now

    for _ in range(2):  # they warm up: the buckets are built anew after the first
        step(accumulate)
    steps, alone = [], []
    for _ in range(repeats):
        steps.append((step(accumulate), list(spans)))
        alone.append(step(accumulate_alone))
    return steps, alone


@dataclass(frozen=True)
class Stretch:
    """A stretch of time on one rank."""

    rank: int = quantity("the rank")
    name: str = quantity("microbatch, wait, update or all-reduce")
    start: float = quantity("from the start of the step", "ms")
    end: float = quantity("from the start of the step", "ms")


@dataclass(frozen=True)
class Timeline:
    """One optimizer step on every rank as it was measured, and the spread of its parts over several."""

    ranks: int = quantity("W", "ranks")
    messages: int = quantity("all-reduces of one step")
    microbatch: Spread = quantity("forward and backward of a microbatch that does not synchronise", "ms")
    synchronisation: Spread = quantity("from the first bucket's start to the last bucket's end", "ms")
    hidden: Spread = quantity("the part of it beside which a backward still computes", "ms")
    exposed: Spread = quantity("the part after the last gradient: the rank only waits", "ms")
    optimizer: Spread = quantity("the optimizer's own step", "ms")
    step: Spread = quantity("the whole optimizer step, the slowest rank", "ms")
    longer: float = quantity("median step less the median of the same work without synchronisation", "ms")
    stretches: tuple[Stretch, ...] = quantity("the step whose length is the median, on each rank")

    @property
    def hidden_share(self) -> float:
        """The share of the synchronisation that a backward hides, by medians."""
        return self.hidden.median / (self.hidden.median + self.exposed.median)


def timeline(
    *,
    ranks: Ranks = 2,
    accumulation_steps: Annotated[
        int, Range(1, 8, unit="microbatches", help="K, microbatches of each rank in one optimizer step")
    ] = 4,
    rows: Annotated[int, Range(8, 256, log=True, unit="rows", help="b, examples in a microbatch")] = 32,
    bucket_cap: Annotated[float, Range(0.1, 25, log=True, unit="MiB", help="DDP's bucket_cap_mb")] = 0.25,
) -> Timeline:
    """One optimizer step on real ranks, in time: how long synchronisation takes, and how much of it is hidden.

    >>> step = timeline(bucket_cap=25)
    >>> step.messages, len({each.rank for each in step.stretches})
    (1, 2)

    Four layers of 256 × 256, float32, SGD. perf_counter is one clock for all processes of a machine. A communication
    hook notes when a bucket leaves and when its mean is there. The last bucket leaves when the last gradient is
    there: the time from then to the end of backward is exposed. Five steps; all figures change from run to run.
    """
    run = "labkit.data_parallel.step_timeline:run_steps"
    answers = workers.run(run, ranks, K=accumulation_steps, rows=rows, cap=bucket_cap, repeats=TIMES)
    steps = [step for steps, _ in answers for step in steps]
    alone = [ticks for _, alone in answers for ticks in alone]
    lengths = _slowest([[ticks for ticks, _ in steps] for steps, _ in answers])
    middle = sorted(range(TIMES), key=lengths.__getitem__)[TIMES // 2]
    return Timeline(
        ranks,
        messages=len(steps[0][1]),
        microbatch=_spread([end - start for ticks in alone for start, end in itertools.pairwise(ticks[:-1])]),
        synchronisation=_spread([_last(spans) - spans[0][0] for _, spans in steps]),
        hidden=_spread([spans[-1][0] - spans[0][0] for _, spans in steps]),
        exposed=_spread([ticks[-2] - spans[-1][0] for ticks, spans in steps]),
        optimizer=_spread([ticks[-1] - ticks[-2] for ticks, _ in steps]),
        step=_spread(lengths),
        longer=_spread(lengths).median - _spread(_slowest([alone for _, alone in answers])).median,
        stretches=_stretches([steps[middle] for steps, _ in answers]),
    )


def _spread(seconds: list[float]) -> Spread:
    return Spread.of([1e3 * each for each in seconds])


def _slowest(ranks: list[list[Ticks]]) -> list[float]:
    """The length of every step on the rank that took longest."""
    return [max(ticks[-1] - ticks[0] for ticks in step) for step in zip(*ranks, strict=True)]


def _last(spans: list[Span]) -> float:
    return max(end for _, end in spans)


def _stretches(steps: list[Step]) -> tuple[Stretch, ...]:
    """One step of every rank, in milliseconds from its earliest start."""
    zero, stretches = min(ticks[0] for ticks, _ in steps), list[Stretch]()
    for rank, (ticks, spans) in enumerate(steps):
        waits = spans[-1][0]
        edges = [*ticks[:-2], waits, ticks[-2], ticks[-1]]
        names = ["microbatch"] * (len(ticks) - 2) + ["wait", "update"]
        parts = [*zip(names, edges[:-1], edges[1:], strict=True)]
        parts += [("all-reduce", departure, arrival) for departure, arrival in spans]
        for name, start, end in parts:
            stretches.append(Stretch(rank, name, 1e3 * (start - zero), 1e3 * (end - zero)))
    return tuple(stretches)
