"""Ranks: real processes in one process group, kept from run to run.

    functions  by importable name; called as function(rank, world, **values) on every rank
    answers    plain values, one a rank, in a list
    faults     one sentence that names the rank; the pool is thrown away, and the next run starts a new one

On Linux the ranks are forked from a server that has torch loaded already; elsewhere, and on GPUs, they are spawned.
Under torchrun the same call runs on the ranks that torchrun has started, on as many machines as it likes.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from labkit.errors import LabError

MOST = 4  # ranks that one machine of a learner carries
PRELOAD = ["torch", "torch._dynamo", "labkit.workers"]  # DistributedDataParallel imports torch._dynamo: seconds a rank
GRACE = 0.2  # seconds in which a death may still explain an exception on another rank
METHODS = ("forkserver", "spawn")

_lock = threading.RLock()
_kept: Pool | None = None


def run(
    function: str | Callable[..., Any], ranks: int = 2, *, timeout: float = 60, start: str = "", **values: Any
) -> list[Any]:
    """Call a function on every rank of a process group, and return what each rank returned.

    >>> run("labkit.workers:total", 2, value=3)
    [6.0, 6.0]

    The ranks stay for the next call with as many ranks. Each call has torch's seed 0 and one thread a rank. LabError
    names the rank that raised, died, or gave no answer within `timeout` seconds.
    """
    if dist.is_torchelastic_launched():
        return _on_torchrun(_named(function), ranks, values)
    with _lock:
        return pool(ranks, start).run(function, timeout=timeout, **values)


def pool(ranks: int = 2, start: str = "") -> Pool:
    """The pool that is kept, replaced when another number of ranks or another start method is asked for.

    >>> pool(2).ranks
    2
    """
    global _kept
    with _lock:
        if _kept is None or (_kept.ranks, _kept.start) != (ranks, start or _method()):
            fresh = Pool(ranks, start)
            close()
            _kept = fresh
        return _kept


def warm() -> None:
    """Begin to load torch for the ranks, in the background, where a server forks them.

    >>> warm()
    """
    if _method() == "forkserver" and not _inside():
        with _hidden_main():
            _context("forkserver")
            from multiprocessing import forkserver

            forkserver.ensure_running()


def close() -> None:
    """End the ranks that are kept.

    >>> close()
    """
    if _kept is not None:
        _kept.close()


def total(rank: int, world: int, value: float) -> float:
    """The sum of a value over the ranks: the smallest function that a pool can run."""
    term = torch.tensor(float(value))
    dist.all_reduce(term)
    return term.item()


class Pool:
    """Ranks in one process group, started at the first run.

    >>> with Pool(2) as ranks:
    ...     ranks.run("labkit.workers:total", value=1)
    [2.0, 2.0]

    `start` is forkserver or spawn. Ranks meet over a file in a private folder, and talk over 127.0.0.1 alone.
    """

    def __init__(self, ranks: int = 2, start: str = "") -> None:
        if not 1 <= ranks <= MOST:
            raise LabError(f"ranks = {ranks}: try 1 to {MOST}")
        if start not in ("", *METHODS):
            raise LabError(f"start = {start!r}: try {' or '.join(METHODS)}")
        self.ranks = ranks
        self.start = start or _method()
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def processes(self) -> list[int]:
        """The process id of each rank; none before the first run."""
        return [process.pid or 0 for process in self._processes]

    def run(self, function: str | Callable[..., Any], *, timeout: float = 60, **values: Any) -> list[Any]:
        """Call a function on every rank; what each returned. Whatever goes wrong, no rank of this pool stays."""
        call = pickle.dumps((_named(function), values))
        try:
            if not all(process.is_alive() for process in self._processes) or not self._processes:
                self._begin(timeout)
            for rank, pipe in enumerate(self._pipes):
                self._send(rank, pipe, call)
            return self._answers(timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks, and remove their folder."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self, timeout: float) -> None:
        self.close()
        if _inside():
            raise LabError("a rank cannot start ranks of its own: try to call it from the notebook")
        context = _context(self.start)
        self._folder = tempfile.mkdtemp(prefix="labkit-ranks-")
        with _hidden_main():
            for rank in range(self.ranks):
                here, there = context.Pipe()
                self._pipes.append(here)
                process = context.Process(  # type: ignore[attr-defined]
                    target=_serve, args=(rank, self.ranks, self._folder, there), name=f"labkit-rank-{rank}", daemon=True
                )
                process.start()
                self._processes.append(process)
                there.close()
        self._answers(max(timeout, 60))

    def _send(self, rank: int, pipe: Connection, call: bytes) -> None:
        try:
            pipe.send_bytes(call)
        except OSError:
            raise LabError(self._died(rank)) from None

    def _answers(self, timeout: float) -> list[Any]:
        """One answer of every rank; a death explains what other ranks raise because of it."""
        answers: dict[int, Any] = {}
        failed: dict[int, tuple[str, str]] = {}
        until = time.monotonic() + timeout
        while len(answers) + len(failed) < self.ranks:
            waiting = [rank for rank in range(self.ranks) if rank not in answers and rank not in failed]
            ready = self._ready(waiting, until - time.monotonic())
            if not ready:
                break
            for rank in ready:
                kind, value = self._receive(rank)
                if kind == "done":
                    answers[rank] = value
                else:
                    failed[rank] = value
                    until = min(until, time.monotonic() + GRACE)
        if failed:
            raise _raised(*next(iter(failed.items())))
        if len(answers) < self.ranks:
            raise LabError(_silent([rank for rank in range(self.ranks) if rank not in answers], timeout))
        return [answers[rank] for rank in range(self.ranks)]

    def _ready(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """The ranks that have something to say within the time; a dead rank has its last word."""
        mouths: dict[Any, int] = {self._pipes[rank]: rank for rank in ranks}
        deaths: dict[Any, int] = {self._processes[rank].sentinel: rank for rank in range(self.ranks)}
        ready = wait([*mouths, *deaths], max(seconds, 0))
        return [mouths[end] for end in ready if end in mouths] or [deaths[end] for end in ready]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = pickle.loads(self._pipes[rank].recv_bytes())
            return answer
        except (EOFError, OSError):
            raise LabError(self._died(rank)) from None

    def _died(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(1)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        return f"rank {rank} of {self.ranks} {how}, so the others were ended too: try the same again"


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    """The life of a rank: join the group, then call what it is told to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts the whole process group: the kernel decides
    threading.Thread(target=_follow, args=(folder,), daemon=True).start()
    torch.set_num_threads(1)
    try:
        _join(rank, world, folder)
        pipe.send_bytes(pickle.dumps(("done", None)))
    except Exception as error:
        pipe.send_bytes(_failure(error))
        return
    while True:
        try:
            name, values = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            answer = pickle.dumps(("done", _function(name)(rank, world, **values)))
        except Exception as error:
            answer = _failure(error)
        pipe.send_bytes(answer)


