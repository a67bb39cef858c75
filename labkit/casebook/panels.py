"""The casebook: one fault that was shipped, beside the right loop, and all of them in one picture.

>>> import labkit
>>> labkit.labs.casebook("case", case="B07 mean of rank means").values["case"]
'B07 mean of rank means'
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.text import Text

from labkit import casebook
from labkit.casebook import Ran
from labkit.casebook.entry import says
from labkit.frame.canvas import Canvas, polyline
from labkit.frame.experiment import Experiment
from labkit.wording import show, three

LINE = 1.4  # height of a line of words, in units of the page's text
LETTER = 0.54  # mean width of a letter
SIZES = (1.0, 0.93, 0.86, 0.79, 0.72, 0.65, 0.58, 0.5)  # the first that fits is taken


def body(loop: Callable[..., Any]) -> str:
    """What a loop does, without its signature, docstring and comments.

    >>> body(casebook.find("B57").right)
    'return F.cross_entropy(scores, torch.arange(len(scores)))'
    """
    source = textwrap.dedent(inspect.getsource(loop))
    (function,) = ast.parse(source).body
    statements = getattr(function, "body", [function])
    if len(statements) > 1 and isinstance(statements[0], ast.Expr):
        statements = statements[1:]
    lines = [re.sub(r"  # .*", "", line) for line in source.splitlines()[statements[0].lineno - 1 :]]
    return textwrap.dedent("\n".join(lines)).rstrip()


class Words:
    """Words and code from the top of the picture downwards, as wide as the picture is."""

    def __init__(self, canvas: Canvas, axes: Any) -> None:
        style: dict[str, Any] = {"transform": canvas.figure.transFigure, "va": "top", "linespacing": 1.2}
        self.above, self.below = ([canvas.text(axes, **style) for _ in range(n)] for n in (2, 1))
        self.code = canvas.text(axes, family="monospace", **style)

    def put(self, canvas: Canvas, above: Sequence[str], code: str, below: str, room: float) -> None:
        """Write the words above the code, the code, and the words below it, in that share of the picture's height."""
        for size in SIZES:
            rows = self._lay(canvas, above, code, below, size)
            if rows * canvas.page.font < room * canvas.height:
                break

    def _lay(self, canvas: Canvas, above: Sequence[str], code: str, below: str, size: float) -> float:
        """Lay everything out in one size; how many rows of the page's text it takes."""
        row = 0.3
        for artist, words in zip(self.above, above, strict=True):
            row = self._words(canvas, artist, words, row, size) + 0.4
        scale = self._fit(canvas, code, size)
        row = self._place(canvas, self.code, code.splitlines(), row + 0.2, scale) + 0.6
        return self._words(canvas, self.below[0], below, row, size)

    def _words(self, canvas: Canvas, artist: Text, words: str, row: float, size: float) -> float:
        columns = int((canvas.page.width - canvas.page.font) / (LETTER * canvas.page.font * size))
        return self._place(canvas, artist, textwrap.wrap(words, columns, break_on_hyphens=False), row, size)

    def _fit(self, canvas: Canvas, code: str, size: float) -> float:
        """The size in which the code is no wider than the picture."""
        self.code.set(text=code, visible=True)  # what is hidden has no width
        renderer, most = canvas.figure.canvas.get_renderer(), 0.97 * canvas.figure.bbox.width  # type: ignore[attr-defined]
        for scale in SIZES[1:]:
            self.code.set_fontsize(canvas.page.points * scale * size)
            if self.code.get_window_extent(renderer).width < most:
                break
        return scale * size

    def _place(self, canvas: Canvas, artist: Text, lines: Sequence[str], row: float, size: float) -> float:
        """Put lines at a row, counted in units of the page's text; the row after them."""
        top = 1 - row * canvas.page.font / canvas.height
        left = 0.5 * canvas.page.font / canvas.page.width
        artist.set(text="\n".join(lines), position=(left, top), fontsize=canvas.page.points * size, visible=True)
        return row + len(lines) * LINE * size


