"""The processes of a pool, from start to end: their answers, and the rank at fault."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from labkit.errors import LabError
from labkit.workers import _rank, _start

START = 180.0  # seconds that a start may take: loading torch is slow on a busy machine
GRACE = 0.2  # seconds in which a death may still explain what another rank raised
PATIENCE = 1.0  # the same, when it raised because a connection was lost
WORDS = {"raised": 1, "refused": 1, "aborted": 2, "lost": 3, "died": 0}  # the lowest is the cause of the others


class Fault(NamedTuple):
    """What went wrong in a rank: a word of WORDS, a sentence, a traceback if there is one."""

    word: str
    sentence: str
    stack: str = ""

    def error(self) -> LabError:
        """The fault to raise."""
        error = LabError(self.sentence)
        if self.stack:
            error.add_note(self.stack)
        return error


class Crew:
    """Ranks of one start."""

    def __init__(self, ranks: int, start: str, device: str) -> None:
        self.ranks, self.method, self.device = ranks, start, device
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.clean = True  # whether no answer is due
        self._over = self._late = False
        self._growing = threading.Lock()
        self._trouble: LabError | None = None
        self.folder = _folder()
        self.keeper = _start.keeper(self.folder)
        _crews.add(self)

    @property
    def ready(self) -> bool:
        """Whether every rank lives and waits for a call: one that is silent, and has not ended."""
        if not self.clean or len(self.pipes) < self.ranks:
            return False
        return not wait([*self.pipes, *(process.sentinel for process in self.processes)], 0)

    def start(self) -> None:
        """Start the ranks, and wait until they have met."""
        self.clean = False
        launch = threading.Thread(target=self._launch, daemon=True)
        launch.start()
        while launch.is_alive() and not self._over:
            launch.join(0.02)
        if self._trouble or self._over:
            raise self._trouble or LabError("the ranks were closed while they started: try the same again")
        self._answers(START)

    def call(self, message: bytes, seconds: float) -> list[Any]:
        """Send every rank the same message, and return their answers."""
        self.clean = False
        with self._bounded(seconds + PATIENCE):
            for rank, pipe in enumerate(self.pipes):
                try:
                    pipe.send_bytes(message)
                except OSError:
                    raise self._death(rank).error() from None
            return self._answers(seconds)

    @contextlib.contextmanager
    def _bounded(self, seconds: float) -> Iterator[None]:
        """End the ranks after that time: a stopped one reads no large message, and this thread would wait forever."""

        def end() -> None:
            self._late = True
            self.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def kill(self) -> None:
        """End all ranks at once, from any thread."""
        self._over = True
        if self.keeper is not None and self.keeper.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.keeper.pid, signal.SIGKILL)
        for process in list(self.processes):
            with contextlib.suppress(ValueError):  # another thread has seen it end
                process.kill()  # it may not have joined the group yet

    def tidy(self) -> None:
        """Wait until all have ended, and remove what they leave."""
        with _start.held_back():
            self.kill()
            _start.dismiss(self.keeper)
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._growing.acquire(blocking=False):
                self._reap()
                self._growing.release()
            else:  # a server that still loads torch starts a rank when it has done so
                threading.Thread(target=self._reap_late, daemon=True).start()

    def _reap_late(self) -> None:
        with self._growing:
            self.kill()
            self._reap()

    def _reap(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            with contextlib.suppress(ValueError):  # not gone yet: no signal reaches it in the kernel
                process.close()
        self.processes, self.pipes = [], []
        shutil.rmtree(self.folder, ignore_errors=True)

    def forget(self) -> None:
        """Release what belongs to the process that this one was forked from."""
        for pipe in self.pipes:
            pipe.close()
        _start.forget(self.keeper)
        multiprocessing.process._children.difference_update(self.processes)  # type: ignore[attr-defined]
        self.processes, self.pipes, self.keeper, self.folder = [], [], None, ""

    def _launch(self) -> None:
        """Start every rank, in a thread that the interrupt button cannot stop halfway: half a start ends the server."""
        try:
            with _start.launching(self.method) as context:
                for rank in range(self.ranks):
                    self._launch_rank(rank, context)
        except LabError as error:
            self._trouble = error

    def _launch_rank(self, rank: int, context: BaseContext) -> None:
        here, there = context.Pipe()
        group = self.keeper.pid if self.keeper else 0
        arguments = (rank, self.ranks, self.folder, group, self.device, there)
        process = context.Process(  # type: ignore[attr-defined]
            target=_rank.serve, args=arguments, name=f"labkit-rank-{rank}", daemon=True
        )
        with self._growing, there:
            if self._over:
                here.close()
                return
            process.start()
            self.processes.append(process)
            self.pipes.append(here)

    def _answers(self, seconds: float) -> list[Any]:
        """One answer of every rank, or the fault that explains the others."""
        answers: dict[int, Any] = {}
        faults: dict[int, Fault] = {}
        until = time.monotonic() + seconds
        while due := [rank for rank in range(self.ranks) if rank not in answers and rank not in faults]:
            ready = self._ready(due, faults, until - time.monotonic())
            if not ready:
                break
            for rank in ready:
                answer = self._hear(rank)
                if isinstance(answer, Fault):
                    faults[rank] = answer
                    until = min(until, time.monotonic() + (PATIENCE if answer.word == "lost" else GRACE))
                else:
                    answers[rank] = answer
        if faults:
            self.clean = len(faults) == self.ranks and all(each.word == "refused" for each in faults.values())
            raise min(faults.values(), key=lambda each: WORDS[each.word]).error()
        if due:
            raise self._silence(due, seconds).error()
        self.clean = True
        return [answers[rank] for rank in range(self.ranks)]

    def _ready(self, due: Iterable[int], faults: Iterable[int], seconds: float) -> list[int]:
        """The ranks with a message within the time, the last message of a dead rank included."""
        mouths: dict[Any, int] = {self.pipes[rank]: rank for rank in due}
        deaths: dict[Any, int] = {
            self.processes[rank].sentinel: rank for rank in range(self.ranks) if rank not in faults
        }
        ready = wait([*mouths, *deaths], max(seconds, 0))
        return [mouths[end] for end in ready if end in mouths] or [deaths[end] for end in ready]

    def _hear(self, rank: int) -> Any:
        """The answer of a rank, or its fault."""
        try:
            kind, *words = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            return self._death(rank)
        if kind != "done":
            return Fault(kind, f"rank {rank}: {words[0]}", words[1])
        try:
            return pickle.loads(words[0])
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            return Fault(
                "raised", f"rank {rank}: what it returned cannot be read here ({what}): try numbers, text, lists"
            )

    def _death(self, rank: int) -> Fault:
        if self._late:
            return Fault(
                "died", f"rank {rank} stopped halfway through a message, so all were ended: try the same again"
            )
        process = self.processes[rank]
        process.join(1)
        code = process.exitcode
        word = "aborted" if code == -signal.SIGABRT else "died"
        return Fault(word, f"rank {rank} of {self.ranks} {_ended(code)}, so all were ended: try the same again")

    def _silence(self, ranks: list[int], seconds: float) -> Fault:
        """The ranks that gave no answer in time, and where they are."""
        who = f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + " and ".join(map(str, ranks))
        places = {rank: self._whereabouts(rank) for rank in ranks}
        lines = "; ".join(f"rank {rank} is at {place}" for rank, (place, _) in places.items() if place)
        stacks = "\n".join(f"rank {rank}:\n{stack}" for rank, (_, stack) in places.items() if stack)
        sentence = (
            f"{who} gave no answer within {seconds:g} s, so all were ended{f' ({lines})' if lines else ''}: "
            "try to let every rank take part in each collective, or a longer timeout"
        )
        return Fault("raised", sentence, stacks)

    def _whereabouts(self, rank: int) -> tuple[str, str]:
        """Where a rank is, unless it is in C code that lets no other thread run."""
        pipe = self.pipes[rank]
        with contextlib.suppress(EOFError, OSError):
            pipe.send_bytes(_rank.WHERE)
            if pipe.poll(GRACE):
                kind, *words = pickle.loads(pipe.recv_bytes())
                if kind == "at":
                    return words[0], words[1]
        return "", ""


def _ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (by the system, if memory was short)" if name == "SIGKILL" else "")


def _folder() -> str:
    """A new folder that only its owner can look into."""
    try:
        return tempfile.mkdtemp(prefix="labkit-ranks-")
    except OSError as error:
        raise LabError(f"there is no temporary folder ({error}): try to set TMPDIR to a folder with room") from error


def _forget() -> None:
    for crew in _crews:
        crew.forget()


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
