"""The roofline: how fast a device can compute at a given arithmetic intensity, modelled and measured.

    attainable = min(intensity × bandwidth, ceiling)

Intensity is in FLOP/byte, bandwidth in GB/s, a rate in GFLOP/s; a multiply-add is 2 FLOP.
Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterator
from typing import Annotated

import torch

from labkit.declare import Choice, Range, Switch, quantity
from labkit.device import DTYPES, LONGEST, Machine, Spread, bandwidths, matmul, measure, measuring, pick, weights
from labkit.errors import LabError
from labkit.roofline.accelerators import ACCELERATORS, Accelerator, SparsePeak, sparse

__all__ = [
    "ACCELERATORS", "Accelerator", "Cache", "Ceiling", "Counting", "Machine", "Precision", "Rate", "Row", "SparsePeak",
    "Spread", "Sweep", "WorkingSet", "attainable", "bound", "cache", "ceiling", "counting", "machine", "measure",
    "measuring", "place", "precision", "sparse", "sparse_peak",
]  # fmt: skip

sparse_peak = sparse  # as it was called before
OVERHEAD = 5.0  # beyond this many times T_math + T_memory neither of them explains the time
EMULATED = 2.0  # a type narrower than float32 and this many times slower has no instructions here


def attainable(intensity: float, bandwidth: float, ceiling: float = 1000.0) -> float:
    """The modelled rate in GFLOP/s: min(intensity × bandwidth, ceiling).

    >>> attainable(2, 80), attainable(8, 80), attainable(50, 80)
    (160.0, 640.0, 1000.0)

    intensity: FLOP per byte moved; bandwidth: GB/s; ceiling: GFLOP/s.
    Raises LabError for anything but positive finite numbers. Source: Williams, Waterman, Patterson 2009.
    """
    slope = _positive("intensity", intensity, "FLOP/byte") * _positive("bandwidth", bandwidth, "GB/s")
    return min(slope, _positive("ceiling", ceiling, "GFLOP/s"))


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """A point on a modelled roof."""

    intensity: float = quantity("arithmetic done per byte moved", "FLOP/byte")
    bandwidth: float = quantity("memory bandwidth, the slope of the roof", "GB/s")
    ceiling: float = quantity("compute ceiling, the flat of the roof", "GFLOP/s")
    attainable: float = quantity("modelled rate, the lower of both roofs", "GFLOP/s")
    ridge: float = quantity("intensity at which both roofs meet", "FLOP/byte")
    bound: str = quantity("which roof is the lower one")


def ceiling(
    *,
    intensity: Annotated[float, Range(0.125, 64, log=True, unit="FLOP/byte", help="arithmetic per byte moved")] = 2.0,
    bandwidth: Annotated[float, Range(10, 4000, log=True, unit="GB/s", help="what the memory can move")] = 80.0,
    ceiling: Annotated[float, Range(10, 2000, log=True, unit="GFLOP/s", help="what the units can compute")] = 1000.0,
) -> Ceiling:
    """The modelled ceiling at one intensity, and which of the two roofs it is.

    >>> ceiling(intensity=2, bandwidth=80).attainable, ceiling().ridge
    (160.0, 12.5)

    A model, not a measurement: it holds no microbatch sweep, accumulation, masks, bubbles or optimizer.
    Raises LabError as `attainable` does. Source: Williams, Waterman, Patterson 2009.
    """
    rate = attainable(intensity, bandwidth, ceiling)
    ridge = ceiling / bandwidth
    return Ceiling(intensity, bandwidth, ceiling, rate, ridge, "memory-bound" if rate < ceiling else "compute-bound")


@dataclasses.dataclass(frozen=True)
class Row:
    """One matmul (b × d)·(d × d), as modelled by the roofline and as measured."""

    microbatch: int = quantity("rows b")
    intensity: float = quantity("2bd² FLOP over itemsize · (2bd + d²) bytes, modelled", "FLOP/byte")
    attainable: float = quantity("the roof at that intensity, modelled", "GFLOP/s")
    time_math: float = quantity("T_math: FLOP over ceiling, modelled", "s")
    time_memory: float = quantity("T_memory: bytes over bandwidth, modelled", "s")
    time_max: float = quantity("max(T_math, T_memory): perfect overlap, modelled", "s")
    time_sum: float = quantity("T_math + T_memory: no overlap, modelled", "s")
    times: Spread = quantity("time of one matmul, measured", "s")
    rates: Spread = quantity("rate of one matmul, measured", "GFLOP/s")
    bound: str = quantity("what the fastest run was bound by")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Matmuls over growing microbatches on the roof of the same machine."""

    width: int = quantity("rows and columns d of the weights")
    cold: bool = quantity("whether the weights come from memory every time")
    machine: Machine = quantity("the roofs, measured just before")
    rows: tuple[Row, ...] = quantity("the matmuls, by microbatch")
    left_out: tuple[int, ...] = quantity("microbatches not run: one call would take more than 0.07 s")
    progress: float = quantity("share of the sweep that is done")


