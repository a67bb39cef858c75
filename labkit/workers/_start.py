"""How ranks are started, and the keeper that makes sure they end."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from typing import Any

from labkit.errors import LabError

PRELOAD = ["torch", "torch._dynamo", "torch.distributed.pipelining", "labkit.workers._server"]
KEEPER = 'read _; rm -rf "$@"; kill -9 0'

_home = os.getpid()
_keepers: list[subprocess.Popen[bytes]] = []  # of the server, which has a folder of its own


def methods(device: str) -> tuple[str, ...]:
    """The start methods that this machine has, the best first: a fork cannot use a GPU that its parent has touched."""
    both = sys.platform == "linux" and device == "cpu"
    return ("forkserver", "spawn") if both else ("spawn",)


def inside() -> bool:
    """Whether this process was started by another Python process, as a rank is, or forked from one."""
    return multiprocessing.parent_process() is not None or os.getpid() != _home


def keeper(*folders: str) -> subprocess.Popen[bytes] | None:
    """A shell of its own process group, which outlives whatever kills this process by the time it takes to tidy up.

    It reads until this process has ended, then removes the folders and ends its group: the ranks are in it, also one
    that holds the interpreter's lock in C code and could not end itself. None where there is no /bin/sh.
    """
    if os.name != "posix":
        return None
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, "labkit-keeper", *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
            cwd="/",
        )
    except OSError:
        return None


def dismiss(each: subprocess.Popen[bytes] | None) -> None:
    """End a keeper, and its group with it."""
    if each is None or each.returncode is not None:
        return
    assert each.stdin is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(each.pid, signal.SIGKILL)
    each.wait()
    each.stdin.close()


def server() -> BaseContext:
    """The context whose processes a server forks; the server loads torch in the background."""
    from multiprocessing import forkserver, resource_tracker, util

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with cannot_start(), hidden_main():
        resource_tracker.ensure_running()  # by itself, since it would take the hold off the interrupt button
        with held_back():
            forkserver.ensure_running()
    if not _keepers:
        _keepers.extend(each for each in [keeper(util.get_temp_dir())] if each)  # the server's socket is in there
    return context


_launching = threading.Lock()


@contextlib.contextmanager
def launching(method: str) -> Iterator[BaseContext]:
    """The context in which a thread starts ranks; they ignore the interrupt button from the beginning."""
    with _launching:
        context = server() if method == "forkserver" else multiprocessing.get_context("spawn")
        with cannot_start(), hidden_main(), held_back():
            yield context


@contextlib.contextmanager
def cannot_start() -> Iterator[None]:
    """Turn a refusal of the operating system into one sentence."""
    try:
        yield
    except (OSError, EOFError) as error:
        gone = isinstance(error, FileNotFoundError) and not error.filename
        remedy = "os.chdir to a folder that exists" if gone else "the same again, or start='spawn'"
        if "too long" in str(error):
            remedy = "to set TMPDIR to a folder with a shorter name"
        raise LabError(f"the ranks cannot be started ({type(error).__name__}: {error}): try {remedy}") from error


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Hide the parent's script, or a child would run it again: a notebook saved as .py has no __main__ guard."""
    main = sys.modules["__main__"]
    attributes: dict[str, Any] = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        del main.__spec__
        vars(main).update(attributes)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold back the interrupt button for the moment that a start or the tidying takes.

    A process started within also ignores it from its first instruction on: it inherits the mask of the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        with _masked():
            yield
        return
    presses: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: presses.append(number))
    try:
        with _masked():
            yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if presses:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _masked() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forget() -> None:
    """A forked copy of this process must not keep the keepers waiting."""
    for each in _keepers:
        forget(each)
    _keepers.clear()


def forget(each: subprocess.Popen[bytes] | None) -> None:
    """Release a keeper that belongs to another process."""
    if each is not None and each.stdin is not None:
        each.stdin.close()
        each.returncode = 0


@atexit.register
def _dismiss() -> None:
    for each in _keepers:
        dismiss(each)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
