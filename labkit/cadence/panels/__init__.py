"""Adam and cadence: what must happen once in an optimizer step, and what becomes of it K times.

>>> import labkit
>>> labkit.labs.cadence("count").experiments
['count']
"""

from __future__ import annotations

import torch

from labkit import cadence
from labkit.cadence.panels.schedule import Schedules
from labkit.cadence.panels.translation import Translated
from labkit.cadence.panels.updates import Path, State
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.wording import percent, three, times


class Count(Experiment[cadence.Count]):
    """The size of Adam's update where t counts microbatches."""

    title = "Adam's step count"
    question = "The first update: what share of its right size?"
    unit = "%"
    note = (
        "Line: the closed form. Crosses: measured, two parameters under torch's Adam with a constant gradient; the t "
        "of one advances K times an update. 1 is right."
    )
    run = staticmethod(cadence.count)
    shown = (cadence.adam_step_ratio,)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer step", "update / right update", log="xy", moving="xy")
        canvas.frame(self.axes, x=(1, 1000), y=(0.4, 4))
        self.one = canvas.line(self.axes, "reference")
        self.formula = canvas.line(self.axes, "modelled")
        self.measured = canvas.line(self.axes, "wrong", linestyle="none", markersize=7)
        self.words = [canvas.text(self.axes, ha=ha, va=va) for ha, va in (("left", "top"), ("center", "bottom"))]

    def draw(self, canvas: Canvas, result: cadence.Count) -> None:
        steps, last = result.steps.tolist(), int(result.steps[-1])
        low, high = min(result.first, result.last, 1.0), max(result.largest, 1.0)
        canvas.frame(self.axes, x=(0.85, last * 1.2), y=(low / 1.5, high * 1.5), yticks=[1.0])
        self.one.set_data([0.85, last * 1.2], [1, 1])
        self.formula.set_data(steps, result.formula.tolist())
        self.measured.set_data(steps, result.measured.tolist())
        falls = len(steps) > 1 and result.formula[1] < result.formula[0]
        self.words[0].set(text=three(result.first), va="bottom" if falls else "top")
        self.words[0].set_position((1.08, result.first * (1.06 if falls else 1 / 1.06)))
        peak = three(result.largest) if result.largest_at > 1 else ""
        self.words[1].set(text=peak, position=(result.largest_at, result.largest * 1.08))

    def answer(self, result: cadence.Count) -> float:
        return 100 * result.first

    def headline(self, result: cadence.Count) -> str:
        if result.accumulation_steps == 1:
            return "K = 1: counting microbatches is counting steps"
        peaked = result.largest_at > 1 and three(result.largest) != "1"
        peak = f", {three(result.largest)} times at step {result.largest_at}" if peaked else ""
        return f"The first update is {three(result.first)} times its right size{peak}"

    def describe(self, result: cadence.Count) -> str:
        return (
            f"t advances {times(result.accumulation_steps)} an update. Update over right update: {result.first:.3f} at "
            f"step 1, at most {result.largest:.3f} at step {result.largest_at}, {result.last:.3f} at step "
            f"{int(result.steps[-1])}. Formula and torch differ by {result.off:.1g}, rounding explains "
            f"{result.tolerance.value:.1g}."
        )


class Moments(Experiment[cadence.Moments]):
    """Adam's moments, once for a step and once for a microbatch."""

    title = "Moments of microbatches"
    question = "Late in the run: what share of its right size has the update?"
    unit = "%"
    note = "Measured: one parameter, the same noisy gradients for both, learning rate 1."
    run = staticmethod(cadence.moments)
    shown = (cadence.adam_updates,)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer step", "update / learning rate", log="x", moving="xy")
        canvas.frame(self.axes, x=(1, 300), y=(0, 1.2))
        self.lines = [canvas.line(self.axes, role, markersize=5) for role in ("right", "wrong")]
        for word, height, va in (("dots: once a step", 0.98, "top"), ("crosses: K times a step", 0.02, "bottom")):
            canvas.label(self.axes, 0.98, height, word, ha="right", va=va)

    def draw(self, canvas: Canvas, result: cadence.Moments) -> None:
        steps, last = result.steps.tolist(), int(result.steps[-1])
        both = torch.cat([result.right, result.wrong])
        low, high = min(0.0, float(both.min())), max(1.0, float(both.max()))
        room = max(0.2, 0.14 * (high - low))  # for the words above and below
        canvas.frame(self.axes, x=(0.9, last * 1.1), y=(low - room, high + room), yticks=[1.0])
        for line, values in zip(self.lines, (result.right, result.wrong), strict=True):
            line.set_data(steps, values.tolist())

    def answer(self, result: cadence.Moments) -> float:
        return 100 * result.ratio

    def headline(self, result: cadence.Moments) -> str:
        return f"Late updates are {percent(result.ratio)} of their right size"

    def describe(self, result: cadence.Moments) -> str:
        return (
            f"Noise of one microbatch: {three(result.noise)} times the mean gradient. The mean update of the second "
            f"half is {three(result.ratio)} of the right one; the limit for slow moments, √((G² + σ²/K) / (G² + σ²)), "
            f"is {three(result.formula)}."
        )


EXPERIMENTS = (Count, Moments, Path, State, Schedules, Translated)
