"""BatchNorm and randomness: what a microbatch sees, what helps, running statistics, masks.

>>> import labkit
>>> labkit.labs.normalization("running", momentum=0.2).values["momentum"]
0.2
"""

from __future__ import annotations

import math

import numpy as np

from labkit import normalization
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.images import SIZE
from labkit.normalization.panels.randomness import Randomness, Targets
from labkit.normalization.panels.running_statistics import GroupVariance, Padding, Running
from labkit.normalization.panels.sync_batchnorm import Ranks, interval, share
from labkit.normalization.sync_batchnorm import accumulated, in_lockstep, one_batch
from labkit.wording import percent, three

LOWEST = 1e-17


class Statistics(Experiment[normalization.Statistics]):
    """The images of every microbatch, and the statistics that its BatchNorm sees."""

    title = "What a microbatch sees"
    question = "How far is the gradient from the one batch's?"
    unit = "%"
    note = (
        "Measured. A row is a microbatch. Beside it: mean and standard deviation of the channel that differs most, "
        "at the first normalisation. Thin line: the same for one batch. Every loss is weighted perfectly."
    )
    pictures = ("statistics", "direction", "entries")
    run = staticmethod(normalization.statistics)
    shown = (accumulated, one_batch)
    aspect = 0.4

    def layout(self, canvas: Canvas) -> None:
        grid = canvas.figure.add_gridspec(1, 2, width_ratios=(5, 3), wspace=0.12)
        self.axes = canvas.axes("", "microbatch", position=grid[0], whole="y", moving="xy")
        self.axes.xaxis.set_visible(False)
        self.sheet = self.axes.imshow(np.full((1, 1), np.nan), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        canvas.move(self.sheet)
        self.axes.set_aspect("auto")
        self.side = canvas.axes("activation", "", position=grid[1], moving="xy")
        self.side.yaxis.set_visible(False)
        canvas.frame(self.side, x=(0, 1), y=(4, 0))
        canvas.frame(self.axes, x=(0, 8), y=(4, 0))
        self.whole = [canvas.line(self.side, "reference", linestyle=style) for style in (":", "-", ":")]
        self.right, self.wrong = (canvas.spread(self.side, role, linestyle="none") for role in ("right", "wrong"))

    def draw(self, canvas: Canvas, result: normalization.Statistics) -> None:
        rows, columns = self._sheet(result)
        box = self.axes.get_position()
        shape = box.width * canvas.page.width / (box.height * canvas.height)
        high = max(rows, columns / shape)
        canvas.frame(self.axes, x=(0, high * shape), y=(high, 0), yticks=[rows, 0])
        canvas.frame(self.side, y=(high, 0))
        channel = int((result.means - result.mean).abs().amax(0).argmax())
        means, deviations = result.means[:, channel], result.variances[:, channel].sqrt()
        mean, deviation = float(result.mean[channel]), float(result.variance[channel].sqrt())
        ranges = [interval(float(m), float(s)) for m, s in zip(means, deviations, strict=True)]
        places = [at + 0.5 for at in range(rows)]
        self.right.lay(places if result.equal else [], ranges if result.equal else [])
        self.wrong.lay([] if result.equal else places, [] if result.equal else ranges)
        for line, place in zip(self.whole, (mean - deviation, mean, mean + deviation), strict=True):
            line.set_data([place, place], [0, rows])
        low = min(mean - deviation, *(low for low, _, _ in ranges))
        top = max(mean + deviation, *(high for _, _, high in ranges))
        pad = 0.1 * (top - low)
        canvas.frame(self.side, x=(low - pad, top + pad))

    def _sheet(self, result: normalization.Statistics) -> tuple[int, int]:
        """Show the images, a row for each microbatch; how many rows and columns there are."""
        sizes = result.microbatch.bincount().tolist()
        rows, columns, cell = len(sizes), max(sizes), SIZE + 2
        sheet = np.full((rows * cell, columns * cell), np.nan)
        for row, size in enumerate(sizes):
            for column, image in enumerate(result.images[result.microbatch == row][:size].numpy()):
                y, x = row * cell + 1, column * cell + 1
                sheet[y : y + SIZE, x : x + SIZE] = image
        self.sheet.set_data(np.ma.masked_invalid(sheet))
        self.sheet.set_extent((0, columns, rows, 0))
        return rows, columns

    def answer(self, result: normalization.Statistics) -> float:
        return 0.0 if result.equal else 100 * result.gradient.relative_error

    def headline(self, result: normalization.Statistics) -> str:
        name = {"batch": "BatchNorm", "group": "GroupNorm", "layer": "LayerNorm", "frozen": "Frozen BatchNorm"}
        error = result.gradient.relative_error
        if result.equal:
            return f"{name[result.norm]}: the gradient of one batch, within rounding ({error:.1g} off)"
        return f"{name[result.norm]}: the gradient is {percent(error)} off the one batch's"

    def describe(self, result: normalization.Statistics) -> str:
        K = int(result.microbatch[-1]) + 1
        kept = ""
        if not math.isnan(result.running_mean):
            kept = (
                f" Running means end {percent(result.running_mean)} off, running variances "
                f"{percent(result.running_variance)}."
            )
        used = "" if result.norm == "batch" else " This normalisation does not use the statistics drawn here."
        return (
            f"{len(result.labels)} images, {result.composition}, in {K} microbatch{'es' if K > 1 else ''}. "
            f"Outputs {share(result.outputs)} off, loss {three(result.loss)} against {three(result.right_loss)}, "
            f"gradient {share(result.gradient.relative_error)} off; rounding explains {result.tolerance.value:.1g}."
            f"{kept}{used}"
        )


class Remedies(Experiment[normalization.Remedies]):
    """What helps, and what it costs."""

    title = "What helps"
    question = "Batch statistics held constant: how far off is the gradient?"
    unit = "%"
    note = "Measured, each against the same network in one physical batch. Bar: what rounding alone explains."
    pictures = ("errors", "direction", "entries")
    run = staticmethod(normalization.remedies)
    shown = (in_lockstep,)
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("relative error of the gradient", "", log="x", moving="")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(LOWEST / 10, 100), y=(5.6, -0.9), xticks=[1, 1e-16])
        self.bars = [canvas.line(self.axes, "modelled", linewidth=6, alpha=0.35) for _ in range(6)]
        self.right = canvas.line(self.axes, "right", linestyle="none", markersize=10)
        self.wrong = canvas.line(self.axes, "wrong", linestyle="none", markersize=10)
        for at, name in enumerate(normalization.COSTS):
            canvas.label(self.axes, 0.01, 1 - (at + 0.68) / 6.5, name, va="bottom", ha="left")

    def draw(self, canvas: Canvas, result: normalization.Remedies) -> None:
        for dots, equal in ((self.right, True), (self.wrong, False)):
            mine = [(max(row.relative_error, LOWEST), at) for at, row in enumerate(result.rows) if row.equal == equal]
            dots.set_data([x for x, _ in mine], [y for _, y in mine])
        for at, row in enumerate(result.rows):
            self.bars[at].set_data([LOWEST, row.tolerance], [at, at])

    def answer(self, result: normalization.Remedies) -> float:
        return 100 * result.rows[1].relative_error

    def headline(self, result: normalization.Remedies) -> str:
        return f"{sum(row.equal for row in result.rows)} of {len(result.rows)} give the one batch's gradient"

    def describe(self, result: normalization.Remedies) -> str:
        words = [f"{row.name} {share(row.relative_error)}" for row in result.rows]
        return f"How far off: {', '.join(words)}. What each of them costs stands in the numbers below."


EXPERIMENTS = (
    Statistics,
    Remedies,
    Running,
    GroupVariance,
    Ranks,
    Padding,
    Randomness,
    Targets,
)
