"""Memory that processes share is counted once: PSS, as Linux tells it."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all that it started."""
    return [process, *process.children(recursive=True)]


def megabytes(processes: Iterable[psutil.Process]) -> float:
    """PSS of those that have not ended meanwhile."""
    total = 0
    for each in processes:
        with contextlib.suppress(psutil.Error, OSError, IndexError):
            total += int(Path(f"/proc/{each.pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0])
    return total * 1024 / 1e6