def bound(time_math: float, time_memory: float, measured: float) -> str:
    """The bound of a measured time, given both modelled ones, all in the same unit.

    >>> bound(1, 3, 4), bound(3, 1, 4), bound(1, 3, 40)
    ('memory-bound', 'compute-bound', 'overhead-bound')

    "overhead-bound": more than 5 times T_math + T_memory, so that neither explains it (calls, threads, cold starts);
    else "memory-bound" where T_memory > T_math, else "compute-bound".
    """
    if measured > OVERHEAD * (time_math + time_memory):
        return "overhead-bound"
    return "memory-bound" if time_memory > time_math else "compute-bound"


def place(microbatch: int, width: int, itemsize: int, machine: Machine, times: list[float]) -> Row:
    """A matmul (b × d)·(d × d) placed under the roofs of a machine, by its measured times in seconds."""
    flop = 2 * microbatch * width**2
    volume = itemsize * (2 * microbatch * width + width**2)
    t_math, t_memory = flop / machine.ceiling / 1e9, volume / machine.bandwidth / 1e9
    return Row(
        microbatch=microbatch,
        intensity=flop / volume,
        attainable=attainable(flop / volume, machine.bandwidth, machine.ceiling),
        time_math=t_math,
        time_memory=t_memory,
        time_max=max(t_math, t_memory),
        time_sum=t_math + t_memory,
        times=Spread.of(times),
        rates=Spread.of([flop / time / 1e9 for time in times]),
        bound=bound(t_math, t_memory, min(times)),
    )


def machine(
    *,
    width: Annotated[int, Range(64, 2048, log=True, unit="columns", help="rows and columns d of the weights")] = 1024,
    largest_microbatch: Annotated[int, Range(1, 4096, log=True, unit="rows", help="largest b of the sweep")] = 512,
    dtype: Annotated[str, Choice(("float32", "float64", "bfloat16"), help="type of the numbers")] = "float32",
    cold: Annotated[bool, Switch(help="weights read from memory each time: rotating copies, 128 MiB in all")] = True,
) -> Iterator[Sweep]:
    """Both roofs of this machine, then real matmuls (b × d)·(d × d) for b = 1, 2, 4, … under them.

    >>> sweep = next(machine(width=64, largest_microbatch=2))
    >>> sweep.rows, 0 < sweep.progress < 1
    ((), True)

    Warm weights that fit a cache beat the memory roof: the bytes are then no longer moved from memory.
    The word of each row is by `bound`. Device: the GPU where there is one. Raises LabError for an unknown dtype.
    """
    for roofs in measuring(dtype=dtype):
        yield Sweep(width, cold, roofs, (), (), roofs.progress / 2)
    device, itemsize = pick(), DTYPES[dtype].itemsize
    rows: tuple[Row, ...] = ()
    matrices = weights(width, DTYPES[dtype], device, cold)
    todo = sorted({*(2**k for k in range(largest_microbatch.bit_length())), largest_microbatch})
    while todo:
        b = todo.pop(0)
        rows = (*rows, place(b, width, itemsize, roofs, matmul(b, matrices, device)))
        slow = bool(todo) and rows[-1].times.lowest * todo[0] / b > LONGEST
        left_out, todo = (tuple(todo), []) if slow else ((), todo)
        yield Sweep(width, cold, roofs, rows, left_out, 1 - 0.5 * len(todo) / (len(rows) + len(todo)))


@dataclasses.dataclass(frozen=True)
class Counting:
    """One measured matmul, its multiply-adds counted as 1 and as 2 FLOP."""

    multiply_adds: int = quantity("b·d², what the matmul does")
    times: Spread = quantity("time of one matmul, measured", "s")
    rate_one: float = quantity("median rate, a multiply-add counted as 1 FLOP", "GFLOP/s")
    rate_two: float = quantity("median rate, a multiply-add counted as 2 FLOP", "GFLOP/s")
    intensity_one: float = quantity("intensity, a multiply-add counted as 1 FLOP", "FLOP/byte")
    intensity_two: float = quantity("intensity, a multiply-add counted as 2 FLOP", "FLOP/byte")


