"""An audit as a picture: the Report's weights and counts, and the findings of `inspect` as a table."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import math
from collections.abc import Sequence
from typing import Any

from labkit.audit import Finding, Report
from labkit.frame import cell_panels
from labkit.frame.canvas import Canvas
from labkit.frame.style import DARK, LIGHT, Page
from labkit.wording import show

ASPECT = 0.5
MOST = 8  # microbatches that carry their numbers in the picture
ROUND = 1e-6  # of a fitted weight: the digits that a picture shows are fewer
COUNTED = {
    "passes": ("backward_passes", ()),
    "steps": ("optimizer_steps", ("no-step", "step-per-microbatch", "moments-per-microbatch")),
    "schedule": ("schedule_steps", ("schedule-per-microbatch", "schedule-per-process")),
    "clips": ("clips", ("clip-per-microbatch", "clip-scaled")),
    "skipped": ("skipped_steps", ("non-finite",)),
}


NOTHING = "No layer looks at the batch, keeps state or draws random numbers."
THEMES = (
    "<style>.lk-light, .lk-dark { max-width: 100% } .lk-dark { display: none } "
    'body[data-jp-theme-light="false"] .lk-dark { display: inline } '
    'body[data-jp-theme-light="false"] .lk-light { display: none }</style>'
)


class WeightPlot:
    """A report: weight × N of every microbatch against the line 1, and the counts of the window beside it."""

    def __init__(self, canvas: Canvas) -> None:
        grid = canvas.figure.add_gridspec(1, 2, width_ratios=(5, 2), wspace=0.06)
        self.axes = canvas.axes(
            "microbatch (grey: its valid tokens)", "weight × N", position=grid[0], moving="xy", log="y", whole="x"
        )
        self.one = canvas.line(self.axes, "reference")
        self.right = canvas.line(self.axes, "right", linestyle="none", markersize=9)
        self.wrong = canvas.line(self.axes, "wrong", linestyle="none", markersize=10)
        self.words = [canvas.text(self.axes, ha="center", size=0.9) for _ in range(MOST)]
        under = self.axes.get_xaxis_transform()
        self.counts = [canvas.text(self.axes, role="muted", ha="center", transform=under) for _ in range(MOST)]
        side = canvas.axes("", "", position=grid[1], moving="")
        side.set_axis_off()
        side.spines[:].set_visible(False)
        side.set(xlim=(0, 1), ylim=(len(COUNTED) - 0.5, -0.5))
        roles = ("text", "wrong")
        self.side = [[canvas.text(side, role=role, va="center") for _ in COUNTED] for role in roles]

    def draw_counts(self, canvas: Canvas, counts: Sequence[int]) -> None:
        """What is known before the answer: how many valid tokens every microbatch holds."""
        K = len(counts)
        canvas.frame(self.axes, x=(0.4, K + 0.6), xticks=[1, K])
        for at, words in enumerate(self.counts):
            known = at < K <= MOST
            words.set(text=str(counts[at]) if known else "", position=(at + 1, 0.03), visible=True)

    def draw(self, canvas: Canvas, report: Report) -> None:
        """Move everything to a report."""
        self.draw_counts(canvas, report.counts)
        weights, places = report.token_weights, list(range(1, len(report.counts) + 1))
        sizes = [abs(w) for w in weights if abs(w) > ROUND] or [1.0]
        low, high = min(1.0, *sizes), max(1.0, *sizes)
        span = max(math.log(high / low), 1.0)
        y = low * math.exp(-0.7 * span), high * math.exp(0.3 * span)
        canvas.frame(self.axes, y=y, yticks=[1, low, high])
        self.one.set_data([0.4, len(places) + 0.6], [1, 1])
        heights = [abs(w) if abs(w) > ROUND else low * math.exp(-0.15 * span) for w in weights]
        right = [abs(w - 1) <= ROUND for w in weights]
        for line, wanted in ((self.right, True), (self.wrong, False)):
            points = [at for at, ok in enumerate(right) if ok is wanted]
            line.set_data([places[at] for at in points], [heights[at] for at in points])
        for at, words in enumerate(self.words):
            known = at < len(weights) <= MOST
            text, up = (
                (weight(weights[at], 3 if len(weights) <= 5 else 2), heights[at] > 1 - ROUND) if known else ("", True)
            )
            away = math.exp((0.08 if up else -0.09) * span)
            words.set(text=text, position=(at + 1, heights[at] * away if known else 1), va="bottom" if up else "top")
        self._count(report)

    def _count(self, report: Report) -> None:
        for at, (word, (field, faults)) in enumerate(COUNTED.items()):
            wrong = any(each in report.faults for each in faults)
            count = f"{word} {getattr(report, field)}"
            self.side[0][at].set(text="" if wrong else count, position=(0, at))
            self.side[1][at].set(text=f"× {count}" if wrong else "", position=(0, at))


def weight(value: float, digits: int = 3) -> str:
    """A fitted weight as text.

    >>> weight(1.86488), weight(3e-17), weight(math.nan)
    ('1.86', '0', '?')
    """
    if math.isnan(value):
        return "?"
    return show(float(f"{value:.{digits}g}")) if abs(value) > ROUND else "0"


def title(report: Report) -> str:
    """The message of a report.

    >>> from labkit.audit.bug_hunt.suspects import loops
    >>> title(loops(loop="C")), title(loops(loop="D"))
    ('right: token-mean', 'unshifted-count and clip-per-microbatch')
    """
    return f"right: {report.verdict}" if report.right else " and ".join(report.faults)


class Picture:
    """A report as a picture of its own."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __repr__(self) -> str:
        return repr(self.report)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """The picture and its words; the page shows the picture that suits its theme."""
        alt = html.escape(self.report.explain())
        lines = alt.replace("\n", "<br>")
        page = cell_panels.page or LIGHT
        images = [
            f'<img class="lk-{name}" width="{page.width}" alt="{alt}" src="{_png(self.report, page, colours)}">'
            for name, colours in (("light", LIGHT), ("dark", DARK))
        ]
        figure = f"<figure>{THEMES}<strong>{title(self.report)}</strong><br>{''.join(images)}"
        return {"text/plain": repr(self), "text/html": f"{figure}<figcaption>{lines}</figcaption></figure>"}


def _png(report: Report, page: Page, colours: Page) -> str:
    themed = dataclasses.replace(page, ratio=2.0, text=colours.text, background=colours.background)
    canvas, out = Canvas(themed, ASPECT), io.BytesIO()
    WeightPlot(canvas).draw(canvas, report)
    canvas.draw()
    canvas.figure.savefig(out, format="png", dpi=canvas.figure.dpi)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


class Findings:
    """The findings of `inspect`, as a table."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = findings

    def __repr__(self) -> str:
        return "\n".join(f"{each.name} {each.layer} {each.kind}: {each.means}" for each in self.findings) or NOTHING

    def _repr_html_(self) -> str:
        """A row for each finding."""
        if not self.findings:
            return f"<p>{NOTHING}</p>"
        left = '<t{0} style="text-align: left">'
        head = "".join(
            f"{left.format('h')}{each}</th>" for each in ("name", "layer", "what it does", "what that means")
        )
        rows = [
            "".join(f"{left.format('d')}{html.escape(cell)}</td>" for cell in dataclasses.astuple(each))
            for each in self.findings
        ]
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def picture(result: Report | Sequence[Finding]) -> Picture | Findings:
    """A report as a picture, findings as a table."""
    return Picture(result) if isinstance(result, Report) else Findings(result)
