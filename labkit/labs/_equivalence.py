"""When accumulation equals the large batch: by hand, five conditions, an empty microbatch, the tail window."""

from __future__ import annotations

import math

from labkit import accumulation, rules
from labkit.accumulation import equivalence
from labkit.accumulation.equivalence import ByHand, Conditions, Empty
from labkit.declare import percent, three
from labkit.labs._canvas import Canvas
from labkit.labs._experiment import Experiment
from labkit.labs._map import WeightMap


class Nothing(Experiment[Empty]):
    """A microbatch without a single valid target."""

    name = "empty"
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
        canvas.ticks(self.axes, x=[0, 50, 100])
        self.bars = [canvas.bar(self.axes, role) for role in ("wrong", "wrong", "right")]
        self.words = [canvas.text(self.axes, va="center") for _ in self.bars]

    def draw(self, canvas: Canvas, result: Empty) -> None:
        errors = [100 * each.relative_error for each in result.policies]
        top = max([1.0, *(error for error in errors if math.isfinite(error))])
        canvas.frame(self.axes, x=(0, 2.2 * top))
        canvas.ticks(self.axes, x=[0, float(f"{top:.2g}")])
        for at, each in enumerate(result.policies):
            length = errors[at] if math.isfinite(errors[at]) else 0.0
            self.bars[at].set_data([0, length], [2 - at, 2 - at])
            words = f"{percent(each.relative_error)} off" if math.isfinite(errors[at]) else "gradient NaN"
            self.words[at].set_text(f"{words}, loss {three(each.loss) if math.isfinite(each.loss) else 'NaN'}")
            self.words[at].set_position((length + top / 50, 2 - at))

    def answer(self, result: Empty) -> float:
        return 100 * result.policies[1].relative_error

    def headline(self, result: Empty) -> str:
        empty = sum(n == 0 for n in result.counts)
        if not empty:
            return "Every microbatch has a target: by hand and library agree"
        return f"{empty} of {len(result.counts)} microbatches without a target: three policies, three gradients"

    def describe(self, result: Empty) -> str:
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


class Tail(Experiment[accumulation.Tail]):
    """The window that K does not fill."""

    name = "tail"
    title = "The tail window"
    question = "The most wrong step: how many times its right length?"
    unit = "times"
    note = (
        "Measured at fixed weights of the model. A row is an optimizer step, a column a microbatch of two epochs; "
        "colour: the weight it got. Number: length of the step's gradient, 1 is right."
    )
    run = staticmethod(accumulation.tail)
    shown = (rules.tail_divided_by_k, rules.carried_over)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("microbatch, through both epochs", "optimizer step", moving="xy")
        canvas.frame(self.axes, x=(0, 20), y=(6, 0))
        self.map = WeightMap(canvas, self.axes, 48, 48)
        self.epoch = canvas.line(self.axes, "reference", linewidth=1.5)

    def draw(self, canvas: Canvas, result: accumulation.Tail) -> None:
        steps, microbatches = result.weights.shape
        self.map.draw(result.weights, list(result.norm_ratio))
        canvas.frame(self.axes, x=(0, microbatches * 1.12), y=(steps, 0))
        canvas.ticks(self.axes, x=[0, microbatches // 2, microbatches], y=[0, steps])
        self.epoch.set_data([microbatches / 2] * 2, [0, steps])

    def answer(self, result: accumulation.Tail) -> float:
        return max(result.norm_ratio, key=lambda ratio: abs(math.log(ratio)) if ratio > 0 else math.inf)

    def headline(self, result: accumulation.Tail) -> str:
        worst, steps = self.answer(result), len(result.norm_ratio)
        if abs(worst - 1) < 1e-9:
            return f"All {steps} steps have their right length"
        return f"The most wrong of {steps} steps is {three(worst)} times its right length"

    def describe(self, result: accumulation.Tail) -> str:
        steps = ", ".join(f"{three(ratio)}" for ratio in result.norm_ratio)
        left = f" {result.left} microbatches are in no step at all." if result.left else ""
        return f"Length of each step's gradient, 1 is right: {steps}. The line divides the epochs.{left}"


class Equal(Experiment[Conditions]):
    """Five conditions, each one a switch."""

    name = "conditions"
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
        canvas.frame(self.axes, x=(1e-17, 100), y=(-1, 1))
        canvas.ticks(self.axes, x=[1e-16, 1e-8, 1])
        self.bound = canvas.line(self.axes, "modelled")
        self.right = canvas.line(self.axes, "right", linestyle="none", markersize=11)
        self.wrong = canvas.line(self.axes, "wrong", linestyle="none", markersize=11)
        self.words = canvas.text(self.axes, "rounding explains up to here", ha="left", va="center")

    def draw(self, canvas: Canvas, result: Conditions) -> None:
        shown = max(result.relative_error, 2e-17)
        self.bound.set_data([result.tolerance.value] * 2, [-1, 1])
        self.words.set_position((result.tolerance.value * 1.6, -0.6))
        self.right.set_data([shown] if result.equal else [], [0] if result.equal else [])
        self.wrong.set_data([] if result.equal else [shown], [] if result.equal else [0])

    def answer(self, result: Conditions) -> float:
        return 0.0 if result.equal else 100 * result.relative_error

    def headline(self, result: Conditions) -> str:
        if result.equal:
            return "Equal to the large batch, as far as rounding goes"
        return f"{percent(result.relative_error)} off, norm ratio {three(result.norm_ratio)}"

    def describe(self, result: Conditions) -> str:
        broken = f"Broken: {', '.join(result.broken)}" if result.broken else "All five conditions hold"
        off = f"{result.relative_error:.1g}" if result.equal else percent(result.relative_error)
        return f"{broken}. The update is {off} off; rounding alone explains {result.tolerance.value:.1g}."


class Hand(Experiment[ByHand]):
    """Three gradients, one step."""

    name = "by_hand"
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

    def draw(self, canvas: Canvas, result: ByHand) -> None:
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

    def answer(self, result: ByHand) -> float:
        return result.stepped

    def headline(self, result: ByHand) -> str:
        return f"Mean gradient {three(result.mean)}: W is {three(result.stepped)} after the step"

    def describe(self, result: ByHand) -> str:
        return (
            f"The mean of the three gradients is {three(result.mean)}, and three backward passes of g·W/3 left "
            f"{three(result.accumulated)} in .grad. The step goes to {three(result.stepped)}. Without the division it "
            f"would go to {three(result.undivided)}, three times as far."
        )
