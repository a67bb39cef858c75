"""When accumulation equals the large batch: by hand, five conditions, an empty microbatch, the tail window."""

from __future__ import annotations

import math

from labkit.accumulation import equivalence
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.wording import percent, three


class Empty(Experiment[equivalence.Empty]):
    """A microbatch without a single valid target."""

    title = "An empty microbatch"
    question = "Library mean: how far off is the gradient?"
    unit = "%"
    note = "Measured, one sequence a microbatch. The right policy adds exactly 0 and still takes part in the backward."
    run = staticmethod(equivalence.empty)
    shown = (equivalence.masked_mean, equivalence.library_mean, equivalence.sum_over_n)
    aspect = 0.45

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("relative error of the gradient (%)", "", moving="x")
        self.axes.set_yticks([2, 1, 0], labels=["by hand", "library", "sum / N"])
        canvas.frame(self.axes, x=(0, 100), y=(-0.6, 2.6))
        self.bars = [canvas.bar(self.axes, role) for role in ("wrong", "wrong", "right")]
        self.words = [canvas.text(self.axes, va="center") for _ in self.bars]

    def draw(self, canvas: Canvas, result: equivalence.Empty) -> None:
        errors = [100 * each.relative_error for each in result.policies]
        top = max([1.0, *(error for error in errors if math.isfinite(error))])
        canvas.frame(self.axes, x=(0, 2.2 * top), xticks=[0, top])
        for at, each in enumerate(result.policies):
            length = errors[at] if math.isfinite(errors[at]) else 0.0
            self.bars[at].set_data([0, length], [2 - at, 2 - at])
            words = f"{percent(each.relative_error)} off" if math.isfinite(errors[at]) else "gradient NaN"
            self.words[at].set_text(f"{words}, loss {three(each.loss) if math.isfinite(each.loss) else 'NaN'}")
            self.words[at].set_position((length + top / 50, 2 - at))

    def answer(self, result: equivalence.Empty) -> float:
        return 100 * result.policies[1].relative_error

    def headline(self, result: equivalence.Empty) -> str:
        empty = sum(n == 0 for n in result.counts)
        if not empty:
            return "Every microbatch has a target: by hand and library agree"
        return f"{empty} of {len(result.counts)} microbatches without a target: three policies, three gradients"

    def describe(self, result: equivalence.Empty) -> str:
        words = []
        for each in result.policies:
            loss = three(each.loss) if math.isfinite(each.loss) else "NaN"
            left = "gradient NaN"
            if math.isfinite(each.dilution):
                times = "" if abs(each.dilution - 1) < 1e-9 else f"{three(each.dilution)} times "
                left = f"gradient {times}as long as without the empty ones"
                left += f", {percent(each.relative_error)} off" if each.relative_error > 1e-9 else ", right"
            words.append(f"{each.name[0].upper()}{each.name[1:]}: loss {loss}, {left}")
        return f"Valid tokens {', '.join(map(str, result.counts))}. {'. '.join(words)}."


class Conditions(Experiment[equivalence.Conditions]):
    """Five conditions, each one a switch."""

    title = "When is it equal?"
    question = "How far is the update from the large batch's?"
    unit = "%"
    note = "Measured: one update by plain SGD on a small net, float64. Break one condition at a time."
    run = staticmethod(equivalence.conditions)
    shown = (equivalence.update,)
    aspect = 0.34

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("relative error of the update", "", log="x", moving="")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(1e-17, 100), y=(-1, 1), xticks=[1, 1e-16])
        self.bound = canvas.line(self.axes, "modelled")
        self.right = canvas.line(self.axes, "right", linestyle="none", markersize=11)
        self.wrong = canvas.line(self.axes, "wrong", linestyle="none", markersize=11)
        self.words = canvas.text(self.axes, "rounding explains up to here", ha="left", va="center")

    def draw(self, canvas: Canvas, result: equivalence.Conditions) -> None:
        shown = max(result.relative_error, 2e-17)
        self.bound.set_data([result.tolerance.value] * 2, [-1, 1])
        self.words.set_position((result.tolerance.value * 1.6, -0.6))
        self.right.set_data([shown] if result.equal else [], [0] if result.equal else [])
        self.wrong.set_data([] if result.equal else [shown], [] if result.equal else [0])

    def answer(self, result: equivalence.Conditions) -> float:
        return 0.0 if result.equal else 100 * result.relative_error

    def headline(self, result: equivalence.Conditions) -> str:
        if result.equal:
            return "Equal to the large batch, as far as rounding goes"
        return f"{percent(result.relative_error)} off, norm ratio {three(result.norm_ratio)}"

    def describe(self, result: equivalence.Conditions) -> str:
        broken = f"Broken: {', '.join(result.broken)}" if result.broken else "All five conditions hold"
        off = f"{result.relative_error:.1g}" if result.equal else percent(result.relative_error)
        return f"{broken}. The update is {off} off; rounding alone explains {result.tolerance.value:.1g}."


class ByHand(Experiment[equivalence.ByHand]):
    """Three gradients, one step."""

    title = "By hand"
    question = "Where is the weight after the step?"
    note = "Computed twice: by the formula, and by three backward passes of torch."
    run = staticmethod(equivalence.by_hand)
    aspect = 0.34

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("weight W", "", moving="x")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(-1, 2), y=(-1, 1))
        self.path = canvas.line(self.axes, "reference", colour="muted", linestyle=":")
        self.before = canvas.line(self.axes, "reference", marker="|", markersize=26)
        self.right = canvas.line(self.axes, "right", linestyle="none", markersize=11)
        self.wrong = canvas.line(self.axes, "wrong", linestyle="none", markersize=11)
        self.words = [canvas.text(self.axes, words, ha="center") for words in ("before", "divided by 3", "not divided")]

    def draw(self, canvas: Canvas, result: equivalence.ByHand) -> None:
        before = result.stepped + (result.stepped - result.undivided) / 2
        places = (before, result.stepped, result.undivided)
        low, high = min(places), max(places)
        pad = 0.35 * (high - low) or 1.0
        canvas.frame(self.axes, x=(low - pad, high + pad))
        canvas.ticks(self.axes, x=sorted({float(f"{place:.4g}") for place in places}))
        self.path.set_data([before, result.undivided], [0, 0])
        self.before.set_data([before], [0])
        self.right.set_data([result.stepped], [0])
        self.wrong.set_data([result.undivided], [0])
        above = 0.45 if high > low else 0.75  # a step of nothing: all at one place
        for words, place, height in zip(self.words, places, (0.45, -0.6, above), strict=True):
            words.set_position((place, height))

    def answer(self, result: equivalence.ByHand) -> float:
        return result.stepped

    def headline(self, result: equivalence.ByHand) -> str:
        return f"Mean gradient {three(result.mean)}: W is {three(result.stepped)} after the step"

    def describe(self, result: equivalence.ByHand) -> str:
        return (
            f"The mean of the three gradients is {three(result.mean)}, and three backward passes of g·W/3 left "
            f"{three(result.accumulated)} in .grad. The step goes to {three(result.stepped)}. Without the division it "
            f"would go to {three(result.undivided)}, three times as far."
        )