def _follow(folder: str) -> None:
    """Wait until the parent has ended, however it did; then nothing of this rank stays."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _join(rank: int, world: int, folder: str) -> None:
    store = dist.FileStore(os.path.join(folder, "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, pg_options=_loopback())


def _loopback() -> Any:
    """Gloo on 127.0.0.1: by its own choice it would listen on the machine's name."""
    try:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return options
    except AttributeError:
        return None


def _on_torchrun(name: str, ranks: int, values: dict[str, Any]) -> list[Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        atexit.register(dist.destroy_process_group)
    world = dist.get_world_size()
    if world != ranks:
        raise LabError(f"ranks = {ranks}, and torchrun started {world}: try {world}")
    torch.manual_seed(0)
    answers: list[Any] = [None] * world
    dist.all_gather_object(answers, _function(name)(dist.get_rank(), world, **values))
    return answers


def _named(function: str | Callable[..., Any]) -> str:
    """The name under which a rank can import a function."""
    if isinstance(function, str):
        return function
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise LabError(f"{name} was typed in a cell, and a rank cannot import it: try to put it into a .py file")
    return f"{module}:{name}"


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def _failure(error: Exception) -> bytes:
    sentence = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
    return pickle.dumps(("raised", (sentence, traceback.format_exc())))


def _raised(rank: int, words: tuple[str, str]) -> LabError:
    error = LabError(f"rank {rank}: {words[0]}")
    error.add_note(words[1])
    return error


def _silent(ranks: Sequence[int], timeout: float) -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
    return (
        f"{who} gave no answer within {timeout:g} s, so all were ended: does every rank take part in each collective?"
    )


def _method() -> str:
    return "forkserver" if sys.platform == "linux" and not torch.cuda.is_available() else "spawn"


def _context(start: str) -> BaseContext:
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    return context


def _inside() -> bool:
    return multiprocessing.parent_process() is not None


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """A child would run the parent's script again, if it knew it: a notebook saved as .py has no __main__ guard."""
    main = sys.modules["__main__"]
    kept: dict[str, Any] = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(kept)


atexit.register(close)
