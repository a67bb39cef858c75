"""The device: its choice, its limits, its clock, and how fast it moves bytes and multiplies."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor

from labkit.declare import Choice, quantity
from labkit.errors import LabError

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = (128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192)  # square matmuls among which the ceiling is searched
LONGEST = 0.07  # seconds that one call may take, so that Stop acts fast; longer ones are left out


def threads(root: Path = Path("/")) -> int:
    """Cores that this process may really use, at least 1: the least of machine, affinity, OMP_NUM_THREADS and quota.

    >>> threads() >= 1
    True

    A container sees all cores of its machine and may own a share of them: the quota stands in its control group, as
    `cpu.max` (version 2) or `cpu.cfs_quota_us` / `cpu.cfs_period_us` (version 1); of nested groups the tightest counts.
    Rounded down: a thread more than the quota is throttled in the middle of a timing.
    `root` is where `proc/self/cgroup` and `sys/fs/cgroup` are looked for.
    Source: Linux kernel, Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else math.inf
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    from_environment = int(setting) if setting.isdecimal() and int(setting) else math.inf
    quotas = [_quota(folder) for folder in _groups("cpu", root)]
    return max(1, math.floor(min(os.cpu_count() or 1, affinity, from_environment, *quotas)))


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the control group of this process may hold, None where there is no limit.

    >>> limit = memory_limit()
    >>> limit is None or limit > 0
    True

    Read from `memory.max` (version 2) or `memory.limit_in_bytes` (version 1); of nested groups the tightest counts.
    `root` as for `threads`. Source: Linux kernel, Documentation/admin-guide/cgroup-v2.rst.
    """
    files = "memory.max", "memory.limit_in_bytes"
    words = [_read(folder / file) for folder in _groups("memory", root) for file in files]
    limits = [int(word) for word in words if word.isdecimal() and int(word) < 2**60]  # version 1 writes 2^63 for none
    return min(limits, default=None)


def pick(device: str | torch.device = "auto") -> torch.device:
    """The device of that name; "auto" is the GPU where there is one and the CPU elsewhere.

    >>> pick("cpu")
    device(type='cpu')

    Raises LabError for a name that is unknown or a GPU that is not there.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ["auto", "cpu", *(["cuda"] if gpus else []), *(f"cuda:{index}" for index in range(gpus))]
    if str(device) not in names:
        raise LabError(f"device = {str(device)!r} is none of {', '.join(names)} on this machine: try 'auto'")
    return torch.device(("cuda" if gpus else "cpu") if str(device) == "auto" else device)


def name(device: torch.device) -> str:
    """The name that the device reports.

    >>> name(torch.device("cpu")) != ""
    True
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = _read(Path("/proc/cpuinfo")).partition("model name")[2].partition("\n")[0].strip("\t :")
    return model or platform.processor() or platform.machine() or "CPU"


@contextlib.contextmanager
def quota_threads(count: int | None = None) -> Iterator[int]:
    """Runs a block with as many torch threads as the quota allows (or `count`), and restores the number before.

    >>> with quota_threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    number = threads() if count is None else count
    torch.set_num_threads(number)
    try:
        yield number
    finally:
        torch.set_num_threads(before)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the device took for `work`: a monotonic clock on a CPU, events on a GPU.

    >>> seconds(lambda: None, torch.device("cpu")) >= 0
    True
    """
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def timings(work: Callable[[], object], device: torch.device, budget: float = 0.15) -> list[float]:
    """Seconds for one call of `work`, measured again and again until `budget` seconds are spent.

    >>> len(timings(lambda: None, torch.device("cpu"), budget=0.01)) >= 1
    True

    Half the budget runs with the quota's threads. The other half, unless one call would take twice the budget, runs
    with one thread, and the faster of both counts: beside a busy program two threads may share a core and wait a time
    slice for each other at every call.
    """
    with quota_threads() as count:
        samples = _samples(work, device, budget / 2)
    if device.type == "cuda" or count == 1 or count * min(samples) > 2 * budget:
        return samples
    with quota_threads(1):
        return min(samples, _samples(work, device, budget / 2), key=min)


def _samples(work: Callable[[], object], device: torch.device, budget: float) -> list[float]:
    """Two calls warm up and give the number in a sample of a millisecond; work longer than the budget runs once."""
    first = seconds(work, device)
    if first > budget:
        return [first]
    second = seconds(work, device)
    calls = max(1, math.ceil(1e-3 / max(min(first, second), 1e-7)))
    samples = [second] if calls == 1 else []
    spent = first + second
    while not samples or spent < budget:
        sample = seconds(lambda: [work() for _ in range(calls)], device)
        samples.append(sample / calls)
        spent += sample
    return samples


@dataclasses.dataclass(frozen=True)
class Spread:
    """How a quantity measured several times scatters.

    >>> Spread.of([3, 1, 2]).median
    2.0
    """

    lowest: float = quantity("least of all")
    lower: float = quantity("lower quartile")
    median: float = quantity("median")
    upper: float = quantity("upper quartile")
    highest: float = quantity("greatest of all")
    count: int = quantity("how many were measured")

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of these values; of none at all it is NaN, with count 0."""
        quartiles = numpy.quantile(values, (0, 0.25, 0.5, 0.75, 1)) if len(values) else [math.nan] * 5
        lowest, lower, median, upper, highest = (float(value) for value in quartiles)
        return cls(lowest, lower, median, upper, highest, len(values))


