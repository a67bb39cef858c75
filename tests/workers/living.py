"""Which processes and folders are left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import psutil

PATIENCE = 200.0  # seconds after which a test gives up: no measure of speed


def until(fact: Callable[[], object], what: str = "") -> None:
    """Wait until something is true."""
    end = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < end, what or "it never came true"
        time.sleep(0.02)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(pid: int) -> None:
    """Kill a process and wait until it has ended: on a busy machine that takes a while."""
    process = psutil.Process(pid)
    process.kill()
    all_end([process])


def below(pid: int | None = None) -> list[psutil.Process]:
    """All processes that a process has started, and theirs."""
    return [each for each in psutil.Process(pid).children(recursive=True) if alive(each)]


def all_end(processes: Iterable[psutil.Process]) -> None:
    kept = list(processes)
    until(lambda: not any(map(alive, kept)), f"left: {[each for each in kept if alive(each)]}")


def pool_processes(pid: int | None = None) -> list[psutil.Process]:
    """Ranks and keepers of a process: what must be gone after a fault; the server stays for the next start."""
    found = []
    for each in below(pid):
        line = " ".join(each.cmdline())
        if (
            "labkit-ranks-" in line
            or "spawn_main" in line
            or (each.ppid() != (pid or psutil.Process().pid) and "forkserver" in line)
        ):
            found.append(each)
    return found


def ranks_of(pid: int) -> list[int]:
    """The ranks of a process: members of its keepers' process groups."""
    below_it = below(pid)
    keepers = {each.pid for each in below_it if "labkit-ranks-" in " ".join(each.cmdline())}
    return [each.pid for each in below_it if each.pid not in keepers and os.getpgid(each.pid) in keepers]
