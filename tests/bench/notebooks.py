"""Peak memory and time of a notebook: PSS of its kernel and all that the kernel started, sampled while it runs."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient


def holds_lab(path: Path) -> bool:
    """Whether a cell makes a lab."""
    cells = nbformat.read(path, 4).cells
    return any(cell.cell_type == "code" and re.search(r"\blabs\.\w+\(", cell.source) for cell in cells)


def run(path: Path, every: float = 0.2) -> dict[str, float]:
    """Execute from top to bottom, as a learner would with run-all."""
    client = NotebookClient(nbformat.read(path, 4), timeout=600, resources={"metadata": {"path": path.parent}})
    peak, done = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(every):
            with contextlib.suppress(psutil.Error, OSError, AttributeError, IndexError):  # not yet or no longer there
                kernel = psutil.Process(client.km.provisioner.pid)
                family = [kernel, *kernel.children(recursive=True)]
                words = [Path(f"/proc/{each.pid}/smaps_rollup").read_text().split("Pss:")[1] for each in family]
                peak = max(peak, sum(int(word.split()[0]) for word in words))

    threading.Thread(target=sample, daemon=True).start()
    start = time.perf_counter()
    try:
        client.execute()
    finally:
        done.set()
    return {"peak MB": peak * 1024 / 1e6, "seconds": time.perf_counter() - start}