def bandwidths(arrays: Tensor, device: torch.device) -> list[float]:
    """GB/s of the triad a = b + 3c on three arrays (3 × n), each run counted as 3 times the bytes of one.

    >>> min(bandwidths(torch.ones(3, 1000), torch.device("cpu"))) > 0
    True
    """
    a, b, c = arrays
    return [arrays.nbytes / time / 1e9 for time in timings(lambda: torch.add(b, c, alpha=3.0, out=a), device)]


def weights(width: int, kind: torch.dtype, device: torch.device, cold: bool = False) -> tuple[Tensor, ...]:
    """A matrix (width × width); cold: so many copies of it that no cache holds them.

    >>> len(weights(64, torch.float32, torch.device("cpu")))
    1
    """
    one = torch.linspace(-1, 1, width**2, device=device).reshape(width, width).to(kind)
    return one.repeat(max(1, 2 * _far(device) // one.nbytes) if cold else 1, 1, 1).unbind()


def matmul(rows: int, weights: tuple[Tensor, ...], device: torch.device, budget: float = 0.15) -> list[float]:
    """Seconds of one matmul (rows × d)·(d × d), the weights taken in turn.

    >>> min(matmul(1, weights(64, torch.float32, torch.device("cpu")), torch.device("cpu"))) > 0
    True
    """
    x = weights[0].new_ones(rows, len(weights[0]))
    y, turn = torch.empty_like(x), itertools.cycle(weights)
    return timings(lambda: torch.mm(x, next(turn), out=y), device, budget)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The measured rates of this device; NaN where not measured yet."""

    device: str = quantity("what the device calls itself")
    threads: int = quantity("threads that the CPU quota allows")
    dtype: str = quantity("type of the numbers multiplied")
    bandwidth: float = quantity("best run of the triad, as STREAM quotes it", "GB/s")
    ceiling: float = quantity("best run of the best square matmul", "GFLOP/s")
    ridge: float = quantity("intensity at which both roofs meet", "FLOP/byte")
    size: int = quantity("rows and columns of that matmul")
    bandwidths: Spread = quantity("all runs of the triad", "GB/s")
    ceilings: Spread = quantity("all runs of that matmul", "GFLOP/s")
    progress: float = quantity("share of the measurement that is done")


def measure(device: str | torch.device = "auto", dtype: str = "float32") -> Machine:
    """Bandwidth and compute ceiling of a device, measured now, in about 3 s and 250 MB.

    >>> machine = measure("cpu")
    >>> machine.ridge == machine.ceiling / machine.bandwidth > 0
    True

    Bandwidth: the triad a = b + 3c in float32, arrays of 64 MiB (256 MiB on a GPU), counted as STREAM counts: three
    arrays a run, without the read of `a` that a store costs most CPUs; so a loop that only reads can reach 4/3 of it.
    Ceiling: square matmuls of growing size while one takes less than 0.07 s.
    Quoted is the best run, as STREAM does; the spread of all runs stands beside it. The CPU quota is honoured.
    Raises LabError for a device or dtype that is not there. Source: McCalpin, "Memory bandwidth and machine balance in
    current high performance computers", IEEE TCCA Newsletter, December 1995.
    """
    *_, machine = measuring(device, dtype)
    return machine


def measuring(device: str | torch.device = "auto", dtype: str = "float32") -> Iterator[Machine]:
    """`measure` in slices: each result holds the figures so far.

    >>> next(measuring("cpu")).bandwidth > 0
    True
    """
    where, kind = pick(device), DTYPES[Choice(tuple(DTYPES)).check("dtype", dtype, str)]
    arrays = torch.ones(3, _far(where) // 4, device=where)
    triads: list[float] = []
    for part in range(1, 9):
        triads += bandwidths(arrays, where)
        yield _machine(where, dtype, triads, {}, part / 16)
    del arrays
    matmuls: dict[int, list[float]] = {}
    for size, larger in zip(SIZES, (*SIZES[1:], math.inf), strict=True):
        times = matmul(size, weights(size, kind, where), where)
        matmuls[size] = [2 * size**3 / t / 1e9 for t in times]
        last = min(times) * (larger / size) ** 3 > LONGEST
        yield _machine(where, dtype, triads, matmuls, 1.0 if last else 0.5 + len(matmuls) / 20)
        if last:
            return


def _far(device: torch.device) -> int:
    """Bytes of an array that is assumed to fit in no cache."""
    return 2**28 if device.type == "cuda" else 2**26


def _machine(
    where: torch.device, dtype: str, triads: list[float], matmuls: dict[int, list[float]], progress: float
) -> Machine:
    size = max(matmuls, key=lambda n: max(matmuls[n]), default=0)
    triad, best = Spread.of(triads), Spread.of(matmuls.get(size, []))
    ridge = best.highest / triad.highest
    return Machine(name(where), threads(), dtype, triad.highest, best.highest, ridge, size, triad, best, progress)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the control groups that this process is in, from the innermost to the root's."""
    mounts = root / "sys/fs/cgroup"
    lines = _read(root / "proc/self/cgroup").splitlines() or ["0::/", f"1:{controller}:/"]
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controller in controllers.split(","):
            tops = {mounts / controllers, mounts / controller}
        else:
            tops = set() if controllers else {mounts, mounts / "unified"}
        for top in tops:
            inner = Path(path.lstrip("/"))
            yield from (top / part for part in (inner, *inner.parents))


def _quota(folder: Path) -> float:
    """Cores that this group may use; infinite where it sets no limit."""
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    quota, period = quota or _read(folder / "cpu.cfs_quota_us"), period or _read(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else math.inf


def _read(path: Path) -> str:
    """The text of a file, empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
