"""The predictions of a class: appended to a folder that all its members can write, under random ids.

Off unless LABKIT_CLASS names that folder. Each process appends to a file of its own, so thirty that write at once
lose nothing, on a network file system too. No names are written, and nothing leaves the folder. What lies there was
written by others: it is read as numbers, never as code or markup, and what is no prediction is passed over.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import queue
import re
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from labkit.declare import Value, quantity
from labkit.learner import one_time_messages

FILE = re.compile(r"[0-9a-f]{32}\.jsonl")
FILES = 1000  # of one class; more are not read
BYTES = 1_000_000  # of one file; the rest is not read
LINE = 4000  # characters of a prediction
LARGEST = 1e30  # no question of ours has such an answer
AHEAD = 3600.0  # seconds by which another machine's clock may be ahead


@dataclasses.dataclass(frozen=True)
class Entry:
    """One prediction of one writer."""

    writer: str = quantity("a random id, new in each kernel")
    experiment: str = quantity("'topic.name'")
    number: float = quantity("the prediction, in the unit of the question")
    values: Mapping[str, Value] = quantity("how the controls stood")
    at: float = quantity("when, by the writer's clock", "s")


def folder() -> pathlib.Path | None:
    """The class's folder; None where there is no class.

    >>> folder() is None
    True
    """
    path = os.environ.get("LABKIT_CLASS", "")
    return pathlib.Path(path) if path else None


def submit(experiment: str, number: float, values: Mapping[str, Value]) -> None:
    """Append a prediction in the background; without a class nothing happens.

    >>> submit("roofline.ceiling", 150, {"intensity": 2.0})
    """
    place = folder()
    if place is None:
        return
    one_time_messages.tell("class", "Your predictions are also shown, without a name, on the board of your class.")
    line = {"experiment": experiment, "prediction": float(number), "values": dict(values), "at": round(time.time(), 3)}
    _writer().put(place, json.dumps(line))


def flush(seconds: float = 2.0) -> bool:
    """Wait until all is written, or the time is over; whether it is.

    >>> flush()
    True
    """
    return all(writer.waited(seconds) for writer in _writers if writer.process == os.getpid())


def entries(place: pathlib.Path) -> list[Entry]:
    """All predictions in a folder, of each writer in the order of writing; any other content is skipped.

    >>> entries(pathlib.Path("/nowhere"))
    []
    """
    return [entry for name in _names(place) for line in _lines(place / name) if (entry := _entry(name[:32], line))]


# Writing: one thread for each process, so that a slow or dead folder keeps nobody waiting.


class Writer:
    """Appends lines to one file with a random name."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.name = f"{uuid.uuid4().hex}.jsonl"
        self._lines: queue.Queue[tuple[pathlib.Path, str]] = queue.Queue(maxsize=1000)
        self._torn = False
        threading.Thread(target=self._work, name="class-writer", daemon=True).start()

    def put(self, place: pathlib.Path, line: str) -> None:
        """Queue a line for writing; beyond a thousand waiting lines it is dropped."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait((place, line))

    def waited(self, seconds: float) -> bool:
        """Whether all is written within so many seconds."""
        end = time.monotonic() + seconds
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)
        return not self._lines.unfinished_tasks

    def _work(self) -> None:
        while True:
            place, line = self._lines.get()
            try:
                self._append(place, line)
            except OSError as error:
                reason = error.strerror or str(error)
                one_time_messages.tell("board", f"Your predictions do not reach the board of your class ({reason}).")
            finally:
                self._lines.task_done()

    def _append(self, place: pathlib.Path, line: str) -> None:
        """One line in one write; after a torn one on a line of its own."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        text = f"{chr(10) * self._torn}{line}\n".encode()
        file = os.open(place / self.name, flags, 0o644)
        try:
            self._torn = True
            if os.write(file, text) < len(text):
                raise OSError("the disk is full")
            self._torn = False
        finally:
            os.close(file)


_writers: list[Writer] = []
_choosing = threading.Lock()
atexit.register(flush, 1.0)


def _writer() -> Writer:
    """The writer of this process; a fork gets its own."""
    with _choosing:
        if not _writers or _writers[-1].process != os.getpid():
            _writers[:] = [Writer()]
        return _writers[-1]


# Reading: plain files with our kind of name, up to a limit, and of each line only what is a prediction.


def _names(place: pathlib.Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(filter(FILE.fullmatch, os.listdir(place)))[:FILES]
    return []


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    """Its whole lines; nothing where it is no plain file: a pipe is not waited for, a link not followed."""
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with open(os.open(path, flags), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                yield from file.read(BYTES).split(b"\n")[:-1]


def _entry(writer: str, line: bytes) -> Entry | None:
    if len(line) > LINE:
        return None
    try:
        row = json.loads(line)
        number, at = _number(row["prediction"]), _number(row["at"])
        values = {str(name): _setting(value) for name, value in dict(row["values"]).items()}
        if not isinstance(row["experiment"], str) or abs(number) > LARGEST or not 0 <= at <= time.time() + AHEAD:
            return None
        return Entry(writer, row["experiment"], number, values, at)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
        return None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError("a number")
    return float(value)


def _setting(value: Any) -> Value:
    return value if isinstance(value, bool | str) else _number(value)
