"""Pipeline: losses and scale_grads, batches that do not divide, a step in time, the bubble, the best M.

>>> import labkit
>>> labkit.labs.pipeline("bubble", ranks=3).values["ranks"]
3

The experiments run in processes of their own, which begin to load here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit import pipeline, workers
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.pipeline import Way, Weighed, indivisible_batches, stages, step
from labkit.pipeline.indivisible_batches import Outcome
from labkit.pipeline.panels.timing import Bubble, Cut, Timeline
from labkit.wording import percent, three, with_unit

LEAST = 2e-17  # an error of 0 is drawn here


class Losses(Experiment[Weighed]):
    """The weight that each microbatch got."""

    title = "What loss_fn returns, and scale_grads"
    question = "By how many per cent is the gradient wrong?"
    unit = "%"
    note = (
        "Measured: dots and crosses, fitted to the gradient that the real stages were left with. Modelled: bars, by "
        "algebra. Thin line: 1, the right weight. n: valid tokens. Each rank is a process of its own."
    )
    pictures = ("weights", "direction")
    run = staticmethod(pipeline.losses)
    shown = (stages.token_mean, stages.token_sum, stages.share_of_mean, stages.build, stages.step, stages.gradients)
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("weight × N (1 is right)", "microbatch", log="x", whole="y", moving="xy")
        canvas.frame(self.axes, x=(0.1, 100), y=(4.6, 0.4))
        self.one = canvas.line(self.axes, "reference")
        bar: dict[str, Any] = {"marker": "|", "markersize": 16, "markeredgewidth": 3, "linestyle": "none"}
        self.predicted = canvas.line(self.axes, "modelled", **bar)
        self.marks = [canvas.line(self.axes, role, linestyle="none", markersize=8) for role in ("right", "wrong")]
        self.words = [canvas.text(self.axes, va="center", ha="right") for _ in range(8)]

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        M = values["microbatches"]
        self._frame(canvas, 0.1, 100, M)
        canvas.hide(self.axes, 3, (M + 1) / 2)

    def draw(self, canvas: Canvas, result: Weighed) -> None:
        weights, M = result.weights.tolist(), len(result.weights)
        low, high = min(0.3, *weights), max(3.0, *weights)
        edge = high * (high / low) ** 0.9
        self._frame(canvas, low / 1.6, edge, M)
        self.one.set_data([1, 1], [0.4, M + 0.6])
        self.predicted.set_data(result.predicted.tolist(), range(1, M + 1))
        for marks, right in zip(self.marks, (True, False), strict=True):
            rows = [m for m in range(M) if (result.predicted[m] == 1) == right]
            marks.set_data([weights[m] for m in rows], [m + 1 for m in rows])
        for at, words in enumerate(self.words):
            words.set_text(f"{three(weights[at])}×, n = {int(result.counts[at])}" if at < M else "")
            words.set_position((edge, at + 1))

    def _frame(self, canvas: Canvas, low: float, high: float, M: int) -> None:
        canvas.frame(self.axes, x=(low, high), y=(M + 0.6, 0.4), yticks=[1, M])

    def answer(self, result: Weighed) -> float:
        return 0.0 if result.equal else 100 * result.relative_error

    def headline(self, result: Weighed) -> str:
        way = said(result.loss, result.scale_grads)
        return f"{way}: {'the full batch’s gradient' if result.equal else f'{percent(result.relative_error)} off'}"

    def describe(self, result: Weighed) -> str:
        weights = ", ".join(three(weight) for weight in result.weights.tolist())
        counts = ", ".join(f"{n:g}" for n in result.counts.tolist())
        return (
            f"loss_fn returns the {result.loss}, scale_grads is {result.scale_grads}. Valid tokens of the "
            f"microbatches: {counts}. Their fitted weights × N: {weights}. Relative error "
            f"{result.relative_error:.2g}, by algebra "
            f"{result.predicted_error:.2g}; norm ratio {three(result.norm_ratio)}, cosine {three(result.cosine)}. "
            f"Rounding explains {result.tolerance.value:.1g}."
        )


def said(loss: str, scale_grads: bool) -> str:
    """One way in words.

    >>> said("sum", True)
    'sum, scale_grads=True'
    """
    return f"{loss}, scale_grads={scale_grads}"


class Ways(Experiment[pipeline.Ways]):
    """Three losses, with scale_grads on and off."""

    title = "Six ways side by side"
    question = "How many of the six ways are right?"
    unit = "ways"
    note = (
        "Measured: dots and crosses, each a real pipeline step. Modelled: bars, by algebra. An exact 0 is at the edge."
    )
    run = staticmethod(pipeline.ways)
    shown = (*Losses.shown, pipeline.losses)
    aspect = 0.72

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("relative error of the gradient", "", log="x", moving="")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(1e-17, 1e5), y=(5.5, -1.3), xticks=[1, 1e-16])
        self.bound = canvas.line(self.axes, "reference")
        bar: dict[str, Any] = {"marker": "|", "markersize": 16, "markeredgewidth": 3, "linestyle": "none"}
        self.predicted = canvas.line(self.axes, "modelled", **bar)
        self.marks = [canvas.line(self.axes, role, linestyle="none", markersize=9) for role in ("right", "wrong")]
        self.words = [canvas.text(self.axes, va="center", ha="left") for _ in range(6)]
        self.explained = canvas.text(self.axes, "rounding explains up to here", va="center", ha="left")

    def draw(self, canvas: Canvas, result: pipeline.Ways) -> None:
        self.bound.set_data([result.bound] * 2, [-1.3, 5.5])
        self.explained.set_position((result.bound * 1.8, -1))
        wrong = [(way.predicted, at) for at, way in enumerate(result.ways) if way.predicted]
        self.predicted.set_data([error for error, _ in wrong], [at for _, at in wrong])
        for marks, right in zip(self.marks, (True, False), strict=True):
            rows = [at for at, way in enumerate(result.ways) if way.right == right]
            marks.set_data([max(result.ways[at].error, LEAST) for at in rows], rows)
        for at, (words, way) in enumerate(zip(self.words, result.ways, strict=True)):
            words.set_text(said(way.loss, way.scale_grads))
            words.set_position((result.bound * 1.8, at - 0.42))

    def answer(self, result: pipeline.Ways) -> float:
        return float(result.right)

    def headline(self, result: pipeline.Ways) -> str:
        right = [said(way.loss, way.scale_grads) for way in result.ways if way.right]
        return f"{len(right)} of 6 right: {'; '.join(right)}"

    def describe(self, result: pipeline.Ways) -> str:
        off = "; ".join(f"{said(way.loss, way.scale_grads)}: {_off(way)}" for way in result.ways)
        return f"Relative error of the whole gradient. {off}. Rounding explains {result.bound:.1g}."


def _off(way: Way) -> str:
    return f"{way.error:.1g}" if way.right else three(way.error)


class Indivisible(Experiment[Outcome]):
    """A batch that does not divide, and a tail."""

    title = "A batch that does not divide"
    question = "How many ignored rows does padding have to add?"
    unit = "rows"
    note = (
        "Measured: really run. A column is a microbatch, a filled square a row, a hollow one an ignored row, a cross a "
        "row that is missing beside the first microbatch. After the gap: the second batch, in the same schedule."
    )
    run = staticmethod(pipeline.indivisible)
    shown = (
        indivisible_batches.pieces,
        indivisible_batches.refuse,
        stages.rows_per_microbatch,
        stages.pad,
        step.run_pipeline,
        stages.gradients,
    )
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("microbatch", "rows", whole="xy", moving="xy")
        canvas.frame(self.axes, x=(0, 5), y=(0, 3))
        style: dict[str, Any] = {"linestyle": "none", "marker": "s", "markersize": 11}
        self.rows = canvas.line(self.axes, "right", **style)
        self.ignored = canvas.line(self.axes, "reference", fillstyle="none", **{**style, "colour": "muted"})
        self.missing = canvas.line(self.axes, "wrong", linestyle="none", markersize=10)

    def draw(self, canvas: Canvas, result: Outcome) -> None:
        M, first = result.microbatches, result.pieces[0]
        given, tallest = (result.rows, result.tail), max(result.pieces + result.later)
        end = M if not result.later else 2 * M + 1
        canvas.frame(self.axes, x=(0.4, end + 0.6), y=(0.3, tallest + 0.9))
        canvas.ticks(self.axes, x=sorted({1, M, end}), y=sorted({1, tallest}))
        places: dict[str, list[tuple[int, int]]] = {"rows": [], "ignored": [], "missing": []}
        for at, pieces in enumerate((result.pieces, result.later)):
            for m, size in enumerate(pieces):
                column, before = m + 1 + at * (M + 1), sum(pieces[:m])
                for row in range(max(size, first)):
                    kind = "missing" if row >= size else "rows" if before + row < given[at] else "ignored"
                    places[kind].append((column, row + 1))
        for kind, marks in (("rows", self.rows), ("ignored", self.ignored), ("missing", self.missing)):
            marks.set_data(*(zip(*places[kind], strict=True) if places[kind] else ([], [])))
            marks.set_markersize(11 if tallest <= 8 else 6)

    def answer(self, result: Outcome) -> float:
        return float(result.ignored)

    def headline(self, result: Outcome) -> str:
        if result.said:
            return "The library stopped"
        if result.padded and result.ignored:
            return f"{_ignored(result)} added: the full batch’s gradient"
        return "All microbatches alike: the full batch’s gradient"

    def describe(self, result: Outcome) -> str:
        rows, M = with_unit(sum(result.pieces), "rows"), with_unit(result.microbatches, "microbatches")
        cut = f"{rows} in {M}: {_listed(result.pieces)}."
        then = f" Then {with_unit(sum(result.later), 'rows')}: {_listed(result.later)}." if result.later else ""
        if result.said:
            needed = f"Padding adds {_ignored(result)}." if result.ignored else ""
            return f"{cut}{then} What stopped it: {result.said.rstrip('.')}. {needed}".strip()
        errors = " and ".join(f"{error:.1g}" for error in result.errors)
        added = f" Of them {_ignored(result)}." if result.padded else ""
        return f"{cut}{then}{added} Relative error {errors}, rounding explains {result.tolerance.value:.1g}."


def _ignored(result: Outcome) -> str:
    return with_unit(result.ignored, "ignored rows")


def _listed(pieces: tuple[int, ...]) -> str:
    return ", ".join(map(str, pieces))


prepare = workers.warm  # the ranks load torch while the learner reads
EXPERIMENTS = (Losses, Ways, Indivisible, Timeline, Bubble, Cut)
