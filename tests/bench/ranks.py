"""The pool of ranks and the panels that use it: cold start, warm call, moves, and the memory of all processes."""

import json
import statistics
import time
from typing import Any

import psutil

from labkit.workers import Pool
from tests.bench.pss import family, megabytes

CALLS, MOVES = 30, 15
TOPICS = "data_parallel", "pipeline"


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


def panels() -> list[str]:
    """Every quick experiment of the topics that run on ranks."""
    from labkit import labs

    made = {topic: labs.all()[topic]() for topic in TOPICS}
    return [f"{topic}.{name}" for topic, lab in made.items() for name, trial in lab._trials.items() if not trial.long]


def moved(name: str) -> str:
    """One panel with two ranks: moves between two neighbouring positions of its first numeric control, as JSON."""
    from labkit import labs, workers
    from tests.bench import kernel

    topic, experiment = name.split(".")
    lab = labs.all()[topic](experiment)
    controls = kernel.numeric(lab._trial)
    control, (stops, start) = next(item for item in controls.items() if item[0] not in ("ranks", "stages"))
    began = time.perf_counter()
    lab.step()
    row = {"panel": name, "control": control, "first Step s": time.perf_counter() - began}
    lab.mode, seconds = "live", list[float]()
    for turn in range(1 + MOVES):
        began = time.perf_counter()
        lab.set(**{control: stops[max(0, start - 1) + turn % 2]})
        seconds.append(time.perf_counter() - began)
    mb = megabytes(family(psutil.Process()))
    workers.close()
    return json.dumps(row | {"move ms": seconds[1:], "PSS MB": mb})
