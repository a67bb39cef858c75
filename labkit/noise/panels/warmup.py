"""A large learning rate with and without warmup, and how much weight decay acts in a larger batch."""

from __future__ import annotations

import math

import torch

from labkit.frame.canvas import Canvas, polyline
from labkit.frame.experiment import Experiment
from labkit.noise import warmup
from labkit.wording import percent, three

TOP = 1000.0  # η × curvature beyond it is drawn there: the training is lost


class Warmup(Experiment[warmup.Warmup]):
    """Trainings with and without warmup, and the curvature that decides."""

    title = "Warmup"
    question = "Without warmup: how many of the trainings are lost?"
    unit = "trainings"
    note = (
        "Measured, every seed a line; solid: with warmup, dashed: without. Above 2 a step ends farther from the lowest "
        "point than it began. A line at the top, at 1000, is lost."
    )
    run = staticmethod(warmup.warmup)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer step", "η × curvature", log="xy", moving="")
        canvas.frame(self.axes, x=(1, warmup.STEPS), y=(0.01, 20 * TOP), yticks=[2, TOP, 0.01])
        self.border = canvas.line(self.axes, "reference")
        self.lines = [canvas.line(self.axes, role, marker="", linewidth=1.3) for role in ("right", "wrong")]
        for word, x, ha in (("solid: with warmup", 1.1, "left"), ("dashed: without", warmup.STEPS / 1.1, "right")):
            canvas.text(self.axes, word, ha=ha, va="top", position=(x, 15 * TOP))

    def draw(self, canvas: Canvas, result: warmup.Warmup) -> None:
        self.border.set_data([1, warmup.STEPS], [2, 2])
        for line, side in zip(self.lines, result.sharpness.clamp(0.001, TOP), strict=True):
            line.set_data(*polyline(zip((result.steps + 1).tolist(), row, strict=True) for row in side.tolist()))

    def answer(self, result: warmup.Warmup) -> float:
        return float(result.lost[1])

    def headline(self, result: warmup.Warmup) -> str:
        return f"Lost without warmup: {result.lost[1]} of {result.seeds}, with warmup: {result.lost[0]}"

    def describe(self, result: warmup.Warmup) -> str:
        ends = (torch.where(side.isfinite(), side, math.inf)[:, -1].median() for side in result.losses)
        losses = (three(float(end)) if math.isfinite(end) else "∞" for end in ends)
        return (
            f"Curvature at the start {three(result.curvature)}, so η × curvature is "
            f"{three(float(result.sharpness[1, :, 0].mean()))} at once without warmup; with it, "
            f"{_most(result)}. Lost is a training that ends worse than a net that says 0. Median loss above the "
            f"least at the end: {next(losses)} with warmup, {next(losses)} without."
        )


def _most(result: warmup.Warmup) -> str:
    most = float(result.sharpness[0].max())
    return f"at most {three(most)}" if most < TOP else "some are lost too"


class Decay(Experiment[warmup.Decayed]):
    """What weight decay leaves of a weight, over the same samples."""

    title = "Weight decay and the batch"
    question = "Large batch, nothing scaled: what share of the decay is left?"
    unit = "%"
    note = (
        "Measured with torch's AdamW: a weight of 1 without gradient. It says how much decay acts, and not which "
        "decay is best. Thin mark: the base batch."
    )
    run = staticmethod(warmup.decay)
    shown = (warmup.left_over,)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("share of the weight left over (%)", "", moving="")
        canvas.frame(self.axes, x=(0, 100), y=(4.5, -0.6))
        self.axes.set_yticks([])
        roles = ("right", "wrong", "wrong", "right", "right")
        self.bars = [canvas.bar(self.axes, role, linewidth=9) for role in roles]
        self.words = [canvas.text(self.axes, ha="left", va="bottom") for _ in roles]
        self.base = canvas.line(self.axes, "reference", linewidth=2)

    def draw(self, canvas: Canvas, result: warmup.Decayed) -> None:
        left = (100 * result.left).tolist()
        self.base.set_data(*polyline([(left[0], at - 0.02), (left[0], at + 0.32)] for at in range(len(left))))
        for at, (name, share, steps) in enumerate(zip(result.names, left, result.steps, strict=True)):
            self.bars[at].set_data([0, share], [at + 0.15, at + 0.15])
            self.words[at].set(text=f"{name}: {three(share)} % after {steps}", position=(0.5, at - 0.08))

    def answer(self, result: warmup.Decayed) -> float:
        return 100 * float(result.forgotten[1])

    def headline(self, result: warmup.Decayed) -> str:
        left = three(100 * float(result.left[1]))
        return f"Nothing scaled: {percent(float(result.forgotten[1]))} of the decay, {left} % of the weight is left"

    def describe(self, result: warmup.Decayed) -> str:
        K = result.steps[0] // result.steps[1]
        shares = zip(result.names[1:], (100 * result.left[1:]).tolist(), strict=True)
        said = "; ".join(f"{name} {three(share)} %" for name, share in shares)
        decays = ", ".join(map(percent, result.forgotten[1:].tolist()))
        return (
            f"Over the same samples the base batch makes {result.steps[0]} steps and leaves "
            f"{three(100 * float(result.left[0]))} % of a weight. A batch {K} times as large makes {result.steps[1]}, "
            f"and leaves: {said}. Decay over that of the base batch, in logarithms: {decays}. "
            f"Formula and torch differ by {result.off:.1g}, rounding explains {result.tolerance.value:.1g}."
        )
