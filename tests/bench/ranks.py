"""The pool of ranks: a cold start, a warm call, a DDP step, and the memory of all its processes."""

import statistics
import time
from typing import Any

import psutil

from labkit.workers import Pool
from tests.bench.pss import family, megabytes

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
            "PSS MB": megabytes(family(psutil.Process())),
        }


def timed(pool: Pool, function: str, **values: Any) -> float:
    began = time.perf_counter()
    pool.run(function, **values)
    return time.perf_counter() - began
