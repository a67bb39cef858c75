"""How near the roofline lab comes to a compiled STREAM triad and to the best large matmul, in the same minute."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from labkit import device, roofline

SOURCE = Path(__file__).with_name("stream.c")
FLAGS = ("-std=c11", "-O3", "-march=native", "-fopenmp")


def ratios(rounds: int = 5) -> dict[str, float | int | None]:
    """Ratios of `roofline.measure` to both references, run in turn with it; the triad's is None without a compiler.

    Each round takes the references before and after the lab's own measurement, so that what a busy machine takes away
    falls on both sides; quoted is the median over the rounds.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        taken = [_round(program) for _ in range(rounds)]
    triads = [row["bandwidth"] / row["stream"] for row in taken if row["stream"]]
    matmuls = [row["ceiling"] / row["matmul"] for row in taken]
    return {
        "triad_ratio": statistics.median(triads) if triads else None,
        "matmul_ratio": statistics.median(matmuls),
        "triad_ratio_least": min(triads, default=None),
        "matmul_ratio_least": min(matmuls),
        "bandwidth": statistics.median(row["bandwidth"] for row in taken),
        "ceiling": statistics.median(row["ceiling"] for row in taken),
        "threads": device.threads(),
        "rounds": rounds,
    }


def build(folder: Path) -> Path | None:
    """The compiled triad, None where no C compiler with OpenMP is found."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    program = folder / "stream"
    done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(program)], check=False, capture_output=True)
    return program if done.returncode == 0 else None


def stream(program: Path | None, runs: int = 60) -> float:
    """Best of so many runs of the compiled triad, in GB/s; 0 without a program."""
    if program is None:
        return 0.0
    environment = os.environ | {"OMP_NUM_THREADS": str(device.threads())}
    done = subprocess.run([program, "64", str(runs)], check=True, capture_output=True, text=True, env=environment)
    return max(float(line) for line in done.stdout.split())


def large_matmul(budget: float = 1.0) -> float:
    """Best rate of large float32 matmuls within so many seconds, in GFLOP/s, by a loop of its own."""
    best = 0.0
    with device.quota_threads():
        end = time.perf_counter() + budget
        while time.perf_counter() < end:
            for size in (512, 1024, 1536, 2048):
                x = torch.full((size, size), 0.5)
                start = time.perf_counter()
                x @ x
                best = max(best, 2 * size**3 / (time.perf_counter() - start) / 1e9)
    return best


def _round(program: Path | None) -> dict[str, float]:
    """Reference, lab, reference."""
    triad, matmul = stream(program), large_matmul()
    machine = roofline.measure("cpu")
    triad, matmul = max(triad, stream(program)), max(matmul, large_matmul())
    return {"stream": triad, "matmul": matmul, "bandwidth": machine.bandwidth, "ceiling": machine.ceiling}


if __name__ == "__main__":
    print(json.dumps(ratios(), indent=1))
