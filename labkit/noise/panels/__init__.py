"""Noise and learning rate: what averaging does, the noise scale, what a larger batch is good for, warmup, decay.

>>> import labkit
>>> labkit.labs.noise("norms", noise=2).values["noise"]
2.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from labkit import noise
from labkit.frame.canvas import Canvas, Interval
from labkit.frame.experiment import Experiment
from labkit.noise.panels.batch_size_sweeps import Batches, Rates
from labkit.noise.panels.warmup import Decay, Warmup
from labkit.wording import three, whole

MOST = 1e6  # a noise scale beyond it is none that was seen


def between(values: Iterable[float], low: Iterable[float], high: Iterable[float], least: float) -> list[Interval]:
    """Measured values with the ends of their intervals; those below `least` are drawn there."""
    return [(max(a, least), max(value, least), max(b, least)) for value, a, b in zip(values, low, high, strict=True)]


class Voters(Experiment[noise.Voters]):
    """The spread of the averaged gradient against the number that is averaged."""

    title = "Ten voters or a million"
    question = "How many times smaller is the spread of the large poll?"
    unit = "times"
    note = "Dots: measured over the polls, bars are 95 % intervals. Line: √(tr Σ / b). Rings: the two polls."
    run = staticmethod(noise.voters)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("b, voters in a poll", "spread of the average", log="xy", moving="")
        canvas.frame(self.axes, x=(0.5, 3e6), y=(7e-5, 1.5))
        self.axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        self.formula = canvas.line(self.axes, "modelled")
        self.measured = canvas.spread(self.axes)
        self.rings = canvas.line(self.axes, "guess")
        self.words = [canvas.text(self.axes, ha=ha, va=va) for ha, va in (("left", "bottom"), ("right", "top"))]

    def draw(self, canvas: Canvas, result: noise.Voters) -> None:
        b = result.voters.tolist()
        self.formula.set_data(b, result.formula.tolist())
        self.measured.put(b, between(result.spread, result.low, result.high, 1e-4))
        ends = [(size, float(result.spread[b.index(size)])) for size in (result.few, result.many)]
        self.rings.set_data(*zip(*ends, strict=True))
        for words, (size, spread), off in zip(self.words, ends, (2, 1 / 2), strict=True):
            words.set(text=three(spread), position=(size, spread * off))

    def answer(self, result: noise.Voters) -> float:
        return result.ratio

    def headline(self, result: noise.Voters) -> str:
        return f"{result.many:,} voters or {result.few:,}: {whole(result.ratio)} times less spread"

    def describe(self, result: noise.Voters) -> str:
        few, many = (float(result.spread[result.voters == size]) for size in (result.few, result.many))
        return (
            f"The averaged gradient of a poll of {result.few:,} lies {three(few)} from that of all, that of a poll "
            f"of {result.many:,} lies {three(many)} from it (root mean square over the polls). Measured ratio "
            f"{whole(result.ratio)}, √({result.many:,} / {result.few:,}) = {whole(result.expected)}."
        )


class Norms(Experiment[noise.Norms]):
    """The squared norm of the gradient against batch size, and the noise scale from two sizes."""

    title = "The noise scale from two batch sizes"
    question = "Which noise scale do the two batch sizes give?"
    unit = "examples"
    note = (
        "Dots: measured, bars are 95 % intervals; rings: the two batch sizes. Line: closed form. On the height of "
        "2 ‖G‖²: the estimate with its bootstrap interval. Cross: norms taken for noise and gradient as they are."
    )
    run = staticmethod(noise.norms)
    shown = (noise.gradients, noise.closed, noise.estimate, noise.squared, noise.interval)
    aspect = 0.62

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("b, examples in a batch", "mean of ‖g_b‖²", log="xy", moving="xy")
        canvas.frame(self.axes, x=(0.7, 150), y=(0.4, 40))
        self.formula = canvas.line(self.axes, "modelled")
        self.norm = canvas.line(self.axes, "reference")
        self.measured = canvas.spread(self.axes, markersize=5)
        self.rings = canvas.line(self.axes, "guess")
        self.estimate = canvas.spread(self.axes, "right", markersize=6)
        self.naive = canvas.line(self.axes, "wrong", linestyle="none", markersize=10)
        self.label = canvas.text(self.axes, "‖G‖²", ha="left", va="top")
        self.words = canvas.text(self.axes, ha="right", va="top")

    def draw(self, canvas: Canvas, result: noise.Norms) -> None:
        b, G = result.batches.tolist(), result.squared_norm
        ends = (result.least, min(result.estimated, MOST), min(result.most, MOST))
        low, high = 0.6, 1.7 * max(b[-1], ends[2], min(result.noise_scale, MOST))
        bottom, top = G / 3, 3 * max(float(result.measured.max()), 3 * G)
        canvas.frame(self.axes, x=(low, high), y=(bottom, top))
        line = [low * (high / low) ** (k / 40) for k in range(41)]
        self.formula.set_data(line, [G + result.trace / size for size in line])
        self.norm.set_data([low, high], [G, G])
        self.measured.put(b, between(result.measured, result.low, result.high, bottom))
        used = [b.index(size) for size in (result.small, result.big)]
        self.rings.set_data([b[at] for at in used], [float(result.measured[at]) for at in used])
        self.estimate.lay([2 * G], [ends])
        self.naive.set_data([max(low, min(result.naive, high))], [2 * G])
        self.label.set_position((low * (high / low) ** 0.02, G / 1.2))
        said = f"{_scale(result.estimated)} (closed form {three(result.noise_scale)})"
        self.words.set(text=said, position=(high / 1.1, top))

    def answer(self, result: noise.Norms) -> float:
        return min(result.estimated, MOST)

    def headline(self, result: noise.Norms) -> str:
        if math.isinf(result.estimated):
            return "Nothing of the gradient is seen above its noise"
        return f"Noise scale {three(result.estimated)} examples, {_ends(result)}"

    def describe(self, result: noise.Norms) -> str:
        counted = f" The score counts it as {MOST:,.0f}." if result.estimated > MOST else ""
        return (
            f"From batches of {result.small} and {result.big}: ‖G‖² = {three(result.squared_norm_estimate)}, tr Σ = "
            f"{three(result.trace_estimate)}, noise scale {_scale(result.estimated)}, {_ends(result)}. In closed form: "
            f"{three(result.squared_norm)}, {three(result.trace)} and {three(result.noise_scale)}. Whoever takes the "
            f"norms as they are gets {three(result.naive)}; algebra says {three(result.naive_formula)}.{counted}"
        )


def _ends(result: noise.Norms) -> str:
    return f"95 % between {_scale(result.least)} and {_scale(result.most)}"


def _scale(value: float) -> str:
    return three(value) if math.isfinite(value) else "no end"


EXPERIMENTS = (Voters, Norms, Batches, Rates, Warmup, Decay)
