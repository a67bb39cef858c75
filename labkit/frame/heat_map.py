"""The picture of a gradient's entries: correct, this, difference, on one colour scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, Normalize

from labkit.entries import COLUMNS, ROWS, Entries
from labkit.frame.canvas import Canvas
from labkit.frame.style import Page
from labkit.wording import three

ENDS = ("#00695c", "#8a4b08")  # negative, positive: neither blue nor vermilion, which say right and wrong


def scale(page: Page) -> LinearSegmentedColormap:
    """From teal to brown; 0 is nearly the page itself, so that what is not there is not seen."""
    light = ("#7fd1c3", "#f0b35f")
    ends = light if page.dark else ENDS
    return LinearSegmentedColormap.from_list("entries", [ends[0], page.colour("paper"), ends[1]])


class HeatMap:
    """Three maps side by side: rows are named by what they are, columns are coordinates; a bar tells the colours."""

    def __init__(self, canvas: Canvas) -> None:
        grid = canvas.beside((1, 1, 1, 0.3), gap=1.0)
        self.axes = [canvas.axes("", "", position=grid[at], moving="xy") for at in range(3)]
        blank = np.full((ROWS, COLUMNS), np.nan)
        self.maps = [canvas.move(axes.pcolormesh(blank, norm=Normalize(-1, 1))) for axes in self.axes]
        self.frames = [canvas.line(axes, "reference", colour="faint") for axes in self.axes]
        self.heads = [
            canvas.text(axes, role=role, va="bottom")
            for axes, role in zip(self.axes, ("right", "wrong", "text"), strict=True)
        ]
        self.names = [canvas.text(self.axes[0], ha="right", va="center", size=0.85) for _ in range(ROWS)]
        self.bar = canvas.axes("", "", position=grid[3], moving="y")
        self.colours = canvas.move(self.bar.pcolormesh(np.linspace(-1, 1, 64)[:, None], norm=Normalize(-1, 1)))
        for axes in (*self.axes, self.bar):
            axes.spines[:].set_visible(False)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_visible(False)
        self.ends = [canvas.text(self.bar, ha="left", va="center", size=0.85) for _ in range(3)]

    def draw(
        self, canvas: Canvas, seen: Entries, heads: Sequence[str] = ("correct", "this loop", "difference")
    ) -> None:
        """Show the entries of one parameter."""
        rows, columns = seen.reference.shape
        colours, largest = scale(canvas.page), seen.largest or 1.0
        for axes, mesh, head, word, values in zip(
            self.axes, self.maps, self.heads, heads, (seen.reference, seen.gradient, seen.difference), strict=True
        ):
            whole = np.full((ROWS, COLUMNS), np.nan)
            whole[:rows, :columns] = values.numpy() / largest
            mesh.set_array(np.ma.masked_invalid(whole))
            mesh.set_cmap(colours)
            canvas.frame(axes, x=(-0.02 * columns, 1.01 * columns), y=(1.02 * rows, -0.09 * rows))
            self.frames[self.axes.index(axes)].set_data([0, columns, columns, 0, 0], [0, 0, rows, rows, 0])
            head.set(text=word, position=(0, -0.015 * rows))
        self.colours.set_cmap(colours)
        canvas.frame(self.bar, x=(0, 5), y=(-1.3, 69.8))
        for at, text in enumerate(self.names):
            text.set(text=seen.rows[at] if at < rows else "", position=(-0.01 * columns, at + 0.5))
        for text, height, value in zip(self.ends, (0, 32, 64), (-largest, 0.0, largest), strict=True):
            text.set(text=three(value), position=(1.4, height))
