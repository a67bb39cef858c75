"""A pool of ranks, which starts them when they are needed, and again after a fault."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from labkit.declare import Choice, Range
from labkit.errors import LabError
from labkit.workers import _start
from labkit.workers._crew import Crew
from labkit.workers._names import pack

MOST = 4  # ranks that one machine of a learner carries
TIMEOUT = Range(0.01, 86400, unit="s")


class Pool:
    """Ranks in one process group, started at the first run.

    >>> with Pool(2) as ranks:
    ...     ranks.run("labkit.workers:total", value=1)
    [2.0, 2.0]

    `start` is forkserver or spawn, `device` cpu or cuda. Ranks meet over a file in a private folder, and talk over
    127.0.0.1 alone, or over NCCL where each has a GPU of its own.
    """

    def __init__(self, ranks: int = 2, start: str = "", device: str = "cpu") -> None:
        self.ranks = int(Range(1, MOST).check("ranks", ranks, int))
        self.device = Choice(("cpu", "cuda")).check("device", device, str)
        self.start = Choice(_start.methods(self.device)).check("start", start or _start.methods(self.device)[0], str)
        self._lock = threading.RLock()
        self._crew: Crew | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def kind(self) -> tuple[int, str, str]:
        """What makes two pools the same."""
        return self.ranks, self.start, self.device

    @property
    def processes(self) -> list[int]:
        """The process id of each rank; none before the first run."""
        return [process.pid or 0 for process in self._crew.processes] if self._crew else []

    def run(self, function: str | Callable[..., Any], *, timeout: float = 60, **values: Any) -> list[Any]:
        """Call a function on every rank, and return what each returned. After a fault no rank of this start stays."""
        seconds = TIMEOUT.check("timeout", timeout, float)
        call = pack(function, values if self.device == "cpu" else {**values, "device": self.device})
        with self._lock:
            crew = self._ready_crew()
            try:
                if not crew.ready:
                    crew.start()
                return crew.call(call, seconds)
            except Exception:
                if self._crew is not crew:
                    raise LabError("the ranks were closed while they worked: try the same again") from None
                raise
            finally:
                if not crew.clean:
                    if self._crew is crew:
                        self.close()
                    else:
                        crew.tidy()

    def close(self) -> None:
        """End the ranks, and remove their folder; a run in another thread raises LabError."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.kill()
            with self._lock:  # a run that waits for these ranks sees them end, and lets go
                crew.tidy()

    def _ready_crew(self) -> Crew:
        """The ranks of the last run if all are alive and waiting, else new ones that are yet to be started."""
        if self._crew is None or not self._crew.ready:
            self.close()
            if _start.inside():
                raise LabError("a rank cannot start ranks of its own: try to call it from the notebook")
            with _start.held_back():
                self._crew = Crew(*self.kind)
        return self._crew
