"""Which text a step is made of, and in which order the steps come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.frame.canvas import Canvas, polyline
from labkit.frame.experiment import Experiment
from labkit.packing import mixing
from labkit.wording import percent, three, with_unit


class Mixture(Experiment[mixing.Mixture]):
    """The share of two kinds of text, and where the gradient points."""

    title = "Weights of a mixture"
    question = "Counted by documents: what share of the gradient is the first kind's?"
    unit = "%"
    note = (
        "Measured: shares fitted from the gradient. Each curve: cosine of the mixed gradient with one kind's own. "
        "Dots: share by tokens. Crosses: by documents."
    )
    run = staticmethod(mixing.mixture)
    shown = (mixing.by_documents, mixing.by_tokens)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("share of the first kind (%)", "cosine with each kind", moving="y")
        self.curves = [canvas.line(self.axes, "reference", linestyle=style, linewidth=1.6) for style in ("-", "--")]
        self.right = canvas.line(self.axes, "right", linestyle="none", markersize=10)
        self.wrong = canvas.line(self.axes, "wrong", linestyle="none", markersize=11)
        self.drops = canvas.line(self.axes, "reference", colour="muted", linestyle=":")
        self.names = [canvas.text(self.axes, ha=ha, va="bottom") for ha in ("right", "left")]
        self.words = [canvas.text(self.axes, words, ha="center", va="top") for words in ("by tokens", "by documents")]
        canvas.frame(self.axes, x=(0, 100), y=(0, 1.2))

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        canvas.hide(self.axes, 100 * values["share"], 0.6)

    def draw(self, canvas: Canvas, result: mixing.Mixture) -> None:
        low = float(result.cosines.min())
        room = 1 - low
        canvas.frame(self.axes, y=(low - 0.38 * room, 1 + 0.16 * room), yticks=[1, low])
        for curve, cosines in zip(self.curves, result.cosines.tolist(), strict=True):
            curve.set_data((100 * result.shares).tolist(), cosines)
        for at, (names, x) in enumerate(zip(self.names, (99, 1), strict=True)):
            names.set_text(result.names[at])
            names.set_position((x, 1 + 0.03 * room))
        for marks, way in zip((self.right, self.wrong), result.ways, strict=True):
            marks.set_data([100 * way.share] * 2, way.cosines)
        heights = (low - 0.07 * room, low - 0.21 * room)
        for words, way, height in zip(self.words, result.ways, heights, strict=True):
            words.set_position((min(82, max(18, 100 * way.share)), height))
        drops = ((100 * way.share, max(way.cosines)) for way in result.ways)
        self.drops.set_data(*polyline([(x, top), (x, low - 0.04 * room)] for x, top in drops))

    def answer(self, result: mixing.Mixture) -> float:
        return 100 * result.ways[1].share

    def headline(self, result: mixing.Mixture) -> str:
        share = percent(result.ways[1].share)
        return f"{percent(result.wanted)} {result.names[0]} by documents is {share} of the gradient"

    def describe(self, result: mixing.Mixture) -> str:
        first, second = result.names
        ways = ". ".join(
            f"{way.name[0].upper()}{way.name[1:]}: {first} weighs {percent(way.share)}, cosine {way.cosines[0]:.3f} "
            f"with {first} and {way.cosines[1]:.3f} with {second}"
            for way in result.ways
        )
        off = percent(round(result.ways[1].relative_error, 9))
        return (
            f"{with_unit(result.documents[0], 'documents')} of {first} with {result.tokens[0]} targets, "
            f"{result.documents[1]} of {second} with {result.tokens[1]}. {ways}: {off} off the gradient that the "
            "mixture asks for."
        )


class Order(Experiment[mixing.Order]):
    """The same examples in another order."""

    title = "The order of the data"
    question = "After one epoch: how far apart are the weights, in % of the way?"
    unit = "%"
    note = (
        "Measured: two epochs of plain SGD, float64, from the same weights over the same documents. The way: how far "
        "the epoch moved the weights."
    )
    run = staticmethod(mixing.order)
    shown = (mixing.token_mean, mixing.fixed_mean, mixing.epoch)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer steps", "weights apart (% of the way)", whole="x", moving="xy")
        self.line = canvas.line(self.axes, "reference", colour="measured")
        self.dots = canvas.line(self.axes, "measured")
        self.end = canvas.text(self.axes, ha="left", va="center")
        canvas.frame(self.axes, x=(0, 4.6), y=(0, 60))

    def draw(self, canvas: Canvas, result: mixing.Order) -> None:
        apart = (100 * result.apart).tolist()
        steps, top = len(apart) - 1, max(*apart, 1.0)
        canvas.frame(self.axes, x=(-0.03 * steps, 1.2 * steps), y=(-0.04 * top, 1.15 * top), xticks=[0, steps])
        self.line.set_data(range(len(apart)), apart)
        self.dots.set_data(range(len(apart)), apart)
        self.end.set_text(percent(round(result.end, 9)))
        self.end.set_position((1.04 * steps, apart[-1]))

    def answer(self, result: mixing.Order) -> float:
        return 100 * result.end

    def headline(self, result: mixing.Order) -> str:
        if len(result.apart) == 2:
            return "One batch holds all examples, and knows no order"
        return f"The same examples, another order: weights {percent(result.end)} apart"

    def describe(self, result: mixing.Order) -> str:
        one, other = result.first
        return (
            f"The first batches have {one} and {other} targets. Their gradients differ by "
            f"{percent(result.step_error)}, cosine {three(result.step_cosine)}. In the end both have seen "
            f"every document once, and the weights are {percent(result.end)} of the way apart."
        )
