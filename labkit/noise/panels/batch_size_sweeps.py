"""Steps and samples to a target by batch size, and the learning rate that gets there first."""

from __future__ import annotations

import math

import torch

from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.noise import batch_size_sweeps
from labkit.wording import percent, three


class Batches(Experiment[batch_size_sweeps.Batches]):
    """Steps and samples to a target loss, over what each could be at least."""

    title = "Steps and samples to a target"
    question = "From a batch of 1 to the largest: how many times fewer steps?"
    unit = "times"
    note = (
        "Dots: steps, squares: samples, measured, mean over the seeds, bars from quartile to quartile. Each batch has "
        "its best learning rate. Lines: the fit 1 + B / b and 1 + b / B."
    )
    run = staticmethod(batch_size_sweeps.batches)
    shown = (batch_size_sweeps.sgd, batch_size_sweeps.adam, batch_size_sweeps.examples, batch_size_sweeps.race)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("b, examples in a batch", "times the least", log="xy", moving="xy")
        canvas.frame(self.axes, x=(0.7, 800), y=(0.35, 100))
        self.lines = [canvas.line(self.axes, "modelled", linestyle=style) for style in ("-", "--")]
        self.dots = [canvas.spread(self.axes, marker=marker) for marker in ("o", "s")]
        self.critical = canvas.line(self.axes, "reference")
        self.words = [canvas.text(self.axes, ha="left", va=va) for va in ("bottom", "top", "top")]

    def draw(self, canvas: Canvas, result: batch_size_sweeps.Batches) -> None:
        n, done = result.measured, result.progress == 1
        S, B = result.fit if done else (1.0, 1.0)
        least = (S, S * B) if done else (float(result.steps[:n].min()), 1.0) if n else (1.0, 1.0)
        b, largest = result.sizes.double(), float(result.sizes[-1])
        shares = [torch.stack([each, each * b]) for each in (result.lower, result.steps, result.upper)]
        top = 2.5 * max(1 + B, 1 + largest / B, 10.0) if done else 100.0
        canvas.frame(self.axes, x=(0.7, largest * 1.6), y=(0.35, top))
        for kind, dots in enumerate(self.dots):
            known = n if done or kind == 0 else 0
            ends = ((each[kind, :known] / least[kind]).tolist() for each in shares)
            dots.put(b[:known].tolist(), [*zip(*ends, strict=True)])
        curves = ([1 + B / x for x in b.tolist()], [1 + x / B for x in b.tolist()])
        for line, curve in zip(self.lines, curves, strict=True):
            line.set_data(b.tolist() if done else [], curve if done else [])
        self.critical.set_data([B, B] if done else [], [0.35, top] if done else [])
        late = math.sqrt(largest) * 3 < B
        places = ((1.2, (1 + B) * 1.15), (1.2, 0.65), (B / 1.1 if late else B * 1.1, top / 1.05))
        said = ("steps", "samples", f"B = {three(B)}" if largest > B else "")
        for words, word, place in zip(self.words, said, places, strict=True):
            words.set(text=word if done else "", position=place)
        self.words[2].set(ha="right" if late else "left")

    def answer(self, result: batch_size_sweeps.Batches) -> float:
        return result.fewer

    def headline(self, result: batch_size_sweeps.Batches) -> str:
        if result.progress < 1:
            return f"{result.measured} of {len(result.sizes)} batch sizes"
        largest = int(result.sizes[-1])
        return f"{largest} times the batch, {three(result.fewer)} times fewer steps"

    def describe(self, result: batch_size_sweeps.Batches) -> str:
        if result.progress < 1:
            return "The trainings are under way."
        S, B = result.fit
        first, last = (f"{three(float(result.steps[at]))} steps" for at in (0, -1))
        return (
            f"{result.optimizer}: {first} with a batch of 1, {last} with {int(result.sizes[-1])}, for "
            f"{three(float(result.samples[-1] / result.samples[0]))} times the samples. The fit, {three(S)} · "
            f"(1 + {three(B)} / b) steps, is at most {percent(result.residual)} off. Critical batch {three(B)}; the "
            f"noise scale at the start is {three(result.noise_scale)} in closed form."
        )


