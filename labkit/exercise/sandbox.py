"""Run a function that a learner wrote, and come back: whatever stops it is said in one sentence.

It contains mistakes, not malice: a crash of the interpreter and a call into C that never returns are beyond it.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import io
import linecache
import pickle
import random
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch

from labkit.declare import quantity

MEMORY = 2**30
AGAIN = 0.002  # seconds after which a loop that caught its deadline meets it again
LINES, CHARACTERS = 5, 400
INNER = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")  # what stands in a line of the function, to a learner

# What a function may change for everybody: how it is read, and how it is put back.
STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's random numbers": (
        lambda: torch.get_rng_state().tolist(),
        lambda s: torch.set_rng_state(torch.tensor(s, dtype=torch.uint8)),
    ),
    "numpy's random numbers": (
        lambda: pickle.dumps(np.random.get_state()),
        lambda s: np.random.set_state(pickle.loads(s)),
    ),
    "Python's random numbers": (random.getstate, random.setstate),
    "Python's recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's deterministic mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
}
INSIDE: dict[str, Any] = {
    "torch's default dtype": torch.float64,  # so that 1 / (a tensor of counts) is as exact as the gradient
    "torch's grad mode": True,
    "torch's number of threads": 1,  # a thread started under the memory limit could end the process
}

TOO_MUCH = "more memory than the 1 GiB it may add to what was in use"
MEANINGS = {  # a piece of an error's type or message, and what it means here
    "does not require grad": "the loss is cut off from the weights: by no_grad, detach, item, or a tensor made anew",
    "backward through the graph a second time": "backward() met a loss that had its backward already",
    "only for scalar outputs": "the loss is still one number per token: add them up before backward()",
    "ZeroDivisionError": "where no target is valid a count is 0: divide by the count of the whole window",
    "RecursionError": "it calls itself without end",
    "MemoryError": TOO_MUCH,
    "can't allocate memory": TOO_MUCH,
    "SystemExit": "it tries to end Python, and shall just return",
}


class Deadline(BaseException):
    """Raised in a function that is out of time; `except Exception` does not catch it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a call."""

    value: object = quantity("what the function returned; None if it did not")
    error: str = quantity("one sentence on what stopped it, or nothing")
    printed: str = quantity("the beginning of what it printed, and how much there was")
    changed: tuple[str, ...] = quantity("global state that it changed, all of it put back")
    seconds: float = quantity("time it took", "s")
    late: bool = quantity("whether it was stopped because its time was over")


def run(function: Callable[..., object], *arguments: object, seconds: float = 5.0) -> Outcome:
    """Call a function; its exceptions, endless loops, huge allocations, floods of print and global changes end here.

    >>> run(max, 1, 2).value, run(max, 1, "2").error
    (2, "Your function raises TypeError: '>' not supported between instances of 'str' and 'int'.")
    >>> run(lambda: print("ha" * 10**6) or torch.manual_seed(0)).changed
    ("torch's random numbers",)

    Stopped after `seconds`: on Unix in the main thread even while it sleeps, elsewhere at its next step in Python; a
    loop that catches everything, as a bare except does, may last longer.
    On Linux it may take 1 GiB more than what is in use. Inside, torch has the default dtype float64 and one thread.
    KeyboardInterrupt passes through.
    """
    printed, outside, value, error = _Printed(), _read(), None, ""
    watch, late, inside, start = _Watch(seconds), False, outside, time.perf_counter()
    try:
        _restore(outside | INSIDE)
        inside = _read()
        with watch.handled(), _memory(), _caught(printed):
            try:
                value = function(*arguments)
            finally:
                watch.stop()
    except KeyboardInterrupt:
        raise
    except BaseException as raised:
        watch.stop()
        error, late = _sentence(raised, seconds), isinstance(raised, Deadline)
    finally:
        duration, after = time.perf_counter() - start, _read()
        _restore(outside)
    if inspect.iscoroutine(value):
        value.close()
    changed = tuple(name for name in STATE if after[name] != inside[name])
    return Outcome(value, error, str(printed), changed, duration, late)


def _read() -> dict[str, Any]:
    return {name: read() for name, (read, _) in STATE.items()}


def _restore(state: dict[str, Any]) -> None:
    for name, (read, write) in STATE.items():
        if read() != state[name]:  # some are slow to write
            write(state[name])


class _Printed(io.TextIOBase):
    """Keeps the beginning of what is written."""

    def __init__(self) -> None:
        self.beginning, self.characters, self.lines = "", 0, 0

    def write(self, text: str) -> int:
        if len(self.beginning) < CHARACTERS:
            self.beginning += text[:CHARACTERS]
        self.characters += len(text)
        self.lines += text.count("\n")
        return len(text)

    def __str__(self) -> str:
        if self.characters <= CHARACTERS and self.lines <= LINES:
            return self.beginning.rstrip("\n")
        excerpt = "\n".join(self.beginning[:CHARACTERS].splitlines()[:LINES])
        return f"{excerpt}\n… ({self.lines:,} lines, {self.characters:,} characters in all)"


@contextlib.contextmanager
def _caught(printed: _Printed) -> Iterator[None]:
    """What is printed goes there, warnings go nowhere, and a filter set for them does not stay."""
    quiet = warnings.catch_warnings(action="ignore")
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), quiet:
        yield


class _Watch(threading.Thread):
    """Raises Deadline in the thread that made it, again and again until it is told to stop."""

    def __init__(self, seconds: float) -> None:
        super().__init__(daemon=True)
        self.seconds, self.due, self.active = seconds, False, True
        self.done, self.lock = threading.Event(), threading.Lock()
        self.owner = threading.get_ident()
        self.signals = hasattr(signal, "pthread_kill") and threading.current_thread() is threading.main_thread()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Runs, and meanwhile its signal is its own; an alarm set by others goes where it went before."""
        before = signal.getsignal(signal.SIGALRM) if self.signals else None

        def alarm(number: int, frame: FrameType | None) -> None:
            if self.due and self.active and frame and frame.f_code.co_filename != __file__:
                raise Deadline
            if not self.due and callable(before):
                before(number, frame)

        if self.signals:
            signal.signal(signal.SIGALRM, alarm)
        self.start()
        try:
            yield
        finally:
            self.stop()
            if self.signals:
                signal.signal(signal.SIGALRM, before or signal.SIG_DFL)

    def run(self) -> None:
        wait = self.seconds
        while not self.done.wait(wait):
            self.due, wait = True, AGAIN if self.signals else 10 * AGAIN
            with self.lock:
                if self.active and not _importing(sys._current_frames().get(self.owner)):
                    self._raise()

    def _raise(self) -> None:
        if self.signals:
            signal.pthread_kill(self.owner, signal.SIGALRM)
        else:
            _asynchronous(self.owner, Deadline)

    def stop(self) -> None:
        self.active = False
        self.done.set()
        with self.lock:
            if not self.signals:
                _arrived()


