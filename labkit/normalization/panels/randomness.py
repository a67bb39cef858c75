"""Random layers and images: which numbers each image meets, and what is equal on average."""

from __future__ import annotations

from labkit.cached_runs import cache_runs
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.normalization import random_streams, randomness
from labkit.wording import percent


class Randomness(Experiment[randomness.Randomness]):
    """The masks of one batch and of its microbatches."""

    title = "Same seed, other masks"
    question = "How far is the gradient from the right one?"
    unit = "%"
    note = (
        "Measured. A row is an image, a column a unit (or flip, shift and brightness). Dot: the same in one batch and "
        "in the microbatches. Cross: different. Blank: dropped, or left alone, in both."
    )
    run = staticmethod(randomness.randomness)
    shown = (random_streams.draw_stream, random_streams.draw_keyed, randomness.by_dropout, randomness.by_recomputation)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("unit", "image", whole="xy", moving="xy")
        canvas.frame(self.axes, x=(0, 36), y=(24, 0))
        self.same = canvas.line(self.axes, "right", linestyle="none", markersize=5)
        self.other = canvas.line(self.axes, "wrong", linestyle="none", markersize=5)

    def draw(self, canvas: Canvas, result: randomness.Randomness) -> None:
        B, U = result.one.shape
        canvas.frame(self.axes, x=(0, U), y=(B, 0), yticks=[0, B])
        label = "flip, shift, brightness" if result.source == "augmentation" else "unit"
        if self.axes.get_xlabel() != label:
            self.axes.set_xlabel(label)
        differ = result.one != result.parts
        resting = result.one == (1.0 if result.source == "augmentation" else 0.0)
        if result.source == "augmentation":
            resting[:, :2] = result.one[:, :2] == 0
        for line, where in ((self.other, differ), (self.same, ~differ & ~resting)):
            y, x = where.nonzero().T.tolist()
            line.set_data([place + 0.5 for place in x], [place + 0.5 for place in y])

    def answer(self, result: randomness.Randomness) -> float:
        return 0.0 if result.equal else 100 * result.gradient.relative_error

    def headline(self, result: randomness.Randomness) -> str:
        if result.equal:
            return f"Equal within rounding: {result.gradient.relative_error:.1g} off"
        return f"{percent(result.differ)} of the numbers differ, and the gradient is {self._off(result)} off"

    def describe(self, result: randomness.Randomness) -> str:
        how = "keyed by the image" if result.aligned else "drawn in the order in which they are asked for"
        if result.source == "recomputation":
            how = "restored for the recomputation" if result.aligned else "drawn anew in the recomputation"
        return (
            f"{result.source.capitalize()}, random numbers {how}: {percent(result.differ)} of them differ, the "
            f"gradient is {self._off(result)} off; rounding alone explains {result.tolerance.value:.1g}."
        )

    @staticmethod
    def _off(result: randomness.Randomness) -> str:
        error = result.gradient.relative_error
        return f"{error:.1g}" if result.equal else percent(error)


class Targets(Experiment[randomness.Targets]):
    """Averaged over draws: does the difference vanish?"""

    title = "Equal on average?"
    question = "After the last draw: how far apart are the averaged gradients?"
    unit = "%"
    note = (
        "Measured: accumulated and right gradient, both averaged over more and more draws. Line: what chance alone "
        "would leave, falling like one over the square root of the draws."
    )
    run = staticmethod(cache_runs(randomness.targets))

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("draws averaged over", "difference of the averages (%)", log="y", log2="x", moving="xy")
        canvas.frame(self.axes, x=(3, 200), y=(1, 100))
        self.line = canvas.line(self.axes, "modelled")
        self.dots = canvas.line(self.axes, "measured", markersize=9)

    def draw(self, canvas: Canvas, result: randomness.Targets) -> None:
        draws, known = result.draws.tolist(), result.measured
        if not known:
            return
        shown, line = (100 * result.difference[:known]).tolist(), (100 * result.expected).tolist()
        low, high = min(*shown, *line), max(*shown, *line)
        canvas.frame(self.axes, x=(draws[0] / 1.4, draws[-1] * 1.4), y=(low / 1.6, high * 1.6))
        self.line.set_data(draws, line)
        self.dots.set_data(draws[:known], shown)

    def answer(self, result: randomness.Targets) -> float:
        return 100 * float(result.difference[result.measured - 1]) if result.measured else 0.0

    def headline(self, result: randomness.Targets) -> str:
        if result.progress < 1:
            return f"{result.done} of {int(result.draws[-1])} draws"
        return "The difference vanishes on average" if result.falls else "A bias is left"

    def describe(self, result: randomness.Targets) -> str:
        return result.verdict
