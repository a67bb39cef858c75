"""What a rank does: join the group, then answer calls until the notebook ends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import queue
import re
import shutil
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from labkit.errors import LabError

WHERE = b"where?"
M_MMAP_THRESHOLD = -3  # from malloc.h
LOST = re.compile(r"Connection (closed|reset|refused)|Broken pipe|Socket closed", re.IGNORECASE)


def serve(rank: int, world: int, folder: str, group: int, device: str, pipe: Connection) -> None:
    """The life of a rank. It listens before it loads torch, so that it never outlives the notebook."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts all processes: the notebook decides
    if group:
        with contextlib.suppress(OSError):  # the group has ended already: then so has the pipe
            os.setpgid(0, group)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    say = _mouth(pipe)
    _listen(pipe, calls, say, folder, forever=False)  # a store that waits for other ranks would let no thread listen
    threading.Thread(target=_listen, args=(pipe, calls, say, folder), daemon=True).start()
    say(*_outcome(_join, rank, world, folder, device))
    _give_back()
    gc.freeze()  # what is there now stays: the collector need not look at it after every call
    while True:
        say(*_outcome(_call, rank, world, calls.get()))
        gc.collect()  # models hold cycles, and the notebook has its answer already
        gc.freeze()


def _give_back() -> None:
    """Return large blocks to the system as soon as they are freed; glibc would keep them."""
    if set_option := getattr(ctypes.CDLL(None) if os.name == "posix" else None, "mallopt", None):
        set_option(M_MMAP_THRESHOLD, 1 << 20)


def _mouth(pipe: Connection) -> Callable[..., None]:
    lock = threading.Lock()

    def say(kind: str, *words: Any) -> None:
        with lock:
            pipe.send_bytes(pickle.dumps((kind, *words)))

    return say


def _listen(
    pipe: Connection, calls: queue.SimpleQueue[bytes], say: Callable[..., None], folder: str, forever: bool = True
) -> None:
    """Pass calls on and report where the rank is; when the notebook ends, however it ends, nothing is left."""
    try:
        while forever or pipe.poll():
            message = pipe.recv_bytes()
            if message == WHERE:
                say("at", *_whereabouts())
            else:
                calls.put(message)
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _join(rank: int, world: int, folder: str, device: str) -> bytes:
    from labkit.workers import _group

    _group.join(rank, world, folder, device)
    return pickle.dumps(None)


def _call(rank: int, world: int, call: bytes) -> bytes:
    from labkit.workers import _group
    from labkit.workers._names import unpack

    try:
        function, values = unpack(call)
    except LabError as error:
        raise Refused(str(error)) from error.__cause__
    answer = _group.call(function, rank, world, values)
    try:
        return pickle.dumps(answer)
    except Exception as error:
        raise LabError(
            f"what it returned cannot be sent ({type(error).__name__}: {error}): try numbers, text, lists"
        ) from error


class Refused(LabError):
    """A call that never began, so that the ranks are still usable."""


def _outcome(action: Callable[..., bytes], *arguments: Any) -> tuple[Any, ...]:
    """The message: done with the answer; or refused, raised, lost (the connection), with sentence and traceback."""
    try:
        return "done", action(*arguments)
    except BaseException as error:
        return outcome_of(error)


def outcome_of(error: BaseException) -> tuple[str, str, str]:
    """The kind of a fault, its sentence and its traceback.

    >>> outcome_of(RuntimeError("Connection closed by peer [127.0.0.1]:4242"))[:2]
    ('lost', 'RuntimeError: Connection closed by peer [127.0.0.1]:4242')
    """
    sentence = str(error) if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
    if isinstance(error, Refused):
        kind = "refused"
    elif not isinstance(error, LabError) and (isinstance(error, ConnectionError) or LOST.search(str(error))):
        kind = "lost"
    else:
        kind = "raised"
    return kind, sentence, "".join(traceback.format_exception(error))


def _whereabouts() -> tuple[str, str]:
    """The line that the rank is at, outside libraries, and its whole stack."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    stack = traceback.extract_stack(frame)
    own = [each for each in stack if not _library(each.filename)]
    at = own[-1] if own else stack[-1]
    inside = max((n + 1 for n, each in enumerate(stack) if os.path.basename(each.filename) == "_group.py"), default=0)
    lines = traceback.format_list(stack[inside:] or stack)
    return f"{os.path.basename(at.filename)} line {at.lineno}: {at.line}", "".join(lines)


def _library(file: str) -> bool:
    packages = sysconfig.get_path("purelib")
    if file.startswith(packages):
        return file.startswith(os.path.join(packages, "torch"))
    return file.startswith(("<", sysconfig.get_path("stdlib")))