def _importing(frame: FrameType | None) -> bool:
    """An import that is broken off leaves half a module behind, so the deadline waits for it."""
    while frame and frame.f_code.co_filename != __file__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _asynchronous(thread: int, error: type[BaseException]) -> None:
    """Raise in another thread at its next step in Python, in place of what is not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _arrived() -> None:
    """Let whatever is on its way to this thread arrive.

    Taking it back would leave a flag behind, with which Python 3.11 hangs as soon as a profiler is set, in any thread.
    """
    try:
        _asynchronous(threading.get_ident(), Deadline)
        while True:
            pass
    except Deadline:
        pass


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """A soft limit on the address space, where its present size can be read."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [each for each in (used + MEMORY, soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _sentence(error: BaseException, seconds: float) -> str:
    """Where in the learner's own code it happened, what it was, and what that means here."""
    where = _place(error.__traceback__)
    if isinstance(error, Deadline):
        return f"{where} was still running after {seconds:.2g} s, and was stopped: does a loop there end?"
    message = f"{type(error).__name__}: {_message(error)}".removesuffix(": ")
    meaning = next((f" ({words})" for key, words in MEANINGS.items() if key in message), "")
    return f"{where} raises {textwrap.shorten(message, 160, placeholder=' …')}{meaning}."


def _message(error: BaseException) -> str:
    """Its first sentence."""
    try:
        return str(error).rpartition("CPUAllocator: ")[2].partition(". ")[0].strip().rstrip(".")
    except Exception:  # a message may be code too
        return ""


def _place(trace: TracebackType | None) -> str:
    """The deepest line in the file that the learner's function is from: counted from its def, as they see it."""
    frames = []
    while trace:
        frames.append((trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    inside = [frame for frame in frames if frame[0].co_filename != __file__ and frame[0].co_name not in INNER]
    theirs = [frame for frame in inside if frame[0].co_filename == inside[0][0].co_filename]
    if not theirs:
        return "Your function"
    code, line = theirs[-1]
    text = textwrap.shorten(linecache.getline(code.co_filename, line), 60, placeholder=" …")
    return f"Line {line - code.co_firstlineno + 1} of {code.co_name}{text and f', `{text}`,'}"
