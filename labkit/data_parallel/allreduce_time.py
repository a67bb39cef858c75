"""The cost of an all-reduce: a latency and a bandwidth, fitted to times measured on this machine now."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from labkit import workers
from labkit.data_parallel.compare import Ranks
from labkit.declare import Range, quantity
from labkit.device import Spread

SIZES = (4, 4096, 65_536, 524_288, 2_097_152, 8_388_608)  # bytes
BUDGET = 30_000_000  # bytes that all repeats of one size may move
MESSAGE = 1_000_000  # bytes that cost as much as one message of any size

MB = 1e6


def run_all_reduces(rank: int, world: int, *, payloads: Sequence[tuple[int, int]]) -> list[list[float]]:
    """Seconds of each repeat, for every payload of (bytes, messages)."""
    times = []
    for size, messages in payloads:
        parts = torch.ones(size // 4).tensor_split(messages)
        seconds = []
        for _ in range(1 + min(5, max(3, BUDGET // (size + messages * MESSAGE)))):
            dist.barrier()
            start = time.perf_counter()
            for part in parts:
                dist.all_reduce(part)
            seconds.append(time.perf_counter() - start)
        times.append(seconds[1:])  # the first one warms up
    return times


@dataclass(frozen=True)
class Line:
    """Time of an all-reduce against its bytes: a latency and a bandwidth."""

    latency: float = quantity("time of a message without content", "s")
    per_byte: float = quantity("what each byte adds", "s/byte")
    residual: float = quantity("root mean square of (measured − line) / measured")

    def seconds(self, size: float, messages: int = 1) -> float:
        """The time of so many bytes in so many messages, one after the other."""
        return messages * self.latency + size * self.per_byte


def line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least relative error, neither of its two numbers negative.

    >>> fit = line([0, 100, 1000], [1.0, 2.0, 11.0])
    >>> round(fit.latency, 6), round(fit.per_byte, 6), round(fit.residual, 6)
    (1.0, 0.01, 0.0)

    Least squares of (latency + bytes × per_byte) / measured − 1: 4 bytes and 8 MB count alike.
    """
    t = torch.tensor(seconds, dtype=torch.float64)
    columns = torch.stack([1 / t, torch.tensor(sizes, dtype=torch.float64) / t], 1)
    best = min((_fit(columns, chosen) for chosen in ((0, 1), (0,), (1,))), key=lambda fit: fit[0])
    latency, per_byte = best[1].tolist()
    return Line(latency, per_byte, best[0])


def _fit(columns: Tensor, chosen: tuple[int, ...]) -> tuple[float, Tensor]:
    """The residual (root mean square) with these columns, and both numbers; ∞ where one is negative."""
    part = columns[:, chosen]
    scale = part.norm(dim=0)
    numbers = torch.zeros(2, dtype=torch.float64)
    numbers[list(chosen)] = (
        torch.linalg.lstsq(part / scale, torch.ones(len(part), 1, dtype=part.dtype)).solution[:, 0] / scale
    )
    miss = float((columns @ numbers - 1).square().mean().sqrt())
    return (miss if bool((numbers >= 0).all()) else float("inf")), numbers


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Times of all-reduces over their bytes, the line through them, and one payload in messages."""

    ranks: int = quantity("W", "ranks")
    sizes: Tensor = quantity("payload of one all-reduce", "byte")
    measured: tuple[Spread, ...] = quantity("its time, the slowest rank", "ms")
    line: Line = quantity("the line with the least relative error")
    latency: float = quantity("a message without content, by the line", "ms")
    bandwidth: float = quantity("bytes per second that the line adds for its length", "MB/s")
    residual: float = quantity("root mean square of (measured − line) / measured", "%")
    payload: int = quantity("bytes that are sent in messages", "byte")
    messages: int = quantity("how many messages")
    modelled: float = quantity("messages × latency + bytes / bandwidth", "ms")
    found: Spread = quantity("the same measured, one after the other", "ms")


def allreduce(
    *,
    payload: Annotated[float, Range(0.01, 16, log=True, unit="MB", help="gradient of one optimizer step")] = 1.0,
    messages: Annotated[int, Range(1, 64, log=True, unit="messages", help="all-reduces that it is cut into")] = 8,
    ranks: Ranks = 2,
) -> AllReduce:
    """Time of an all-reduce from 4 B to 8 MB, a line through it, and a payload in one message or many.

    >>> times = allreduce()
    >>> times.latency > 0, times.modelled > times.messages * times.latency
    (True, True)

    gloo over 127.0.0.1, float32, the ranks start together; a repeat takes as long as its slowest rank. The times are
    those of this machine now, and change from run to run.
    """
    size = round(payload * MB / 4) * 4
    spreads = _measured(ranks, [*((each, 1) for each in SIZES), (size, messages)])
    fit = line(SIZES, [each.median / 1e3 for each in spreads[:-1]])
    return AllReduce(
        ranks,
        torch.tensor(SIZES),
        tuple(spreads[:-1]),
        fit,
        latency=1e3 * fit.latency,
        bandwidth=1 / fit.per_byte / MB if fit.per_byte else float("inf"),
        residual=100 * fit.residual,
        payload=size,
        messages=messages,
        modelled=1e3 * fit.seconds(size, messages),
        found=spreads[-1],
    )


def _measured(ranks: int, payloads: list[tuple[int, int]]) -> list[Spread]:
    """Milliseconds of each payload; a repeat is as slow as its slowest rank."""
    answers = workers.run("labkit.data_parallel.allreduce_time:run_all_reduces", ranks, payloads=payloads)
    by_payload = zip(*answers, strict=True)
    return [Spread.of([1e3 * max(repeat) for repeat in zip(*each, strict=True)]) for each in by_payload]


@functools.cache
def _line(ranks: int) -> Line:
    spreads = _measured(ranks, [(each, 1) for each in SIZES])
    return line(SIZES, [each.median / 1e3 for each in spreads])


def allreduce_seconds(size: float, ranks: int = 2, messages: int = 1) -> float:
    """Seconds of an all-reduce of so many bytes on this machine, by a line that is measured once a session.

    >>> allreduce_seconds(4_000_000) > allreduce_seconds(4)
    True

    The term `allreduce` of labkit.throughput.step_seconds.
    """
    return _line(ranks).seconds(size, messages)
