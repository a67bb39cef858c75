"""When a step synchronises: no_sync, counted by a communication hook, and the buckets that gradients travel in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit import workers
from labkit.corpus import Batch, Seed
from labkit.data_parallel.compare import Ranks, apart, draw_batches, share
from labkit.data_parallel.hook import record_bytes
from labkit.data_parallel.rank_losses import Plain, from_lists, gradient_list, replica
from labkit.declare import Range, quantity
from labkit.device import Spread
from labkit.fit import distance
from labkit.nets import next_token_loss

Loss = Callable[[nn.Module, Batch], Tensor]
Model = DistributedDataParallel


# Six ways to place no_sync. loss(model, microbatch) is the correct share, summed loss × W / N.


def nowhere(model: Model, microbatches: Sequence[Batch], loss: Loss) -> None:
    """The correct gradient, with K times as many all-reduces."""
    for microbatch in microbatches:
        loss(model, microbatch).backward()


def forward_and_backward(model: Model, microbatches: Sequence[Batch], loss: Loss) -> None:
    """Right: forward and backward of all but the last."""
    for microbatch in microbatches[:-1]:
        with model.no_sync():
            loss(model, microbatch).backward()
    loss(model, microbatches[-1]).backward()


def only_backward(model: Model, microbatches: Sequence[Batch], loss: Loss) -> None:
    """The forward has armed the synchronisation already, so no_sync comes too late."""
    for at, microbatch in enumerate(microbatches):
        loss_ = loss(model, microbatch)
        with model.no_sync() if at < len(microbatches) - 1 else contextlib.nullcontext():
            loss_.backward()


def only_forward(model: Model, microbatches: Sequence[Batch], loss: Loss) -> None:
    """It is the forward that decides."""
    for at, microbatch in enumerate(microbatches):
        with model.no_sync() if at < len(microbatches) - 1 else contextlib.nullcontext():
            loss_ = loss(model, microbatch)
        loss_.backward()


def last_too(model: Model, microbatches: Sequence[Batch], loss: Loss) -> None:
    """Wrong: nothing is ever synchronised."""
    with model.no_sync():
        for microbatch in microbatches:
            loss(model, microbatch).backward()


def first_instead(model: Model, microbatches: Sequence[Batch], loss: Loss) -> None:
    """Wrong: the first is synchronised, and all later ones stay local."""
    loss(model, microbatches[0]).backward()
    with model.no_sync():
        for microbatch in microbatches[1:]:
            loss(model, microbatch).backward()


PATTERNS = {
    "nowhere": nowhere,
    "forward and backward": forward_and_backward,
    "only backward": only_backward,
    "only forward": only_forward,
    "the last one too": last_too,
    "all but the first": first_instead,
}


def run_patterns(
    rank: int, world: int, *, batches: Sequence[Plain], total: int, seed: int
) -> list[tuple[list[int], list[float]]]:
    """For every pattern: the bytes of each all-reduce, and the gradient on this rank."""

    def loss(model: nn.Module, microbatch: Batch) -> Tensor:
        return next_token_loss(model, *microbatch, "sum") * world / total

    results = []
    for pattern in PATTERNS.values():
        model, messages = replica(seed), list[int]()
        model.register_comm_hook(messages, record_bytes)
        pattern(model, from_lists(batches[rank]), loss)
        results.append((messages, gradient_list(model)))
    return results


@dataclass(frozen=True)
class Pattern:
    """One placing of no_sync, and its effect."""

    name: str = quantity("what stands inside no_sync, of all microbatches but the last")
    all_reduces: int = quantity("all-reduces of one optimizer step, on each rank")
    bytes: int = quantity("gradient that each rank gave into them", "byte")
    relative_error: float = quantity("‖g − G‖ / ‖G‖ on the first rank")
    apart: float = quantity("‖g_r − g_0‖ / ‖G‖, the farthest rank")


@dataclass(frozen=True)
class Collectives:
    """One optimizer step under each placing of no_sync."""

    accumulation_steps: int = quantity("K", "microbatches")
    ranks: int = quantity("W", "ranks")
    tolerance: float = quantity("relative error that rounding alone explains")
    patterns: tuple[Pattern, ...] = quantity("what each did")


def collectives(
    *,
    ranks: Ranks = 2,
    accumulation_steps: Annotated[
        int, Range(1, 6, unit="microbatches", help="K, microbatches of each rank in one optimizer step")
    ] = 4,
    seed: Seed = 0,
) -> Collectives:
    """The same optimizer step six times: where no_sync is placed, how many all-reduces run, and the gradient.

    >>> [each.all_reduces for each in collectives().patterns]
    [4, 1, 4, 1, 0, 1]

    Counted by a communication hook in real DistributedDataParallel; float64; the loss is correct in all six.
    """
    reference = share(draw_batches(ranks, accumulation_steps, 4, seed), seed)
    run = "labkit.data_parallel.no_sync:run_patterns"
    answers = workers.run(run, ranks, batches=reference.plain, total=reference.total, seed=seed)
    patterns = []
    for name, (messages, _), *gradients in zip(PATTERNS, answers[0], *_gradients(answers), strict=True):
        error = distance(gradients[0], reference.right).relative_error
        patterns.append(Pattern(name, len(messages), sum(messages), error, apart(gradients, reference.right)))
    return Collectives(accumulation_steps, ranks, reference.tolerance.value, tuple(patterns))


def _gradients(answers: list[list[tuple[list[int], list[float]]]]) -> list[list[Tensor]]:
    """The gradients of each rank, one a pattern."""
    return [[torch.tensor(values, dtype=torch.float64) for _, values in answer] for answer in answers]


# Buckets.

LAYERS, WIDTH = 8, 512  # eight matrices of 1 MiB


def run_buckets(rank: int, world: int, *, cap: float, repeats: int) -> tuple[list[int], list[float]]:
    """The bytes of each all-reduce of one backward, and the seconds of several."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model, messages, seconds = DistributedDataParallel(layers, bucket_cap_mb=cap), list[int](), []
    model.register_comm_hook(messages, record_bytes)
    x = torch.ones(1, WIDTH)
    for _ in range(2 + repeats):  # the first backward uses one bucket, the second has the final buckets
        messages.clear()
        loss = model(x).square().mean()
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        seconds.append(time.perf_counter() - start)
    return messages, seconds[2:]