class Rates(Experiment[batch_size_sweeps.Rates]):
    """The best learning rate against batch size, and where two rules go."""

    title = "The learning rate of a larger batch"
    question = "Up to which batch does the linear rule cost at most 10 % more steps?"
    unit = "examples"
    note = (
        "Dots: the measured best learning rate, bars: all that take at most 10 % more steps. Lines: two rules that "
        "start at the base batch. Crosses: the linear rule where it costs more than that."
    )
    run = staticmethod(batch_size_sweeps.rates)
    shown = (
        batch_size_sweeps.sgd,
        batch_size_sweeps.adam,
        batch_size_sweeps.examples,
        batch_size_sweeps.race,
        batch_size_sweeps.good,
    )

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("b, examples in a batch", "learning rate", log="xy", moving="xy")
        canvas.frame(self.axes, x=(0.7, 1500), y=(0.02, 20))
        self.linear = canvas.line(self.axes, "modelled")
        self.root = canvas.line(self.axes, "modelled", linestyle="--")
        self.best = canvas.spread(self.axes)
        self.fails = canvas.line(self.axes, "wrong", linestyle="none", markersize=9)
        self.words = [
            canvas.text(self.axes, word, ha=ha, va="top")
            for word, ha in (("solid: linear", "left"), ("dashed: square root", "right"))
        ]

    def draw(self, canvas: Canvas, result: batch_size_sweeps.Rates) -> None:
        n, sizes = result.measured, result.sizes.tolist()
        known = torch.cat([result.low[:n], result.high[:n], result.root[:n]]) if n else torch.tensor([0.1, 1.0])
        left, right = sizes[0] / 1.4, sizes[-1] * 1.4
        bottom, most = float(known.min()) / 2, float(known.max()) * 4
        canvas.frame(self.axes, x=(left, right), y=(bottom, most * 4))
        ends = (each[:n].tolist() for each in (result.low, result.best, result.high))
        self.best.put(sizes[:n], [*zip(*ends, strict=True)])
        linear = torch.where(result.linear <= most, result.linear, math.nan)  # what lies higher leaves the picture
        self.linear.set_data(sizes, linear.tolist())
        self.root.set_data(sizes, result.root.tolist())
        failing = [at for at in range(n) if not result.linear_cost[at] <= 1 + batch_size_sweeps.MARGIN]
        self.fails.set_data([sizes[at] for at in failing], linear[failing].tolist())
        for words, place in zip(self.words, (left * 1.1, right / 1.1), strict=True):
            words.set_position((place, most * 3.6))

    def answer(self, result: batch_size_sweeps.Rates) -> float:
        return float(result.linear_holds)

    def headline(self, result: batch_size_sweeps.Rates) -> str:
        if result.progress < 1:
            return f"{result.measured} of {len(result.sizes)} batch sizes"
        return f"{result.optimizer}: linear holds up to {result.linear_holds}, square root up to {result.root_holds}"

    def describe(self, result: batch_size_sweeps.Rates) -> str:
        if result.progress < 1:
            return "The trainings are under way."
        base, last = int(result.sizes[0]), int(result.sizes[-1])
        costs = (f"{_cost(float(each[-1]))} by the {rule}" for each, rule in _rules(result))
        first, best = (three(float(result.best[at])) for at in (0, -1))
        return (
            f"Best learning rate {first} with a batch of {base}, {best} with {last}. “Holds”: at most "
            f"{percent(batch_size_sweeps.MARGIN)} more steps than the best, at every batch up to there. With {last}: "
            f"{' and '.join(costs)}. The learning rates tried stand √2 apart. One made problem."
        )


def _rules(result: batch_size_sweeps.Rates) -> tuple[tuple[torch.Tensor, str], ...]:
    return (result.linear_cost, "linear rule"), (result.root_cost, "square root")


def _cost(cost: float) -> str:
    return f"{percent(cost - 1)} more steps" if math.isfinite(cost) else "not there in twice the time"