class Case(Experiment[Ran]):
    """One fault that was shipped."""

    title = "One case"
    question = "What does the wrong loop give?"
    note = (
        "Measured: both loops run, as they stand in the code below. In the picture: what was seen, what the loops are "
        "run on, and the wrong one. Cross and stripes: wrong. Dot: right."
    )
    run = staticmethod(casebook.case)
    aspect = 0.8

    def source(self) -> str:
        """Both loops of every case."""
        return "\n\n\n".join(case.code() for case in casebook.all())

    def layout(self, canvas: Canvas) -> None:
        grid = canvas.figure.add_gridspec(2, 1, height_ratios=(4, 1))
        above = canvas.axes("", "", position=grid[0], moving="")
        above.set_axis_off()
        above.spines[:].set_visible(False)
        self.words = Words(canvas, above)
        self.axes = canvas.axes("", "", position=grid[1], moving="x")
        self.axes.set(yticks=[], ylim=(1.6, -0.6))
        self.axes.spines["left"].set_visible(False)
        self.zero = canvas.line(self.axes, "reference")
        self.bars = {role: canvas.bar(self.axes, role, linewidth=6) for role in ("wrong", "right")}
        self.ends = {role: canvas.line(self.axes, role, linestyle="none", markersize=11) for role in ("wrong", "right")}
        self.values = {role: canvas.text(self.axes, va="center") for role in ("wrong", "right")}
        self.subject = canvas.text(self.axes, transform=self.axes.transAxes, fontweight="bold", va="bottom")
        canvas.frame(self.axes, x=(0, 1))
        canvas.ticks(self.axes, x=[0])

    def _tell(self, canvas: Canvas, case: casebook.Case, also: str = "") -> None:
        """What is known before the answer, and after it the other numbers."""
        room = 1 - self.axes.get_position().y1 - 2 * canvas.page.font / canvas.height
        self.words.put(canvas, (f"Seen: {case.symptom}", f"Given: {case.given}"), body(case.wrong), also, room)
        unit = f" ({case.unit})" if case.unit else ""
        self.subject.set(text=f"{case.number}{unit}", position=(0, 1.02), visible=True)

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        canvas.frame(self.axes, x=(0, 1))
        canvas.ticks(self.axes, x=[0])
        canvas.hide(self.axes, 0.5, 0.5)
        self._tell(canvas, casebook.find(values["case"]))

    def draw(self, canvas: Canvas, result: Ran) -> None:
        case, number = casebook.find(result.case), result.compared
        others = [f"{each.name}: {show(each.wrong)}, right {show(each.right)}" for each in result.numbers[1:]]
        self._tell(canvas, case, f"Also {'; '.join(others)}." if others and not math.isnan(number.right) else "")
        known = {"wrong": number.wrong, "right": number.right}
        finite = [value for value in known.values() if math.isfinite(value)]
        low, high = min(0.0, *finite), max(0.0, *finite)
        span = high - low or 1.0
        canvas.frame(self.axes, x=(low - 0.25 * span * (low < 0), high + 0.5 * span))
        canvas.ticks(self.axes, x=[0.0, *(end for end in (low, high) if end)])
        self.zero.set_data([0, 0], [-0.5, 1.5])
        for row, (role, value) in enumerate(known.items()):
            there = [value] if math.isfinite(value) else []
            self.bars[role].set_data([0, *there], [row] * (1 + len(there)))
            self.ends[role].set_data(there, [row] * len(there))
            label = f"{role} {show(value)}" if there else ""
            self.values[role].set(text=label, position=(max(value, 0.0) + 0.06 * span if there else 0, row))

    def answer(self, result: Ran) -> float:
        return result.compared.wrong

    def headline(self, result: Ran) -> str:
        number = result.compared
        lead = f"{number.name[0].upper()}{number.name[1:]}: {show(number.wrong)}"
        if math.isnan(number.right):
            return f"{lead}, and the right loop runs"
        return f"{lead} in place of {show(number.right)}"

    def describe(self, result: Ran) -> str:
        case, number = casebook.find(result.case), result.compared
        if math.isnan(number.right):
            return f"{case.title}. Seen: {case.symptom}"
        error = f"{three(number.ratio)} times the right number, {three(100 * number.relative_error)} % off."
        audit = f" The audit says {result.verdicts[0]}." if result.verdicts else ""
        fault = f"The fault: {case.fault} How to recognise it: {case.recognise}{audit}"
        first = says(case, result.numbers[:1])[:-1]
        return f"{case.title}. {first[0].upper()}{first[1:]}: {error} {fault} Found in {case.source}."

    def tables(self, result: Ran) -> list[dict[str, Any]]:
        case = casebook.find(result.case)
        rows = [[each.name, show(each.wrong), show(each.right), three(each.ratio)] for each in result.numbers]
        story = [
            *(("seen", case.symptom), ("the fault", case.fault), ("how to recognise it", case.recognise)),
            *(("run on", case.given), ("versions", case.versions or "not given")),
            *(("thread", link) for link in case.links),
        ]
        verdicts = [[which, word] for which, word in zip(("wrong", "right"), result.verdicts, strict=False)]
        tables = [
            {"columns": ["", "wrong", "right", "wrong / right"], "rows": rows},
            {"columns": ["", case.title], "rows": [list(row) for row in story]},
        ]
        return tables + ([{"columns": ["loop", "the audit says"], "rows": verdicts}] if verdicts else [])


