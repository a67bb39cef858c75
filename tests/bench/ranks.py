"""The pool of ranks: a cold start, a warm call, a DDP step, and the memory of all its processes."""

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from labkit.workers import Pool

CALLS = 30


def measured(start: str, ranks: int) -> dict[str, Any]:
    """One pool, from nothing to its end."""
    with Pool(ranks, start) as pool:
        began = time.perf_counter()
        pool.run("labkit.workers:total", value=1)
        cold = time.perf_counter() - began
        warm = statistics.median(timed(pool, "labkit.workers:total", value=1) for _ in range(CALLS))
        timed(pool, "tests.workers.ranks:ddp_step")
        step = statistics.median(timed(pool, "tests.workers.ranks:ddp_step") for _ in range(CALLS))
        return {
            "pool": f"{start}, {ranks} ranks",
            "first run s": cold,
            "next call ms": 1e3 * warm,
            "DDP step ms": 1e3 * step,
            "PSS MB": megabytes(),
        }


def timed(pool: Pool, function: str, **values: Any) -> float:
    began = time.perf_counter()
    pool.run(function, **values)
    return time.perf_counter() - began


def megabytes() -> float:
    """PSS of this process and of all that it started."""
    total = 0
    for each in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError, IndexError):
            total += int(Path(f"/proc/{each.pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0])
    return total * 1024 / 1e6
