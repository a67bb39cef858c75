"""The roofline lab: a modelled ceiling, this machine measured, and four traps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit import roofline
from labkit.declare import show
from labkit.labs._canvas import Canvas
from labkit.labs._experiment import Experiment

INTENSITIES = (0.125, 64.0)


class Ceiling(Experiment[roofline.Ceiling]):
    """The modelled ceiling: the lower of two limits."""

    name = "ceiling"
    title = "A modelled ceiling"
    question = "What rate does the roof allow?"
    unit = "GFLOP/s"
    note = (
        "Modelled: a ceiling from two numbers. No microbatch is run or swept here, "
        "and there is no accumulation, mask, bubble or optimizer in it."
    )
    run = staticmethod(roofline.ceiling)
    shown = (roofline.attainable,)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("intensity (FLOP/byte)", "rate (GFLOP/s)", log="xy")
        canvas.frame(self.axes, x=INTENSITIES)
        canvas.ticks(self.axes, x=[0.125, 0.5, 2, 8, 32])
        self.roof = canvas.line(self.axes, "modelled")
        self.drop = canvas.line(self.axes, "reference", colour="muted", linestyle=":")
        self.dot = canvas.line(self.axes, "right", linestyle="none", markersize=10)
        self.ring = canvas.line(self.axes, "guess", colour="text")

    def draw(self, canvas: Canvas, result: roofline.Ceiling) -> None:
        self._frame(canvas, result.ceiling, result.intensity)
        low, high = INTENSITIES
        ridge = min(max(result.ridge, low), high)
        slope = [min(x * result.bandwidth, result.ceiling) for x in (low, ridge, high)]
        self.roof.set_data([low, ridge, high], slope)
        self.dot.set_data([result.intensity], [result.attainable])

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        self._frame(canvas, values["ceiling"], values["intensity"])
        canvas.hide(self.axes, values["intensity"], values["ceiling"] / 20)

    def guess(self, canvas: Canvas, values: Mapping[str, Any], prediction: float | None) -> None:
        self.drop.set_visible(True)
        self.ring.set_visible(prediction is not None)
        self.ring.set_data([values["intensity"]], [prediction or 1])

    def _frame(self, canvas: Canvas, ceiling: float, intensity: float) -> None:
        canvas.frame(self.axes, y=(ceiling / 1000, ceiling * 2))
        canvas.ticks(self.axes, y=[ceiling / 1000, ceiling / 100, ceiling / 10, ceiling])
        self.drop.set_data([intensity, intensity], [ceiling / 1000, ceiling * 2])

    def answer(self, result: roofline.Ceiling) -> float:
        return result.attainable

    def headline(self, result: roofline.Ceiling) -> str:
        return f"{result.bound.capitalize()}: {show(result.attainable)} of {show(result.ceiling)} GFLOP/s"

    def describe(self, result: roofline.Ceiling) -> str:
        return (
            f"At {show(result.intensity)} FLOP/byte, {show(result.bandwidth)} GB/s feed at most "
            f"{show(result.intensity * result.bandwidth)} GFLOP/s; the ceiling is {show(result.ceiling)}. "
            f"The lower of the two is {show(result.attainable)}. The two meet at the ridge, {show(result.ridge)} FLOP/byte."
        )


EXPERIMENTS = (Ceiling,)