def counting(
    *,
    width: Annotated[int, Range(64, 1024, log=True, unit="columns", help="rows and columns d of the weights")] = 512,
    microbatch: Annotated[int, Range(1, 512, log=True, unit="rows", help="rows b")] = 64,
) -> Counting:
    """Trap: the same matmul at two rates, because one multiply-add is counted as 1 or as 2 FLOP.

    >>> result = counting(width=64, microbatch=8)
    >>> result.rate_two / result.rate_one, result.multiply_adds
    (2.0, 32768)

    float32, warm. Makers of hardware count 2; set against their peaks, a count of 1 halves the utilisation.
    """
    device = pick()
    times = Spread.of(matmul(microbatch, weights(width, torch.float32, device), device))
    count, volume = microbatch * width**2, 4 * (2 * microbatch * width + width**2)
    rate, intensity = count / times.median / 1e9, count / volume
    return Counting(count, times, rate, 2 * rate, intensity, 2 * intensity)


@dataclasses.dataclass(frozen=True)
class WorkingSet:
    """The triad on arrays of one size."""

    size: int = quantity("bytes of the three arrays together", "B")
    bandwidths: Spread = quantity("triad, measured, counted as STREAM does", "GB/s")


@dataclasses.dataclass(frozen=True)
class Cache:
    """The triad over growing working sets."""

    points: tuple[WorkingSet, ...] = quantity("the working sets, by size")
    memory: float = quantity("best run of the largest working set", "GB/s")
    fastest: float = quantity("best run of all working sets", "GB/s")
    ratio: float = quantity("fastest over memory")
    progress: float = quantity("share of the experiment that is done")


def cache(
    *,
    largest: Annotated[int, Range(64, 256, log=True, unit="MiB", help="largest working set, three arrays")] = 256,
) -> Iterator[Cache]:
    """Trap: operands that stay in a cache beat the memory roof, from 32 KiB up to a working set that cannot.

    >>> first = next(cache(largest=64))
    >>> first.points[0].size, first.ratio
    (67108864, 1.0)

    The triad a = b + 3c in float32, the largest set first, since it stands for memory; the smallest are slow again
    because a call costs more than its bytes. Source: McCalpin 1995, as `measure`.
    """
    device = pick()
    points: tuple[WorkingSet, ...] = ()
    sizes = [largest * 2**20 >> k for k in range((32 * largest).bit_length())]
    for size in sizes:
        triads = bandwidths(torch.ones(3, size // 12, device=device), device)
        points = (WorkingSet(size, Spread.of(triads)), *points)
        memory, fastest = points[-1].bandwidths.highest, max(point.bandwidths.highest for point in points)
        yield Cache(points, memory, fastest, fastest / memory, len(points) / len(sizes))


@dataclasses.dataclass(frozen=True)
class Rate:
    """One matmul in one type."""

    dtype: str = quantity("type of the numbers multiplied")
    rates: Spread = quantity("rate, measured", "GFLOP/s")
    promised: float = quantity("rate of float32 × 4 / itemsize: what its bytes would promise", "GFLOP/s")
    ratio: float = quantity("best run over best run in float32")
    emulated: bool = quantity("narrower than float32 and less than half as fast: no instructions for it here")


@dataclasses.dataclass(frozen=True)
class Precision:
    """The same matmul in several types."""

    size: int = quantity("rows and columns of all three matrices")
    rows: tuple[Rate, ...] = quantity("the types, float32 first")
    progress: float = quantity("share of the experiment that is done")


def precision(
    *,
    width: Annotated[int, Range(64, 2048, log=True, unit="columns", help="rows and columns at most")] = 512,
) -> Iterator[Precision]:
    """Trap: half the bytes promise twice the rate, and a type that the device emulates is slower instead.

    >>> next(precision(width=64)).rows[0].ratio
    1.0

    Square matmuls, the same size for all types: halved until the slowest takes less than 0.07 s.
    """
    device, size = pick(), width
    probe = [min(matmul(128, weights(128, kind, device), device, 0.02)) for kind in DTYPES.values()]
    while size > 128 and max(probe) * (size / 128) ** 3 > LONGEST:
        size //= 2
    rows: tuple[Rate, ...] = ()
    for dtype, kind in DTYPES.items():
        rates = Spread.of([2 * size**3 / time / 1e9 for time in matmul(size, weights(size, kind, device), device)])
        single = rows[0].rates.highest if rows else rates.highest
        ratio = rates.highest / single
        emulated = kind.itemsize < 4 and ratio < 1 / EMULATED
        rows = (*rows, Rate(dtype, rates, single * 4 / kind.itemsize, ratio, emulated))
        yield Precision(size, rows, len(rows) / len(DTYPES))


def _positive(name: str, value: object, unit: str) -> float:
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise LabError(f"{name} = {value!r} is no positive finite number of {unit}: try 1")
    return number
