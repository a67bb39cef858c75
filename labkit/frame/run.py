"""A run under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from labkit.frame.trial import Trial


class Run:
    """A run under way: its results so far, a way to stop it, and an estimate of what is left."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.stop = threading.Event()
        self.began = time.monotonic()

    def __iter__(self) -> Iterator[Any]:
        for result in self.trial.outcomes():
            yield result
            if self.stop.is_set():
                return

    def progress(self) -> dict[str, Any]:
        """The fraction done, and words for it."""
        fraction = float(getattr(self.trial.result, "progress", 0.0))
        spent = time.monotonic() - self.began
        left = f", about {spent / fraction * (1 - fraction):.0f} s left" if fraction > 0.05 else ""
        return {"fraction": fraction, "words": f"{fraction:.0%} done{left}"}
