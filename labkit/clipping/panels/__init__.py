"""Clipping and loss scaling: the order of unscale and clip, what half precision loses, and skipped steps.

>>> import labkit
>>> labkit.labs.clipping("ranks").experiments
['ranks']
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit import clipping
from labkit.clipping import Clips, Ordered, ordering
from labkit.clipping.panels.scaling import Overflow, Ranks, Underflow
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.listing import sources
from labkit.wording import percent, three

RESOLVED = 1e-15  # of the heaviest weight: below it float64 tells no weight from 0


class Orders(Experiment[Ordered]):
    """The weight with which every microbatch reached the optimizer."""

    title = "The order of unscale and clip"
    question = "The heaviest microbatch: how many times the lightest?"
    unit = "times"
    note = (
        "Measured: dots, fitted from the gradient that the optimizer stepped with. Modelled: bars, from the order's "
        "algebra. Thin line: clip-once, the right order. The scaler is torch's own."
    )
    pictures = ("weights", "direction", "entries")
    run = staticmethod(clipping.orders)
    aspect = 0.5

    def source(self) -> str:
        """All orders, then what runs them."""
        shown: list[Any] = [order for order, _ in ordering.ORDERS.values()]
        shown += [clipping.refusal, clipping.stepped_with, clipping.orders]
        return sources(*shown)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes(
            "weight × N (1: neither scaled nor clipped)", "microbatch", log="x", whole="y", moving="xy"
        )
        canvas.frame(self.axes, x=(0.1, 100), y=(4.6, 0.4))
        self.right = canvas.line(self.axes, "reference")
        self.predicted = canvas.line(
            self.axes, "modelled", marker="|", markersize=15, markeredgewidth=3, linestyle="none"
        )
        self.fitted = canvas.line(self.axes, "measured", markersize=7)
        self.words = [canvas.text(self.axes, va="center", ha="right") for _ in range(8)]

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        K = values["accumulation_steps"]
        self._frame(canvas, 0.1, 100, K)
        canvas.hide(self.axes, 3, (K + 1) / 2)

    def draw(self, canvas: Canvas, result: Ordered) -> None:
        K = len(result.weights)
        floor = RESOLVED * float(result.weights.max())
        fitted, predicted = result.weights.clamp(min=floor).tolist(), result.predicted.clamp(min=floor).tolist()
        shown = [*fitted, *predicted, result.right_weight, 1.0]
        span = max(max(shown) / min(shown), 10)
        high = max(shown) * span**0.35
        low = min(shown) / span**0.15
        self._frame(canvas, low, high, K, result.right_weight)
        rows = range(1, K + 1)
        self.right.set_data([result.right_weight] * 2, [0.4, K + 0.6])
        roomy = len(self.words) >= K
        self.predicted.set(data=(predicted, rows), markersize=15 if roomy else 6)
        self.fitted.set(data=(fitted, rows), markersize=7 if roomy else 3)
        for at, words in enumerate(self.words):
            words.set_text(_weight(result, at) if roomy and at < K else "")
            words.set_position((high, at + 1))

    def _frame(self, canvas: Canvas, low: float, high: float, K: int, right: float = 1.0) -> None:
        canvas.frame(self.axes, x=(low, high), y=(K + 0.6, 0.4), xticks=[right], yticks=[1, K])

    def answer(self, result: Ordered) -> float:
        heaviest = float(result.weights.max())
        return heaviest / max(float(result.weights.min()), RESOLVED * heaviest)

    def headline(self, result: Ordered) -> str:
        if result.equal:
            return "Equal to clip-once, as far as rounding goes"
        if result.norm_ratio > 2:
            return f"{three(result.norm_ratio)} times as long as the right step"
        return f"{percent(result.relative_error)} off the right step"

    def describe(self, result: Ordered) -> str:
        K = len(result.weights)
        weights = [_weight(result, at) for at in range(K)]
        listed = ", ".join(weights if K <= 8 else [*weights[:3], "…", weights[-1]])
        off = f"{result.relative_error:.1g}" if result.equal else three(result.relative_error)
        refused = f" torch's unscale_ refuses this order, so it is by hand. {result.refused}" if result.refused else ""
        return (
            f"{result.rule}: the microbatches weigh {listed}; clip-once gives each {three(result.right_weight)}. "
            f"The gradient is {three(result.whole)} long before any clip, clip-once steps with "
            f"{three(result.right_norm)}, this order with {three(result.norm)}. Relative error "
            f"{off}, rounding alone explains {result.tolerance.value:.1g}.{refused}"
        )


def _weight(result: Ordered, at: int) -> str:
    """A fitted weight, or that it cannot be told from 0."""
    weight = float(result.weights[at])
    return three(weight) if weight > RESOLVED * float(result.weights.max()) else "≈ 0"


class Clip(Experiment[Clips]):
    """Clipped once after accumulation, or every microbatch by itself."""

    title = "Clip once, or each"
    question = "Each microbatch clipped: how long is the step's gradient?"
    note = (
        "Lines: modelled from the microbatches' gradients. Dot and cross: measured at the threshold that is set, by "
        "running both loops. Thin line: that threshold."
    )
    pictures = ("lengths", "direction", "entries")
    run = staticmethod(clipping.clip)
    shown = (ordering.clip_once, ordering.clip_per_microbatch)
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        grid = canvas.figure.add_gridspec(1, 2, wspace=0.62)
        self.axes = canvas.axes("threshold c", "length", position=grid[0], log="xy")
        self.side = canvas.axes("threshold c", "turned by (degrees)", position=grid[1], log="x")
        for axes in (self.axes, self.side):
            canvas.frame(axes, x=(0.08, 12.5))
        canvas.frame(self.axes, y=(0.03, 6))
        canvas.frame(self.side, y=(-1, 12))
        self.at = [canvas.line(axes, "reference") for axes in (self.axes, self.side)]
        places = ((self.axes, "right"), (self.axes, "wrong"), (self.side, "right"), (self.side, "wrong"))
        self.lines = [canvas.line(axes, role, marker="") for axes, role in places]
        self.dots = [canvas.line(axes, role, linestyle="none", markersize=10) for axes, role in places]
        self.words = [
            canvas.text(self.axes, "once", ha="right", va="bottom"),
            canvas.text(self.axes, "each", ha="left", va="top"),
        ]

    def draw(self, canvas: Canvas, result: Clips) -> None:
        c, once, each, angle = (
            values.tolist()
            for values in (result.thresholds, result.modelled_once, result.modelled_each, result.modelled_angle)
        )
        top = max(1.0, *angle)
        canvas.frame(self.axes, y=(min(each) / 2, max(once) * 2.5))
        canvas.frame(self.side, y=(-0.06 * top, 1.2 * top))
        for line, limits in zip(self.at, ((min(each) / 2, max(once) * 2.5), (-0.06 * top, 1.2 * top)), strict=True):
            line.set_data([result.max_norm] * 2, limits)
        measured = (result.once, result.each, 0.0, result.angle)
        for line, dot, y, value in zip(
            self.lines, self.dots, (once, each, [0.0] * len(c), angle), measured, strict=True
        ):
            line.set_data(c, y)
            dot.set_data([result.max_norm], [value])
        place = result.max_norm if 0.5 <= result.max_norm <= 2.5 else 2.0 if result.max_norm < 0.5 else 0.5
        at = int((result.thresholds - place).abs().argmin())  # beside the thin line, or far from it
        self.words[0].set_position((place / 1.25, once[at] * 1.1))
        self.words[1].set_position((place * 1.25, each[at] * 0.9))

    def answer(self, result: Clips) -> float:
        return result.each

    def headline(self, result: Clips) -> str:
        if result.clipped == 0:
            return "No microbatch is longer than c: no difference"
        return f"Clipped once: {three(result.once)} long; each: {three(result.each)}, turned by {three(result.angle)}°"

    def describe(self, result: Clips) -> str:
        shortest, longest = three(float(result.norms.min())), three(float(result.norms.max()))
        given = (
            f"c = {three(result.max_norm)}. The window's gradient is {three(result.whole)} long, its microbatches' "
            f"{shortest} to {longest}; longer than c: {result.clipped} of {len(result.norms)}."
        )
        if not result.clipped:
            return f"{given} Both ways step with the same gradient, {three(result.once)} long."
        return (
            f"{given} Clipped once, the step's gradient is {three(result.once)} long and keeps its direction. Clipped "
            f"each, it is {three(result.each)} long, turned by {three(result.angle)} degrees (cosine "
            f"{result.cosine:.4f}) and {percent(result.relative_error)} off."
        )


EXPERIMENTS = (Orders, Clip, Underflow, Overflow, Ranks)
