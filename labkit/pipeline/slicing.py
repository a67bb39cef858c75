"""A fixed batch in more and smaller microbatches: less bubble, slower kernels, more messages; each measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit import workers
from labkit.declare import Choice, Range, quantity
from labkit.device import Spread
from labkit.pipeline.stages import Ranks, accepts, build, step
from labkit.pipeline.timing import bubble

LAYERS = 4  # matmuls of a stage
REPEATS = 5
FINEST = 32  # microbatches at most


# What a rank does.


class Layers(nn.Module):
    """A stage that computes: four matmuls (b × d)·(d × d), each with a relu.

    >>> Layers(8)(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Rows [b, d] in and out."""
        for weight in self.weights:
            x = (x @ weight).relu()
        return x


def run(
    rank: int, world: int, *, schedule: str, rows: int, width: int, microbatches: int, repeats: int
) -> list[list[tuple[float, float]]]:
    """Begin and end of passes and of messages there and back, 3 × `repeats` each, and of `repeats` whole steps."""
    stage, b = Layers(width), rows // microbatches
    x, batch = torch.ones(b, width), torch.ones(rows, width)
    pipeline = build(schedule, [stage], rank, world, microbatches, loss_fn=lambda out, target: out.sum())
    passes = time_calls(lambda: there_and_back(stage, x), 3 * repeats)
    messages = time_calls(lambda: echo(rank, x), 3 * repeats)
    return [passes, messages, time_calls(lambda: step(pipeline, rank, world, batch, batch), repeats)]


def there_and_back(stage: nn.Module, x: Tensor) -> None:
    """One forward and one backward pass of a microbatch, as a stage in the middle has them."""
    y = stage(x.requires_grad_())
    y.backward(torch.ones_like(y))


def echo(rank: int, x: Tensor) -> None:
    """A microbatch's activations from rank 0 to rank 1, and as many numbers back."""
    if rank == 0:
        dist.send(x.detach(), 1)
        dist.recv(torch.empty_like(x), 1)
    elif rank == 1:
        dist.recv(torch.empty_like(x), 0)
        dist.send(x.detach(), 0)


def time_calls(work: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Begin and end of each of `repeats` calls, in seconds; all ranks begin together, and once to warm up."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        work()
        times.append((begin, time.perf_counter()))
    return times[1:]


# The sweep.


@dataclass(frozen=True)
class Slice:
    """One number of microbatches at the fixed batch."""

    microbatches: int = quantity("M")
    rows: int = quantity("b, rows of a microbatch", "rows")
    bubble: float = quantity("(P − 1) / (M + P − 1), modelled")
    passes: Spread = quantity("forward and backward of one microbatch on the slowest rank, measured", "ms")
    rate: float = quantity("of the matmuls in the fastest of these passes, measured", "GFLOP/s")
    payload: int = quantity("bytes of one message", "B")
    message: Spread = quantity("one message, half of there and back, measured", "ms")
    modelled: float = quantity("(M + P − 1) · (passes + two messages), the least that was measured of each", "ms")
    step: Spread = quantity("a whole step of the real schedule, measured", "ms")


@dataclass(frozen=True)
class Slices:
    """The time of a step over the number of microbatches, the batch being fixed."""

    schedule: str = quantity("the order in which a rank works")
    ranks: int = quantity("P, processes", "ranks")
    batch: int = quantity("rows of the whole batch", "rows")
    sizes: tuple[int, ...] = quantity("M, all that are measured", "microbatches")
    slices: tuple[Slice, ...] = quantity("what was measured for each")

    @property
    def progress(self) -> float:
        """Share of the sweep that is done."""
        return len(self.slices) / len(self.sizes)

    @property
    def best(self) -> Slice:
        """The slice with the least time by its parts."""
        return min(self.slices, key=lambda each: each.modelled)

    @property
    def fastest(self) -> Slice:
        """The slice whose whole step took the least time, by the median."""
        return min(self.slices, key=lambda each: each.step.median)


def cut(
    *,
    batch: Annotated[int, Range(64, 512, log=True, unit="rows", help="rows of the batch, however it is cut")] = 512,
    width: Annotated[int, Range(64, 256, log=True, unit="columns", help="rows and columns d of the weights")] = 256,
    schedule: Annotated[str, Choice(("GPipe", "1F1B"), help="the order in which a rank works")] = "GPipe",
    ranks: Ranks = 2,
) -> Iterator[Slices]:
    """A step of a real pipeline for M = 1, 2, 4, … microbatches of one batch, and the parts that its time is made of.

    >>> next(cut(batch=64)).sizes
    (1, 2, 4, 8, 16, 32)

    float32; four matmuls a stage. The model takes all passes to be alike and no message to be hidden. Numbers of
    microbatches that do not divide the batch, or that the schedule does not take, are left out.
    """
    sizes = tuple(M for M in (1, 2, 4, 8, 16, FINEST) if batch % M == 0 and accepts(schedule, ranks, M))
    slices: tuple[Slice, ...] = ()
    yield Slices(schedule, ranks, batch, sizes, slices)
    for M in sizes:
        slices = (*slices, measure(M, batch, width, schedule, ranks))
        yield Slices(schedule, ranks, batch, sizes, slices)


def measure(M: int, batch: int, width: int, schedule: str, ranks: int) -> Slice:
    """One number of microbatches, measured on the ranks."""
    values: dict[str, Any] = {"schedule": schedule, "rows": batch, "width": width, "microbatches": M}
    answers = workers.run("labkit.pipeline.slicing:run", ranks, repeats=REPEATS, **values)
    passes, messages, steps = zip(*answers, strict=True)
    slowest = Spread.of([max(1e3 * (end - begin) for begin, end in each) for each in zip(*passes, strict=True)])
    message = Spread.of([1e3 * (end - begin) / 2 for begin, end in messages[0]])
    whole = Spread.of([1e3 * span(each) for each in zip(*steps, strict=True)])
    b, slots = batch // M, M + ranks - 1
    return Slice(
        M,
        b,
        bubble(ranks, M),
        slowest,
        rate=6 * LAYERS * b * width**2 / slowest.lowest / 1e6,
        payload=4 * b * width,
        message=message,
        modelled=slots * (slowest.lowest + 2 * message.lowest),
        step=whole,
    )


def span(times: Sequence[tuple[float, float]]) -> float:
    """From the first begin to the last end.

    >>> span([(1.0, 2.0), (1.5, 4.0)])
    3.0
    """
    return max(end for _, end in times) - min(begin for begin, _ in times)
