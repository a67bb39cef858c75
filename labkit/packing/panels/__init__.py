"""Packing and mixture: padding, the leak, boundaries, positions, weights of a mixture, the order of the data.

>>> import labkit
>>> labkit.labs.packing("leak").experiments
['leak']
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize

from labkit import packing
from labkit.frame.canvas import Canvas, polyline
from labkit.frame.experiment import Experiment
from labkit.packing import Positioned, rows
from labkit.packing.panels.mixing import Mixture, Order
from labkit.wording import percent, three

BLUES = LinearSegmentedColormap.from_list("own", ["#a6cbe3", "#0072b2"])
VERMILIONS = LinearSegmentedColormap.from_list("leaked", ["#f5c8a8", "#d55e00"])
DECADES = Normalize(-3, 0.5)  # log10 of a gradient's norm


class Waste(Experiment[packing.Waste]):
    """The same documents, padded and packed."""

    title = "Padding and packing"
    question = "Padded to the longest of its batch: what share is padding?"
    unit = "%"
    note = (
        "Counted, on real documents. Full bars are documents, blue and grey in turns. Thin vermilion bars are padding. "
        "Left: padded in batches. Right: packed."
    )
    run = staticmethod(packing.waste)
    shown = (packing.newest, packing.first, packing.tightest, packing.packed)

    def layout(self, canvas: Canvas) -> None:
        grid = canvas.figure.add_gridspec(1, 2, wspace=0.3)
        self.axes = [
            canvas.axes(words, "row", position=grid[at], whole="xy", moving="xy")
            for at, words in enumerate(("padded (tokens)", "packed (tokens)"))
        ]
        self.axes[1].yaxis.label.set_visible(False)
        self.axes[1].tick_params(labelleft=False)
        self.bars = [[self._bars(canvas, axes, role) for role in ("right", "muted", "wrong")] for axes in self.axes]
        self._frame(canvas, 48, 256)

    def _bars(self, canvas: Canvas, axes: Any, role: str) -> PolyCollection:
        bars = PolyCollection([], linewidths=0)
        axes.add_collection(bars, autolim=False)
        return canvas.paint(bars, role)

    def _frame(self, canvas: Canvas, count: int, length: int) -> None:
        for axes in self.axes:
            canvas.frame(axes, x=(0, length), y=(count, 0), xticks=[0, length, length // 2], yticks=[0, count])

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        self._frame(canvas, values["documents"], values["length"])
        canvas.hide(self.axes[0], values["length"] / 2, values["documents"] / 2)

    def draw(self, canvas: Canvas, result: packing.Waste) -> None:
        alone = [(at,) for at in range(len(result.lengths))]
        self._frame(canvas, len(alone), result.length)
        self._fill(self.bars[0], result, alone, result.widths)
        self._fill(self.bars[1], result, result.rows, [result.length] * len(result.rows))

    def _fill(
        self, bars: list[PolyCollection], result: packing.Waste, held: Sequence[Sequence[int]], widths: Sequence[int]
    ) -> None:
        """Documents in turns, then the padding of each row."""
        boxes: list[list[Any]] = [[], [], []]
        for row, (members, width) in enumerate(zip(held, widths, strict=True)):
            end = 0
            for turn, at in enumerate(members):
                boxes[turn % 2].append(box(end, end + result.lengths[at], row + 0.1, row + 0.9))
                end += result.lengths[at]
            boxes[2].append(box(end, width, row + 0.35, row + 0.65))
        for each, found in zip(bars, boxes, strict=True):
            each.set_verts(found)

    def answer(self, result: packing.Waste) -> float:
        return 100 * result.to_longest

    def headline(self, result: packing.Waste) -> str:
        return f"Padding: {percent(result.to_longest)} in batches, {percent(result.in_rows)} in packed rows"

    def describe(self, result: packing.Waste) -> str:
        D, R, T = len(result.lengths), len(result.rows), result.length
        return (
            f"{D} documents of {min(result.lengths)} to {max(result.lengths)} tokens, {sum(result.lengths):,} in all. "
            f"Each padded to {T}: {percent(result.to_length)} is padding. Each padded to the longest of its batch: "
            f"{percent(result.to_longest)}. Packed into {R} rows of {T}: {percent(result.in_rows)}. "
            f"No packing has fewer than {result.fewest} rows."
        )


def box(left: float, right: float, low: float, high: float) -> list[tuple[float, float]]:
    """The corners of a rectangle."""
    return [(left, low), (right, low), (right, high), (left, high)]


class Leak(Experiment[packing.Leak]):
    """Whose input moves whose loss."""

    title = "The leak"
    question = "The last document's loss: how much gradient leaks into the others?"
    unit = "% of its own"
    note = (
        "Measured: norm of the gradient, on a log scale, deeper is larger. Blue: in the token's own past. Vermilion: "
        "where it must not look. Blank: exactly 0. Boxes: the documents; a document's last token has no target."
    )
    run = staticmethod(packing.leak)
    shown = (*rows.MASKS.values(), rows.Layer.forward)
    aspect = 0.62

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("input at token", "loss after token", moving="xy")
        style: dict[str, Any] = {
            "norm": DECADES,
            "aspect": "auto",
            "interpolation": "nearest",
            "extent": (0, 48, 48, 0),
        }
        blank = np.full((1, 1), np.nan)
        self.own = canvas.move(self.axes.imshow(blank, cmap=BLUES, **style))
        self.leaked = canvas.move(self.axes.imshow(blank, cmap=VERMILIONS, **style))
        self.boxes = canvas.line(self.axes, "reference", linewidth=1.2)
        canvas.frame(self.axes, x=(0, 48), y=(48, 0))

    def draw(self, canvas: Canvas, result: packing.Leak) -> None:
        T, owner = sum(result.lengths), rows.document_of(result.lengths)
        past = rows.block_causal(result.lengths)
        sizes = result.map.log10()
        for image, there in ((self.own, past), (self.leaked, ~past)):
            image.set_data(sizes.masked_fill(~there, math.nan).numpy())
            image.set_extent((0, T, T, 0))
        starts = [int((owner < at).sum()) for at in range(len(result.lengths))]
        spans = zip(starts, [*starts[1:], T], strict=True)
        self.boxes.set_data(*polyline((*box(a, b, a, b), (a, a)) for a, b in spans))
        canvas.frame(self.axes, x=(0, T), y=(T, 0))
        places = [start for start, before in zip(starts, [-T, *starts], strict=False) if start - before > T / 12]
        canvas.ticks(self.axes, x=places, y=places)

    def answer(self, result: packing.Leak) -> float:
        return 100 * result.leaked

    def headline(self, result: packing.Leak) -> str:
        if result.leaked:
            return f"The loss leaks into other documents: {percent(result.leaked)} of its own"
        if result.ahead:
            return "No leak between documents, but tokens see their own targets"
        return "Nothing leaks: 0 to the last bit"

    def describe(self, result: packing.Leak) -> str:
        last = len(result.lengths)
        said = ", ".join(
            f"{three(size)} in document {at}{' (its own)' if at == last else ''}"
            for at, size in enumerate(result.between[-1].tolist(), 1)
        )
        ahead = (
            f"The largest gradient in a later token is {three(result.ahead)}: a token looks at what it shall predict."
            if result.ahead
            else "No token looks ahead."
        )
        return (
            f"Documents of {', '.join(map(str, result.lengths))} tokens in one row. The loss of document {last} has a "
            f"gradient of norm {said}. {ahead}"
        )

    def tables(self, result: packing.Leak) -> list[dict[str, Any]]:
        heads = [f"inputs of {at}" for at in range(1, 1 + len(result.lengths))]
        found = [[f"loss of {at}", *map(three, row)] for at, row in enumerate(result.between.tolist(), 1)]
        return [{"columns": ["gradient's norm", *heads], "rows": found}]


class Boundary(Experiment[packing.Boundary]):
    """Four ways to label a row."""

    title = "A target across the boundary"
    question = "Nothing ignored: how far off is the gradient?"
    unit = "%"
    note = (
        "Measured against the documents one by one, under the right mask. Untrained weights: a trained model finds the "
        "first token of another text harder still."
    )
    run = staticmethod(packing.boundary)
    shown = (*rows.LABELS.values(), rows.summed_loss)
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("relative error of the gradient (%)", "", moving="x")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 30), y=(-0.5, 4))
        style = {"linewidth": 11}
        self.right = canvas.line(self.axes, "right", linestyle="none", markersize=11, clip_on=False, zorder=3)
        self.bars = [canvas.bar(self.axes, "wrong", **style) for _ in rows.LABELS]
        self.words = [canvas.text(self.axes, va="bottom") for _ in self.bars]

    def draw(self, canvas: Canvas, result: packing.Boundary) -> None:
        top = 100 * max(way.relative_error for way in result.ways)
        canvas.frame(self.axes, x=(0, 1.25 * top))
        self.right.set_data([100 * result.ways[0].relative_error], [3])
        size = canvas.points(27)
        for at, way in enumerate(result.ways):
            self.words[at].set_fontsize(size)  # the longest has to stay in a narrow picture
            self.bars[at].set_data([0, 100 * way.relative_error] if at else [], [3 - at, 3 - at] if at else [])
            self.words[at].set_text(said(way, result.tolerance.value))
            self.words[at].set_position((top / 60, 3.22 - at))

    def answer(self, result: packing.Boundary) -> float:
        return 100 * result.ways[1].relative_error

    def headline(self, result: packing.Boundary) -> str:
        way = result.ways[1]
        return f"Wrong targets: {way.across} of {way.targets}. The gradient is {percent(way.relative_error)} off"

    def describe(self, result: packing.Boundary) -> str:
        ways = ". ".join(
            f"{way.name[0].upper()}{way.name[1:]}: {way.targets} targets, {way.across} across a boundary, {way.lost} "
            f"lost, loss {way.loss:.3f}, gradient {percent(way.relative_error)} off"
            for way in result.ways[1:]
        )
        right = result.ways[0]
        return (
            f"One by one: {right.targets} targets, loss {result.loss:.3f} nat per token. First ignored: the same "
            f"within rounding, {right.relative_error:.1g} off where {result.tolerance.value:.1g} is explained. {ways}."
        )


def said(way: packing.Labelled, bound: float) -> str:
    """One way to label in a few words."""
    if way.relative_error <= bound:
        return f"{way.name}: equal within rounding"
    return f"{way.name}: {percent(way.relative_error)}, {way.across} across, {way.lost} lost"


class Positions(Experiment[packing.Positions]):
    """Learned and rotary, restarted and running on."""

    title = "Positions that restart, or run on"
    question = "Learned positions that run on: how far off is the gradient?"
    unit = "%"
    note = "Measured against the documents one by one, under the right mask, float64. Line: what rounding explains."
    run = staticmethod(packing.positions)
    shown = (rows.positions_of, rows.rotate, rows.Layer.forward, packing.read)
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("relative error of the gradient", "", log="x", moving="")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(1e-17, 100), y=(-0.6, 3.6), xticks=[1, 1e-16])
        self.bound = canvas.line(self.axes, "modelled")
        self.right = canvas.line(self.axes, "right", linestyle="none", markersize=11)
        self.wrong = canvas.line(self.axes, "wrong", linestyle="none", markersize=11)
        self.words = [canvas.text(self.axes, va="bottom", ha="left") for _ in range(4)]

    def draw(self, canvas: Canvas, result: packing.Positions) -> None:
        self.bound.set_data([max(kind.tolerance.value for kind in result.kinds)] * 2, [-0.6, 3.6])
        for line, equal in ((self.right, True), (self.wrong, False)):
            found = [(at, kind) for at, kind in enumerate(result.kinds) if kind.equal == equal]
            line.set_data([max(kind.relative_error, 2e-17) for _, kind in found], [3 - at for at, _ in found])
        for at, kind in enumerate(result.kinds):
            self.words[at].set_text(f"{kind.name}: {short(kind).removesuffix(' off')}")
            self.words[at].set_position((3e-12, 3.16 - at))

    def answer(self, result: packing.Positions) -> float:
        return 100 * result.kinds[1].relative_error

    def headline(self, result: packing.Positions) -> str:
        learned, turned = result.kinds[1], result.kinds[3]
        return f"Running on: learned is {percent(learned.relative_error)} off, rotary {short(turned)}"

    def describe(self, result: packing.Positions) -> str:
        kinds = ". ".join(
            f"{kind.name[0].upper()}{kind.name[1:]}: logits {kind.logits:.2g} off, gradient "
            f"{kind.relative_error:.2g}, rounding explains {kind.tolerance.value:.2g}"
            for kind in result.kinds
        )
        return f"Documents of {', '.join(map(str, result.lengths))} tokens in one row. {kinds}."


def short(kind: Positioned) -> str:
    """Equal within rounding, or by how much it is off."""
    return "equal" if kind.equal else f"{percent(kind.relative_error)} off"


EXPERIMENTS = (Waste, Leak, Boundary, Positions, Mixture, Order)
