"""When the graphs are let go: backward in the loop, the classic mistake, and what looks like it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from labkit import rules
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.listing import sources
from labkit.memory import graphs, saved_tensors
from labkit.memory.saved_tensors import Timeline
from labkit.tolerance import Tolerance
from labkit.wording import percent, three

MB = 1e6


def amount(count: float) -> str:
    """Bytes as a person says them.

    >>> amount(289540), amount(4636548), amount(-99)
    ('290 kB', '4.64 MB', '-99 B')
    """
    size = abs(count)
    return f"{three(count / MB)} MB" if size >= MB else f"{three(count / 1e3)} kB" if size >= 1e3 else f"{count:.0f} B"


def equality(error: float, bound: Tolerance) -> dict[str, Any]:
    """A table of how equal two gradients are."""
    return {"columns": ["relative error", "tolerance"], "rows": [[f"{error:.2g}", str(bound)]]}


class Classic(Experiment[graphs.Classic]):
    """When the graphs are let go."""

    title = "The classic mistake"
    question = "The other loop's peak: how many times that of backward in the loop?"
    unit = "times"
    note = (
        "Measured: bytes that autograd keeps, most at once in the time of each microbatch, and what is left at its "
        "end. All loops leave the same gradient."
    )
    run = staticmethod(graphs.classic)

    def source(self) -> str:
        """The right loop, the others, then what compares them."""
        shown: list[Any] = [rules.token_mean, *graphs.LOOPS.values(), saved_tensors.watch, graphs.classic]
        return sources(*shown)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("microbatches done", "kept (MB)", whole="x", moving="xy")
        self.full = canvas.line(self.axes, "reference")
        self.lines = [canvas.line(self.axes, role, marker="") for role in ("right", "wrong", "right")]
        self.marks = [canvas.line(self.axes, role, linestyle="none", markersize=8) for role in ("right", "wrong")]
        self.marks.append(canvas.line(self.axes, "right", linestyle="none", marker="s", markersize=6))
        self.same = canvas.line(self.axes, "reference", colour="text", linestyle=":", linewidth=2.5)
        self.words = [canvas.text(self.axes, va="center") for _ in range(3)]
        self.words.append(canvas.text(self.axes, "full batch", va="bottom"))
        canvas.frame(self.axes, x=(0, 5.2), y=(0, 3))

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        K = values["accumulation_steps"]
        canvas.frame(self.axes, x=(0, 1.4 * K), xticks=[0, K])
        canvas.hide(self.axes, K / 2, 1.5)

    def draw(self, canvas: Canvas, result: graphs.Classic) -> None:
        K, runs = len(result.right.highest), (result.right, result.other, result.checkpointed)
        top = max(result.full, *(run.peak for run in runs)) / MB
        canvas.frame(self.axes, x=(0, 1.4 * K), y=(0, 1.2 * top), xticks=[0, K])
        self.full.set_data([0, K], [result.full / MB] * 2)
        self.same.set_data(*(_saw(result.other) if _harmless(result) else ([], [])))
        for line, marks, run in zip(self.lines, self.marks, runs, strict=True):
            x, y = _saw(run) if run is not result.other or not _harmless(result) else ([], [])
            line.set_data(x, y)
            marks.set_data(x[1::2], y[1::2])
        heights = apart([max(run.peak / MB, 0.06 * top) for run in runs], 0.1 * top)
        names = "in the loop", result.loop, "checkpointed"
        for words, said, height in zip(self.words[:3], names, heights, strict=True):
            words.set_text(said)
            words.set_position((1.02 * K, height))
        self.words[3].set_position((0.02 * K, result.full / MB + 0.02 * top))

    def answer(self, result: graphs.Classic) -> float:
        return result.ratio

    def headline(self, result: graphs.Classic) -> str:
        if not result.equal:
            return f"The gradients are {percent(result.relative_error)} apart"
        if _harmless(result):
            return f"{result.loop}: no more than backward in the loop"
        return f"{result.loop}: {three(result.ratio)} times the peak, for the same gradient"

    def describe(self, result: graphs.Classic) -> str:
        K, share = len(result.right.highest), result.checkpointed.peak / result.right.peak
        return (
            f"{K} microbatch{'es' if K > 1 else ''}. Backward in the loop keeps {amount(result.right.peak)} at once, "
            f"{result.loop} {amount(result.other.peak)}, the full batch {amount(result.full)}. With checkpointing it "
            f"is {amount(result.checkpointed.peak)}, {percent(share)} of the loop's. The gradients differ by at most "
            f"{result.relative_error:.1g}, rounding explains {result.tolerance.value:.1g}."
        )

    def tables(self, result: graphs.Classic) -> list[dict[str, Any]]:
        runs = {"in the loop": result.right, result.loop: result.other, "checkpointed": result.checkpointed}
        columns = ["microbatch", *(f"{name}, {what} (B)" for name in runs for what in ("highest", "left"))]
        series = [values for run in runs.values() for values in (run.highest, run.left)]
        rows = [[str(at), *map(str, values)] for at, values in enumerate(zip(*series, strict=True), 1)]
        equal = equality(result.relative_error, result.tolerance)
        return [{"columns": columns, "rows": rows}, equal]


def _harmless(result: graphs.Classic) -> bool:
    return result.ratio < 1.01


def _saw(run: Timeline) -> tuple[list[float], list[float]]:
    """Up to the highest in the time of each microbatch, down to what is left at its end."""
    x, y = [0.0], [0.0]
    for at, (highest, left) in enumerate(zip(run.highest, run.left, strict=True)):
        x += [at + 0.5, at + 1]
        y += [highest / MB, left / MB]
    return x, y


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Heights for words, each at its own or so far above the next lower that both can be read.

    >>> apart([1.0, 4.0, 0.5], 1.0)
    [1.5, 4.0, 0.5]
    """
    places, floor = [0.0] * len(heights), -math.inf
    for at in sorted(range(len(heights)), key=lambda index: heights[index]):
        floor = places[at] = max(heights[at], floor + gap)
    return places
