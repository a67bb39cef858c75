"""The one picture of weights per token or sequence: rows are sequences, columns are tokens, 1 is right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize

from labkit.frame.canvas import Canvas
from labkit.wording import show

# Purple to orange through a grey that stands out from a light page and from a dark one: weight 1 is no blank.
PURPLE_ORANGE = LinearSegmentedColormap.from_list("weights", ["#5e3c99", "#a89cc8", "#c4c4c4", "#fdb863", "#c65a00"])
NOTHING = 1e-6  # below the rounding of a float32 gradient
FOURFOLD = Normalize(-2, 2)  # log2 of weight × N: from a quarter of the right weight to four times it


class WeightMap:
    """Weights × N as colours on a diverging scale centred at 1; what is no target stays blank, what is 0 is crossed.

    Each row also carries its weight as a number, so that colour never says anything alone.
    """

    def __init__(self, canvas: Canvas, axes: Axes, rows: int, columns: int) -> None:
        self.canvas, self.axes, self.shape = canvas, axes, (rows, columns)
        self.mesh = canvas.move(axes.pcolormesh(np.full(self.shape, np.nan), cmap=PURPLE_ORANGE, norm=FOURFOLD))
        self.crosses = canvas.line(axes, "reference", linestyle="none", marker="x", markersize=5, colour="text")
        self.words = [canvas.text(axes, va="center", ha="left", size=0.9) for _ in range(rows)]

    def draw(self, weights: Any, labels: list[float] | None = None) -> None:
        """Show weights, (rows, columns) with NaN where there is none; `labels`: one number for each row."""
        values = np.asarray(weights, dtype=float)
        rows, columns = values.shape
        nothing = np.abs(values) < NOTHING
        whole = np.full(self.shape, np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            whole[:rows, :columns] = np.where(nothing, np.nan, np.log2(np.abs(values)))
        self.mesh.set_array(np.ma.masked_invalid(whole))
        y, x = np.nonzero(nothing)
        self.crosses.set_data(x + 0.5, y + 0.5)
        self.canvas.frame(self.axes, x=(0, columns), y=(rows, 0), xticks=[0, columns], yticks=[0, rows])
        for at, words in enumerate(self.words):
            known = labels is not None and at < rows and rows <= 16
            words.set_text(_times(labels[at]) if known and labels else "")
            words.set_position((columns * 1.01, at + 0.5))


def _times(weight: float) -> str:
    weight = 0.0 if abs(weight) < NOTHING else weight
    return "?" if math.isnan(weight) else f"{show(float(f'{weight:.2g}'))}×"
