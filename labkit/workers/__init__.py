"""Ranks: real processes in one process group, kept from run to run.

    functions  by importable name; called as function(rank, world, **values) on every rank
    answers    plain values, one a rank, in a list
    faults     one sentence that names the rank; the ranks are thrown away, and the next run starts new ones

On Linux the ranks are forked from a server that has torch loaded already; elsewhere, and on GPUs, they are spawned.
Under torchrun the same call runs on the ranks that torchrun has started, on as many machines as it likes.

Nothing here imports torch before a rank needs it: a rank must be able to end with its notebook from its first moment.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from labkit.errors import LabError
from labkit.workers import _start, _torchrun
from labkit.workers._names import name_of
from labkit.workers._pool import MOST, Pool

__all__ = ["MOST", "Pool", "close", "pool", "run", "total", "warm"]

_lock = threading.RLock()
_kept: Pool | None = None


def run(
    function: str | Callable[..., Any],
    ranks: int = 2,
    *,
    timeout: float = 60,
    start: str = "",
    device: str = "cpu",
    **values: Any,
) -> list[Any]:
    """Call a function on every rank of a process group, and return what each rank returned.

    >>> run("labkit.workers:total", 2, value=3)
    [6.0, 6.0]

    The ranks stay for the next call with as many ranks. Each call has torch's seed 0 and one thread a rank. LabError
    names the rank that raised, died, or gave no answer within `timeout` seconds. With device="cuda" the function also
    gets `device`, the GPU of its rank: cuda:0, cuda:1, …
    """
    if _torchrun.launched():
        return _torchrun.run(name_of(function), ranks, timeout, device, values)
    with _lock:
        return pool(ranks, start, device).run(function, timeout=timeout, **values)


def pool(ranks: int = 2, start: str = "", device: str = "cpu") -> Pool:
    """The pool that is kept, replaced if another number of ranks, start method or device is asked for.

    >>> pool(2).ranks
    2
    """
    global _kept
    with _lock:
        fresh = Pool(ranks, start, device)
        if _kept is None or _kept.kind != fresh.kind:
            close()
            _kept = fresh
        return _kept


def warm() -> None:
    """Begin to load torch for the ranks, in the background, where a server forks them; `run` will report a failure.

    >>> warm()
    """
    if "forkserver" in _start.methods("cpu") and not _start.inside() and not _torchrun.launched():
        with contextlib.suppress(LabError):
            _start.server()


def close() -> None:
    """End the ranks that are kept; a run in another thread raises LabError.

    >>> close()
    """
    if _kept is not None:
        _kept.close()


def total(rank: int, world: int, value: float) -> float:
    """The sum of a value over the ranks: the smallest function that a pool can run."""
    import torch

    term = torch.tensor(float(value))
    torch.distributed.all_reduce(term)
    return term.item()


def _forget() -> None:
    """A forked copy of this process has no ranks: they are its parent's."""
    global _kept, _lock
    _kept, _lock = None, threading.RLock()


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
