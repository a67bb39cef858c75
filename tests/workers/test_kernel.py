"""Ranks below a real kernel: the interrupt button, restarts, and kernels that are killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.workers import living
from tests.workers.kernels import Kernel, kernel

RIGHT = "[2.0, 2.0]"


SLOW = pytest.param("spawn", "spins", marks=pytest.mark.slow)
CELL = """
from labkit import workers
def go(how="nothing"):
    print(workers.run("tests.workers.ranks:fault", start={start!r}, who=1, how=how))
"""


@pytest.fixture
def opened(start: str, tmp_path: Path) -> Iterator[Kernel]:
    with kernel(tmp_path) as one:
        one.run(CELL.format(start=start))
        yield one


def at_work(kernel: Kernel) -> list[psutil.Process]:
    """Wait until the ranks are in the middle of a call: they have met, and use the processor or wait."""
    living.until(lambda: list(kernel.folder.glob("labkit-ranks-*/store")))
    time.sleep(1)
    return kernel.processes


def nothing_stays(kernel: Kernel, processes: list[psutil.Process]) -> None:
    living.all_end(processes)
    living.until(lambda: kernel.folders == [], f"left: {kernel.folders}")


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_the_button_and_the_restart(opened: Kernel) -> None:
    cell = opened.begin("go()")
    living.until(lambda: list(opened.folder.glob("labkit-ranks-*")))
    time.sleep(0.3)  # torch is being loaded
    opened.interrupt()
    assert opened.outcome(cell).startswith("KeyboardInterrupt")
    living.until(lambda: not list(opened.folder.glob("labkit-ranks-*")))
    assert opened.run("go()") == RIGHT

    for how in ("spins", "in C"):
        cell = opened.begin(f"go({how!r})")
        ranks = [each for each in at_work(opened) if each.pid in living.ranks_of(opened.pid)]
        opened.interrupt()
        assert opened.outcome(cell).startswith("KeyboardInterrupt")
        living.all_end(ranks)
        assert not list(opened.folder.glob("labkit-ranks-*"))
        if how == "spins":
            assert opened.run("go()") == RIGHT

    assert opened.run("go()") == RIGHT
    processes = opened.processes
    opened.restart()
    nothing_stays(opened, processes)


@pytest.mark.parametrize(("start", "how"), [("forkserver", "in C"), ("forkserver", "idle"), SLOW])
def test_a_kernel_that_is_killed(opened: Kernel, how: str) -> None:
    if how == "idle":
        assert opened.run("go()") == RIGHT
    else:
        opened.begin(f"go({how!r})")
    processes = at_work(opened)
    opened.kill()
    nothing_stays(opened, processes)


@pytest.mark.parametrize("start", [pytest.param("forkserver", marks=pytest.mark.slow), "spawn"])
def test_a_kernel_that_is_killed_with_all_of_its_process_group(opened: Kernel) -> None:
    opened.begin("go('in C')")
    processes = at_work(opened)
    opened.restart()  # it is busy and does not heed the message
    nothing_stays(opened, processes)


@pytest.mark.parametrize("start", [pytest.param("forkserver", marks=pytest.mark.slow), "spawn"])
def test_a_kernel_that_is_killed_while_ranks_start(opened: Kernel) -> None:
    opened.begin("go()")
    living.until(lambda: list(opened.folder.glob("labkit-ranks-*")))
    time.sleep(0.3)
    processes = opened.processes
    opened.kill()
    nothing_stays(opened, processes)