@dataclass(frozen=True, eq=False)
class Buckets:
    """One backward whose gradients travel in buckets."""

    cap: float = quantity("a bucket is closed once it holds this much", "MiB")
    messages: int = quantity("all-reduces of one backward")
    sizes: Tensor = quantity("bytes of each, in the order in which they left", "byte")
    bytes: int = quantity("all of them", "byte")
    backward: Spread = quantity("one synchronised backward, the slowest rank, measured", "ms")


def buckets(
    *,
    bucket_cap: Annotated[float, Range(0.1, 25, log=True, unit="MiB", help="DDP's bucket_cap_mb")] = 4.0,
    ranks: Ranks = 2,
) -> Buckets:
    """The gradients of eight matrices, 1 MiB each: the larger the buckets, the fewer messages of the same bytes.

    >>> [buckets(bucket_cap=cap).messages for cap in (0.1, 1, 4, 25)]
    [8, 8, 2, 1]

    Counted in real DistributedDataParallel after its first backward, which always takes one bucket. float32. A bucket
    is closed by the layer that fills it: a layer is never cut.
    """
    answers = workers.run("labkit.data_parallel.no_sync:run_buckets", ranks, cap=bucket_cap, repeats=5)
    sizes = torch.tensor(answers[0][0])
    slowest = [1e3 * max(times) for times in zip(*(seconds for _, seconds in answers), strict=True)]
    return Buckets(bucket_cap, len(sizes), sizes, int(sizes.sum()), Spread.of(slowest))
