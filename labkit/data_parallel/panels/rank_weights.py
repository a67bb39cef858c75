"""The one picture of weights by rank and microbatch: a row each, 1 is right."""

from __future__ import annotations

import math
from collections.abc import Sequence

from labkit.frame.canvas import Canvas, polyline
from labkit.wording import percent


def right(error: float, tolerance: float) -> str:
    """Right within rounding, or by how much it is off.

    >>> right(1e-16, 1e-13), right(0.5, 1e-13)
    ('the gradient is right', '50 % off the full batch')
    """
    return "the gradient is right" if error <= tolerance else f"{percent(error)} off the full batch"


class Rows:
    """Microbatches, rank by rank: a dot for the weight fitted in each rank's gradient, a bar for the algebra."""

    def __init__(self, canvas: Canvas, most: int) -> None:
        self.canvas = canvas
        self.axes = canvas.axes("weight × N", "", moving="xy")
        self.axes.yaxis.set_visible(False)
        canvas.frame(self.axes, x=(-1, 3), y=(4, 0), xticks=[0, 1])
        self.one = canvas.line(self.axes, "reference")
        self.cuts = canvas.line(self.axes, "reference", colour="faint")
        self.predicted = canvas.line(
            self.axes, "modelled", marker="|", markersize=15, markeredgewidth=3, linestyle="none"
        )
        self.fitted = canvas.line(self.axes, "measured")
        self.words = [canvas.text(self.axes, va="center", ha="left") for _ in range(most)]
        self.middle = canvas.text(self.axes, va="center", ha="center")

    def draw(
        self,
        owner: Sequence[int],
        counts: Sequence[float],
        fitted: Sequence[Sequence[float]],
        predicted: Sequence[float] = (),
        instead: str = "",
    ) -> None:
        """Show weights, a list for every rank's gradient; `instead`: words where there are no weights."""
        rows = len(owner)
        places = [at + 0.5 for at in range(rows)]
        known = [each for each in (1.0, *predicted, *(w for row in fitted for w in row)) if math.isfinite(each)]
        top = 1.1 * max(known)
        height = self.canvas.lines / rows
        room = min(0.5, 10.2 / self.canvas.columns)
        left = -top * room / (1 - room)  # beside the words
        self.canvas.frame(self.axes, x=(left, top), y=(rows, 0), xticks=[1, 0, max(known)])
        self.one.set_data([1, 1], [0, rows])
        edges = [at for at in range(1, rows) if owner[at] != owner[at - 1]]
        self.cuts.set_data(*polyline([(left, at), (top, at)] for at in edges))
        self.predicted.set_data(predicted, places[: len(predicted)])
        self.fitted.set_data([w for row in fitted for w in row], places * len(fitted))
        for at, words in enumerate(self.words):
            words.set_text(f"rank {owner[at]}: {int(counts[at])} tokens" if at < rows else "")
            words.set_position((left + 0.02 * (top - left), at + 0.5))
            words.set_fontsize(self.canvas.page.points * min(1.0, height / 1.15))
        self.middle.set(text=instead, position=(top / 2, rows / 2))
