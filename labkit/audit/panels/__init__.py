"""The audit: loops that look right, the hunt for a hidden fault, and whether a changed step may be adopted.

>>> import labkit
>>> labkit.labs.audit("hunt").experiments
['hunt']
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.transforms import blended_transform_factory

from labkit.audit import Report, bug_hunt
from labkit.audit.bug_hunt import Measurement, suspects
from labkit.audit.panels.acceptance import Acceptance, Traces
from labkit.audit.panels.report import ASPECT, COUNTED, WeightPlot, title, weight
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.listing import sources
from labkit.nets import valid_tokens
from labkit.wording import three

PLACES = (0.015, 0.37, 0.41)  # of the figure: where a measurement's name, mark and words stand


class Loops(Experiment[Report]):
    """Loops that look right, audited."""

    title = "Four loops that look right"
    question = "The heaviest microbatch: how many times its right weight?"
    unit = "times"
    note = (
        "Measured: the loop runs unchanged, and the weights are fitted from the gradient that reached the optimizer, "
        "before a clip in its place. Dots: right. Crosses: wrong. Beside: what was counted in one window."
    )
    run = staticmethod(suspects.loops)
    aspect = ASPECT

    def source(self) -> str:
        """The loops, then what audits them."""
        functions: list[Any] = [*suspects.LOOPS.values(), suspects.loops]
        return sources(*functions)

    def layout(self, canvas: Canvas) -> None:
        self.plot = WeightPlot(canvas)
        canvas.frame(self.plot.axes, x=(0.4, 4.6), y=(0.2, 5), yticks=[1])

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        window = suspects.window(values["accumulation_steps"], values["shortest"], values["seed"])
        canvas.frame(self.plot.axes, y=(0.2, 5), yticks=[1])
        canvas.hide(self.plot.axes, (len(window) + 1) / 2, 1)
        self.plot.draw_counts(canvas, [valid_tokens(labels) for _, labels in window])

    def draw(self, canvas: Canvas, result: Report) -> None:
        self.plot.draw(canvas, result)

    def tables(self, result: Report) -> list[dict[str, Any]]:
        rows = [
            [str(at), str(n), weight(w)]
            for at, (n, w) in enumerate(zip(result.counts, result.token_weights, strict=True), 1)
        ]
        window = [[word, str(getattr(result, field))] for word, (field, _) in COUNTED.items()]
        faults = [[fault.word, fault.said, fault.fix] for fault in result.details]
        tables = [
            {"columns": ["microbatch", "valid tokens", "weight × N"], "rows": rows},
            {"columns": ["in one window", "counted"], "rows": window},
        ]
        return tables + ([{"columns": ["fault", "what shows it", "the fix"], "rows": faults}] if faults else [])

    def answer(self, result: Report) -> float:
        return max(result.token_weights)

    def headline(self, result: Report) -> str:
        return title(result)

    def describe(self, result: Report) -> str:
        return result.explain()


class Hunt(Experiment[bug_hunt.Hunt]):
    """A hidden step: measure, then name its fault."""

    title = "The bug hunt"
    question = "How many points will you have in the end?"
    unit = "points"
    note = (
        "Measured on the step as it runs. One fault, or none. Ten points, less one for each measurement; a wrong guess "
        "has none. Dot: as in a right step. Cross: not. ?: not measured."
    )
    run = staticmethod(bug_hunt.hunt)
    aspect = 0.62

    def layout(self, canvas: Canvas) -> None:
        self.names = list(bug_hunt.NAMES)
        self.axes = canvas.axes("", "", moving="")
        self.axes.set_axis_off()
        self.axes.spines[:].set_visible(False)
        self.axes.set(xlim=(0, 1), ylim=(len(self.names) + 2.1, -0.6))
        across = blended_transform_factory(canvas.figure.transFigure, self.axes.transData)
        style: dict[str, Any] = {"va": "center", "transform": across}
        self.window_lines = [canvas.text(self.axes, **style) for _ in range(2)]
        self.rows = [canvas.text(self.axes, **style) for _ in self.names]
        self.values = [canvas.text(self.axes, **style) for _ in self.names]
        style |= {"ha": "center", "fontweight": "bold"}
        self.unknown = [canvas.text(self.axes, "?", role="muted", **style) for _ in self.names]
        free: dict[str, Any] = {"linestyle": "none", "clip_on": False, "transform": across}
        self.right = canvas.line(self.axes, "right", markersize=8, **free)
        self.wrong = canvas.line(self.axes, "wrong", markersize=9, **free)

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        canvas.hide(self.axes, 0.5, 5)
        self._show_window(bug_hunt.case(values["case_number"]).window)

    def _show_window(self, window: Any) -> None:
        n = ", ".join(str(int(each)) for each in window.counts)
        lines = (
            f"valid tokens: {n} (N = {int(window.total)})",
            f"with padding: {window.positions}, labels: {window.labelled}",
        )
        for at, words in enumerate(lines):
            self.window_lines[at].set(text=words, position=(PLACES[0], at), visible=True)

    def draw(self, canvas: Canvas, result: bug_hunt.Hunt) -> None:
        self._show_window(bug_hunt.case(result.case).window)
        known = {each.name: each for each in result.measurements}
        marks: dict[bool, list[float]] = {True: [], False: []}
        for at, name in enumerate(self.names):
            row, each = at + 2.5, known.get(name)
            self.rows[at].set(text=name, position=(PLACES[0], row))
            self.unknown[at].set(text="" if each else "?", position=(PLACES[1], row))
            self.values[at].set(text=in_words(each) if each else "", position=(PLACES[2], row))
            if each:
                marks[each.off].append(row)
        for line, off in ((self.right, False), (self.wrong, True)):
            line.set_data([PLACES[1]] * len(marks[off]), marks[off])

    def tables(self, result: bug_hunt.Hunt) -> list[dict[str, Any]]:
        counts = ["valid tokens", ", ".join(map(str, result.counts)), ""]
        rows = [[each.name, in_words(each), three(each.right)] for each in result.measurements]
        return [{"columns": ["", "measured", "in a right step"], "rows": [counts, *rows]}]

    def answer(self, result: bug_hunt.Hunt) -> float:
        return float(result.points)

    def headline(self, result: bug_hunt.Hunt) -> str:
        if not result.verdict:
            return f"Not guessed yet: {result.points} points to win"
        if result.guess == result.verdict:
            return f"Right, {result.guess}: {result.points} points"
        return f"Wrong: you said {result.guess}, it is {result.verdict}"

    def describe(self, result: bug_hunt.Hunt) -> str:
        n = ", ".join(map(str, result.counts))
        counts = (
            f"Valid tokens {n}, N = {sum(result.counts)}; {result.positions} with padding, {result.labelled} labels."
        )
        values = "; ".join(f"{each.name} {in_words(each)} (right: {three(each.right)})" for each in result.measurements)
        return f"{counts} Measured: {values or 'nothing yet'}. {result.explanation}".strip()


def in_words(measurement: Measurement) -> str:
    """A measurement in words.

    >>> in_words(Measurement("weights × N", (1.0, 2e-16, 0.5), 1))
    '1, 0, 0.5'
    """
    return ", ".join(three(value) if abs(value) > 1e-12 else "0" for value in measurement.values)


EXPERIMENTS = (Loops, Hunt, Acceptance, Traces)
