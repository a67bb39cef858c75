"""A run under way."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from labkit.frame.trial import Trial

REFRESH = 0.1  # seconds between two pictures of a long run


class Run:
    """A run under way: a way to stop it, the moments at which it is drawn, and an estimate of what is left."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.stop = threading.Event()
        self.began = time.monotonic()
        self._drawn = -math.inf
        trial.begin()

    def is_due(self) -> bool:
        """Whether it is time for the next picture of a long run; if so, the clock starts again."""
        now = time.monotonic()
        due = self.trial.long and now - self._drawn > REFRESH
        if due:
            self._drawn = now
        return due

    def progress(self) -> dict[str, Any]:
        """The fraction done, and words for it."""
        fraction = float(getattr(self.trial.result, "progress", 0.0))
        spent = time.monotonic() - self.began
        left = f", about {spent / fraction * (1 - fraction):.0f} s left" if fraction > 0.05 else ""
        return {"fraction": fraction, "words": f"{fraction:.0%} done{left}"}