class Overview(Experiment[casebook.Overview]):
    """Every case as one ratio."""

    title = "All cases"
    question = "How many of the cases are off by less than the factor?"
    unit = "cases"
    note = (
        "Measured: every case is run, wrong over right, signs left out. Dots: right. Crosses: wrong, left of the line "
        "where a number is too small. Between the two dotted lines: within the factor."
    )
    run = staticmethod(casebook.overview)
    aspect = 1.15

    def layout(self, canvas: Canvas) -> None:
        self.most = len(casebook.all())
        grid = canvas.figure.add_gridspec(1, 2, width_ratios=(6.5, 7.5), wspace=0.02)
        self.axes = canvas.axes("wrong / right", "", position=grid[1], log="x", moving="x")
        self.axes.set(yticks=[], ylim=(self.most - 0.3, -0.7), xlim=(0.1, 20))
        self.axes.spines["left"].set_visible(False)
        beside: dict[str, Any] = {"transform": self.axes.get_yaxis_transform(), "va": "center", "ha": "right"}
        self.names, self.values = (
            [canvas.text(self.axes, size=0.86, **beside) for _ in range(self.most)] for _ in range(2)
        )
        self.one = canvas.line(self.axes, "reference")
        self.band = canvas.line(self.axes, "reference", colour="muted", linestyle=":")
        self.right = canvas.line(self.axes, "right", linestyle="none", markersize=5)
        self.wrong = canvas.line(self.axes, "wrong", linestyle="none", markersize=8)

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        canvas.frame(self.axes, x=(0.1, 20), xticks=[1])
        canvas.hide(self.axes, 1.0, self.most / 2 - 0.5)

    def draw(self, canvas: Canvas, result: casebook.Overview) -> None:
        order = sorted(range(len(result.ratios)), key=lambda at: result.ratios[at])
        ratios = [result.ratios[at] for at in order]
        low, high = min(*ratios, 1 / result.within, 0.5), max(*ratios, result.within, 2.0)
        canvas.frame(self.axes, x=(low / 1.5, high * (high / low) ** 0.5), xticks=[1])
        canvas.frame(self.axes, y=(max(len(ratios), 6) - 0.3, -0.7))
        ends = [-0.7, self.most]
        self.one.set_data([1, 1], ends)
        edges = (1 / result.within, result.within)
        self.band.set_data(*polyline([(edge, ends[0]), (edge, ends[1])] for edge in edges))
        self.right.set_data([1] * len(ratios), range(len(ratios)))
        self.wrong.set_data(ratios, range(len(ratios)))
        size = 0.86 * canvas.points(28)
        for row, (name, value) in enumerate(zip(self.names, self.values, strict=True)):
            there = row < len(ratios)
            name.set_fontsize(size)  # the longest has to stay in a narrow picture
            name.set(text=result.titles[order[row]] if there else "", position=(-0.02, row))
            value.set(text=three(ratios[row]) if there else "", position=(1, row))

    def answer(self, result: casebook.Overview) -> float:
        return float(result.near)

    def headline(self, result: casebook.Overview) -> str:
        if result.progress < 1:
            return f"{len(result.ratios)} cases run"
        verb = "is" if result.near == 1 else "are"
        return f"{result.near} of {len(result.ratios)} {verb} off by less than a factor {show(result.within)}"

    def describe(self, result: casebook.Overview) -> str:
        order = sorted(range(len(result.ratios)), key=lambda at: result.ratios[at])
        ratios = ", ".join(f"{result.titles[at]} {three(result.ratios[at])}" for at in order)
        return f"Wrong over right, the smallest first: {ratios}."

    def tables(self, result: casebook.Overview) -> list[dict[str, Any]]:
        columns = (result.titles, result.compared, map(show, result.wrong), map(show, result.right))
        rows = [list(row) for row in zip(*columns, map(three, result.ratios), strict=True)]
        return [{"columns": ["case", "compared", "wrong", "right", "|wrong / right|"], "rows": rows}]


EXPERIMENTS = (Case, Overview)
