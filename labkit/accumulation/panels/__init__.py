"""Mean or token sum: the weight of each token, layers, trainings, and what breaks an equivalence.

>>> import labkit
>>> labkit.labs.accumulation("by_hand").experiments
['by_hand']
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from labkit import accumulation, rules
from labkit.accumulation import Comparison
from labkit.accumulation.panels.equivalence import ByHand, Conditions, Empty
from labkit.accumulation.panels.training import Trainings
from labkit.frame.canvas import Canvas, polyline
from labkit.frame.experiment import Experiment
from labkit.frame.weight_map import NOTHING, WeightMap
from labkit.listing import sources
from labkit.wording import percent, three

ROWS, COLUMNS = 32, 32


def judged(result: Comparison) -> str:
    """Right within rounding, or by how much it is off."""
    if result.equal:
        return (
            f"equal to the full batch: {result.relative_error:.1g} off, rounding explains {result.tolerance.value:.1g}"
        )
    return f"{percent(result.relative_error)} off the full batch's gradient"


class Weights(Experiment[Comparison]):
    """The weight that every token really received."""

    title = "The weight of each token"
    question = "The heaviest token: how many times its right weight?"
    unit = "times"
    note = (
        "Measured: fitted by least squares from the gradient that this loop left. Colour and number: weight × N, "
        "1 is right; N: the step's valid tokens. Bars: what the rule's algebra predicts. Blank: no target. Cross: 0."
    )
    run = staticmethod(accumulation.weights)
    aspect = 0.62
    pictures = ("weights", "direction", "entries")

    def source(self) -> str:
        """The loops of all rules, then what compares them."""
        shown: list[Any] = [rules.rule(word).loop for word in accumulation.WINDOW]
        shown += [accumulation.compare, accumulation.weights]
        return sources(*shown)

    def layout(self, canvas: Canvas) -> None:
        grid = canvas.beside((5, 2), gap=4.6)
        self.axes = canvas.axes("position in the sequence", "sequence", position=grid[0], whole="xy", moving="xy")
        canvas.frame(self.axes, x=(0, COLUMNS), y=(8, 0))
        self.map = WeightMap(canvas, self.axes, ROWS, COLUMNS)
        self.cuts = canvas.line(self.axes, "reference", linewidth=1.5)
        self.side = canvas.axes("weight × N", "", position=grid[1], log="x", moving="xy")
        self.side.yaxis.set_visible(False)
        self.one = canvas.line(self.side, "reference")
        self.predicted = canvas.line(
            self.side, "modelled", marker="|", markersize=13, markeredgewidth=3, linestyle="none"
        )
        self.fitted = canvas.line(self.side, "measured")

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        B = values["sequences"]
        canvas.frame(self.axes, y=(B, 0), yticks=[0, B])
        canvas.frame(self.side, x=(0.25, 4), xticks=[1])
        canvas.hide(self.axes, COLUMNS / 2, B / 2)

    def draw(self, canvas: Canvas, result: Comparison) -> None:
        fitted, predicted = result.sequence_weights, result.predicted
        B, places = len(fitted), [at + 0.5 for at in range(len(fitted))]
        self.map.draw(result.map, fitted.tolist())
        edges = [at for at in range(1, B) if result.microbatch[at] != result.microbatch[at - 1]]
        self.cuts.set_data(*polyline([(0, edge), (COLUMNS, edge)] for edge in edges))
        both = [w for w in (*fitted.tolist(), *predicted.tolist(), 1.0) if w > NOTHING]
        low, high = min(both) / 1.6, max(both) * 1.6
        canvas.frame(self.side, x=(low, high), y=(B, 0), xticks=[1, max(both), min(both)])
        self.one.set_data([1, 1], [0, B])
        self.predicted.set_data(predicted.tolist(), places)
        self.fitted.set_data(fitted.tolist(), places)

    def answer(self, result: Comparison) -> float:
        return float(result.sequence_weights.nan_to_num(0).max())

    def headline(self, result: Comparison) -> str:
        return f"{result.rule}: {judged(result)}"

    def describe(self, result: Comparison) -> str:
        rule = rules.rule(result.rule)
        counts = torch.zeros(int(result.microbatch[-1]) + 1).index_add(0, result.microbatch, result.counts.float())
        weights = [0.0 if abs(w) < 1e-9 else w for w in result.token_weights.tolist()]
        pairs = [f"{three(w)} ({int(n)} tokens)" for n, w in zip(counts, weights, strict=True)]
        one = torch.allclose(result.sequence_weights, result.token_weights[result.microbatch], equal_nan=True)
        fix = "" if rule.right else f" The fix: {rule.fix}."
        return (
            f"Weight of a token as a multiple of the right one{'' if one else ', on average'}, by the valid tokens of "
            f"its microbatch: {', '.join(pairs)}. How it usually looks: {rule.looks_like}.{fix}"
        )


class Layers(Experiment[Comparison]):
    """The same fault, layer by layer, and the number that hides it."""

    title = "The gradient of each layer"
    question = "How large is the relative error of the whole gradient?"
    unit = "%"
    note = (
        "Measured. A projection of 1 means: as long along the right direction as it should be. It is blind to all that "
        "stands across that direction."
    )
    run = staticmethod(accumulation.layers)
    shown = (accumulation.weights,)
    pictures = ("layers", "direction", "entries")

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("norm of the layer's gradient", "", log="x", moving="xy")
        self.right = canvas.line(self.axes, "right", markersize=9, linestyle="none")
        self.wrong = canvas.line(self.axes, "wrong", markersize=9, linestyle="none")
        self.words = [canvas.text(self.axes, va="center", ha="left") for _ in range(8)]
        canvas.frame(self.axes, x=(0.01, 1), y=(6.5, -0.5))
        self.axes.set_yticks([])

    def draw(self, canvas: Canvas, result: Comparison) -> None:
        layers = list(result.per_layer.values())
        right, wrong = [each.right_norm for each in layers], [each.norm for each in layers]
        known = [norm for norm in (*right, *wrong) if norm > 0 and math.isfinite(norm)]
        low, last = min(known) / 2, max(known)
        em = 1 / canvas.columns  # as a share of the axes
        room = min(0.7, 11.7 * em)  # for the words beside the last dot
        high = last * max(5.0, (last / low) ** (room / (1 - room)))
        canvas.frame(self.axes, x=(low, high), y=(len(layers) - 0.5, -0.5), xticks=[min(known), last])
        self.right.set_data(right, range(len(layers)))
        self.wrong.set_data(wrong, range(len(layers)))
        for at, (name, each) in enumerate(result.per_layer.items()):
            off = "equal" if result.equal else f"{percent(each.relative_error)} off"
            self.words[at].set_text(f"{name.split('.')[-1]}: {off}")
            self.words[at].set_position((max(right[at], wrong[at]) * (high / low) ** (1.2 * em), at))

    def tables(self, result: Comparison) -> list[dict[str, Any]]:
        fields = ("right_norm", "norm", "norm_ratio", "cosine", "projection", "relative_error")
        rows = [[name, *(three(getattr(each, f)) for f in fields)] for name, each in result.per_layer.items()]
        return [{"columns": ["layer", *(f.replace("_", " ") for f in fields)], "rows": rows}]

    def answer(self, result: Comparison) -> float:
        return 100 * result.relative_error

    def headline(self, result: Comparison) -> str:
        if result.equal:
            return f"{result.rule}: {judged(result)}"
        projection = f"{result.projection:.2f}"
        return (
            f"Projection {projection}, {'and yet ' if projection == '1.00' else ''}{percent(result.relative_error)} off"
        )

    def describe(self, result: Comparison) -> str:
        return (
            f"{result.rule}: norm ratio {three(result.norm_ratio)}, cosine {three(result.cosine)}, projection "
            f"{result.projection:.2f}, relative error {percent(result.relative_error)}. Dots: the full batch; "
            f"crosses: this one. Rounding alone explains {result.tolerance.value:.1g}."
        )


class Tail(Experiment[accumulation.Tail]):
    """The window that K does not fill."""

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
        self.axes = canvas.axes("microbatch, through both epochs", "optimizer step", whole="xy", moving="xy")
        canvas.frame(self.axes, x=(0, 20), y=(6, 0))
        self.map = WeightMap(canvas, self.axes, 48, 48)
        self.epoch = canvas.line(self.axes, "reference", linewidth=1.5)

    def draw(self, canvas: Canvas, result: accumulation.Tail) -> None:
        steps, microbatches = result.weights.shape
        self.map.draw(result.weights, list(result.norm_ratio))
        canvas.frame(self.axes, x=(0, microbatches * 1.12), y=(steps, 0), xticks=[0, microbatches], yticks=[0, steps])
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


EXPERIMENTS = (Weights, Layers, Trainings, Empty, Tail, Conditions, ByHand)
