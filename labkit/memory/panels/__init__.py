"""Memory: what is kept for backward, what stands beside it, the classic mistake, and the peak on this device.

>>> import labkit
>>> labkit.labs.memory("kept").experiments
['kept']
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from labkit import memory, rules
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.memory import Step, Sweep, saved_tensors
from labkit.memory.panels.graphs import MB, Classic, amount, equality
from labkit.wording import percent


class Kept(Experiment[Sweep]):
    """Kept bytes against the size of a microbatch."""

    title = "Kept for backward"
    question = "The full batch: how many times the bytes of b = 1?"
    unit = "times"
    note = (
        "Measured: bytes of the tensors that autograd saves, most at once; the same in every run. "
        "Dots: K microbatches, one after the other. Rings: one microbatch alone. Line: fitted."
    )
    run = staticmethod(memory.kept)
    shown = (rules.token_mean, saved_tensors.watch)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("sequences in a microbatch, b", "kept at once (MB)", whole="x", moving="xy")
        self.line = canvas.line(self.axes, "modelled")
        self.rings = canvas.line(self.axes, "guess", colour="text")
        self.dots = canvas.line(self.axes, "measured", markersize=9)
        self.words = [canvas.text(self.axes, ha="right", va="bottom") for _ in range(3)]
        self._frame(canvas, 16, 5.0)

    def _frame(self, canvas: Canvas, sequences: int, top: float) -> None:
        canvas.frame(self.axes, x=(0, 1.1 * sequences), y=(0, 1.2 * top), xticks=[0, sequences])

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        self._frame(canvas, values["sequences"], 5.0)
        canvas.hide(self.axes, values["sequences"], 3.0)

    def draw(self, canvas: Canvas, result: Sweep) -> None:
        rows = result.rows
        b, y = [row.microbatch for row in rows], [row.window / MB for row in rows]
        self._frame(canvas, rows[0].accumulation_steps, y[0] * rows[0].accumulation_steps)
        self.dots.set_data(b, y)
        self.rings.set_data(b, [row.alone / MB for row in rows])
        ends = [0, b[-1]] if len(rows) > 1 else []
        self.line.set_data(ends, [(result.slope * end + result.intercept) / MB for end in ends])
        gaps = [beyond - here for here, beyond in zip(b, [*b[1:], math.inf], strict=True)]
        wide = [row for row, gap in zip(rows, gaps, strict=True) if gap > b[-1] / 8]
        for words, row in itertools.zip_longest(self.words, wide[-3:]):
            words.set_text(f"K = {row.accumulation_steps}" if row else "")
            if row:
                words.set_position((row.microbatch - b[-1] / 30, row.window / MB + y[-1] / 50))

    def answer(self, result: Sweep) -> float:
        return result.rows[-1].window / result.rows[0].window

    def headline(self, result: Sweep) -> str:
        if len(result.rows) < 2:
            return f"b = 1 keeps {amount(result.rows[0].window)}"
        return f"{amount(result.slope)} for each sequence of a microbatch, {_whatever(result)}"

    def describe(self, result: Sweep) -> str:
        measured = ", ".join(
            f"b = {row.microbatch} (K = {row.accumulation_steps}): {amount(row.window)}" for row in result.rows
        )
        if len(result.rows) < 2:
            return f"{measured}."
        return (
            f"{measured}. The line: {amount(result.slope)} for each sequence and {amount(result.intercept)} at b = 0; "
            f"no dot is more than {percent(round(result.residual, 6))} off it. K microbatches and one alone differ by "
            f"at most {percent(result.steps_matter)}."
        )


def _whatever(result: Sweep) -> str:
    return "whatever K" if result.steps_matter < 0.01 else f"and K matters, by {percent(result.steps_matter)}"


class Parts(Experiment[memory.Parts]):
    """Part upon part: weights, gradients, optimizer state, kept for backward."""

    title = "Part by part"
    question = "All parts: what per cent of the full batch's bytes do K microbatches need?"
    unit = "%"
    note = (
        "Measured from the tensors of one real step, float64. Each bar begins where the one above it ends. Grey: the "
        "full batch, K = 1. Blue: the microbatches. Left out: what lives for one operation only."
    )
    run = staticmethod(memory.parts)
    shown = (rules.token_mean, saved_tensors.watch, memory.step)
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("bytes, one upon the other (MB)", "", moving="x")
        self.axes.set_yticks([3, 2, 1, 0], labels=["weights", "gradients", "optimizer", "kept"])
        self.axes.tick_params(axis="y", length=0)
        canvas.frame(self.axes, x=(0, 8), y=(-0.6, 3.6))
        style = {"linewidth": 9}
        self.full = [canvas.bar(self.axes, "muted", **style) for _ in range(4)]
        self.cut = [canvas.bar(self.axes, "right", **style) for _ in range(4)]
        self.words = [canvas.text(self.axes, va="center") for _ in range(5)]

    def draw(self, canvas: Canvas, result: memory.Parts) -> None:
        top = max(result.full.total, result.cut.total) / MB
        canvas.frame(self.axes, x=(0, 1.38 * top))
        for bars, each, up in ((self.full, result.full, 0.16), (self.cut, result.cut, -0.16)):
            for at, (low, high) in enumerate(_spans(each)):
                bars[at].set_data([low, high], [3 - at + up] * 2)
        ends = [high for _, high in _spans(result.cut)]
        places = [*zip(ends, (3, 2, 1, -0.18), strict=True), (result.full.total / MB, 0.18)]
        said = [amount(size) for size in (*_sizes(result.cut), result.full.kept)]
        said[3:] = [f"{said[3]}, K = {result.cut.accumulation_steps}", f"{said[4]}, K = 1"]
        for words, (x, y), word in zip(self.words, places, said, strict=True):
            words.set_text(word)
            words.set_position((x + top / 60, y))

    def answer(self, result: memory.Parts) -> float:
        return 100 * result.cut.total / result.full.total

    def headline(self, result: memory.Parts) -> str:
        if not result.equal:
            return f"The gradients are {percent(result.relative_error)} apart"
        return f"The same gradient in {percent(result.cut.total / result.full.total)} of the bytes"

    def describe(self, result: memory.Parts) -> str:
        said = [
            f"{each.name}: weights {amount(each.parameters)}, gradients {amount(each.gradients)}, optimizer state "
            f"{amount(each.state)}, kept for backward {amount(each.kept)}, together {amount(each.total)}"
            for each in (result.full, result.cut)
        ]
        words = "; ".join(said)
        return (
            f"{words[0].upper()}{words[1:]}. The gradients differ by {result.relative_error:.1g}, rounding explains "
            f"{result.tolerance.value:.1g}."
        )

    def tables(self, result: memory.Parts) -> list[dict[str, Any]]:
        names = ("parameters", "gradients", "state", "kept", "total")
        rows = [[word, f"{getattr(result.full, word)}", f"{getattr(result.cut, word)}"] for word in names]
        equal = equality(result.relative_error, result.tolerance)
        return [{"columns": ["part (B)", result.full.name, result.cut.name], "rows": rows}, equal]


def _sizes(each: Step) -> tuple[int, ...]:
    return each.parameters, each.gradients, each.state, each.kept


def _spans(each: Step) -> list[tuple[float, float]]:
    """Where each part begins and ends, in MB."""
    spans, end = [], 0.0
    for size in _sizes(each):
        spans.append((end, end + size / MB))
        end += size / MB
    return spans


class Peak(Experiment[memory.Peak]):
    """What the allocator of a GPU says."""

    title = "Peak on this device"
    question = "The microbatches' peak: how many per cent of the full batch's?"
    unit = "%"
    note = (
        "Measured, float32. Bars: what autograd keeps. Strokes: the most that a GPU's allocator gave, with gradients "
        "and all that lives for one operation only; a CPU has no such count."
    )
    run = staticmethod(memory.peak)
    shown = (rules.token_mean, memory.allocated)
    aspect = 0.42

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("most at once (MB)", "", moving="x")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 4), y=(-0.5, 2))
        self.bars = [canvas.bar(self.axes, "measured") for _ in range(2)]
        self.strokes = canvas.line(self.axes, "reference", linestyle="none", marker="|", markersize=30, colour="text")
        self.words = [canvas.text(self.axes, va="bottom") for _ in range(2)]

    def draw(self, canvas: Canvas, result: memory.Peak) -> None:
        top = max(each for each in (*result.kept, *result.allocated) if math.isfinite(each)) / MB
        canvas.frame(self.axes, x=(0, 1.1 * top))
        for at, size in enumerate(result.kept):
            self.bars[at].set_data([0, size / MB], [1 - at] * 2)
            self.words[at].set_text(_line_of(result, at))
            self.words[at].set_position((top / 60, 1.3 - at))
        self.strokes.set_data([each / MB for each in result.allocated], [1, 0])

    def answer(self, result: memory.Peak) -> float:
        full, pieces = result.allocated if result.allocator else result.kept
        return 100 * pieces / full

    def headline(self, result: memory.Peak) -> str:
        if not result.allocator:
            return "No GPU here to ask: what autograd keeps, on the CPU"
        return f"{result.names[1]}: {percent(self.answer(result) / 100)} of the full batch's peak on the GPU"

    def describe(self, result: memory.Peak) -> str:
        where = "by its allocator" if result.allocator else "torch has no peak to ask it for, so kept bytes alone"
        lines = ". ".join(line[0].upper() + line[1:] for line in (_line_of(result, 0), _line_of(result, 1)))
        return f"{result.device}: {where}. {lines}."


def _line_of(result: memory.Peak, at: int) -> str:
    given = f", allocated {amount(result.allocated[at])}" if result.allocator else ""
    return f"{result.names[at]}: kept {amount(result.kept[at])}{given}"


EXPERIMENTS = (Kept, Parts, Classic, Peak)
