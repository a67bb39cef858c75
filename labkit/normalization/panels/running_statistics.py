"""What a BatchNorm keeps and what it is given: running statistics, the variance of small groups, padding."""

from __future__ import annotations

import torch

from labkit.frame.canvas import Canvas, polyline
from labkit.frame.experiment import Experiment
from labkit.normalization import running_statistics
from labkit.wording import percent, three


class Running(Experiment[running_statistics.Running]):
    """The running mean, updated once and K times an optimizer step."""

    title = "Running statistics"
    question = "How much of the running mean does one optimizer step replace?"
    unit = "%"
    note = (
        "Dots and crosses: measured, a torch BatchNorm that starts at 0 on data of mean 3. Lines: the formula. Each "
        "statistic moves once for every forward pass, whatever the optimizer does."
    )
    run = staticmethod(running_statistics.running)
    shown = (running_statistics.effective_momentum, running_statistics.kept)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer steps", "running mean", whole="x", moving="xy")
        canvas.frame(self.axes, x=(0, 20), y=(0, 4))
        self.lines = [canvas.line(self.axes, role, marker="", linewidth=2) for role in ("right", "wrong")]
        self.dots = [canvas.line(self.axes, role, linestyle="none", markersize=6) for role in ("right", "wrong")]
        self.words = [canvas.text(self.axes, va="center", ha="left") for _ in range(2)]

    def draw(self, canvas: Canvas, result: running_statistics.Running) -> None:
        updates, U = result.updates.tolist(), int(result.updates[-1])
        runs, formulas = (result.right, result.wrong), (result.right_formula, result.wrong_formula)
        top = 1.08 * max(3.0, *(float(each.max()) for each in (*runs, *formulas)))
        room = 7 / canvas.columns  # the share of the axes that the words take
        canvas.frame(self.axes, x=(0, U / (1 - room)), y=(0, top), xticks=[0, U], yticks=[3])
        every = max(1, U // 20)
        for at, (measured, formula) in enumerate(zip(runs, formulas, strict=True)):
            self.lines[at].set_data(updates, formula.tolist())
            self.dots[at].set_data(updates[::every], measured[::every].tolist())
        ends = [float(each[-1]) for each in runs]
        apart = max(0.0, 0.09 * top - abs(ends[1] - ends[0])) / 2 * (1 if ends[1] >= ends[0] else -1)
        lift = max(0.0, 0.04 * top + abs(apart) - min(ends))
        ends = [end + lift for end in ends]
        for at, (word, end, shift) in enumerate((("one batch", ends[0], -apart), ("K microbatches", ends[1], apart))):
            self.words[at].set(text=word, position=(U + 0.03 * U / (1 - room), min(top * 0.96, end + shift)))

    def answer(self, result: running_statistics.Running) -> float:
        return 100 * result.measured_momentum

    def headline(self, result: running_statistics.Running) -> str:
        return f"Momentum {three(result.momentum)} acts as {three(result.measured_momentum)}"

    def describe(self, result: running_statistics.Running) -> str:
        off = max(
            float((run - formula).norm() / formula.norm())
            for run, formula in ((result.right, result.right_formula), (result.wrong, result.wrong_formula))
        )
        return (
            f"One step replaces {percent(result.measured_momentum)} of the running mean; 1 − (1 − m)^K is "
            f"{percent(result.effective_momentum)}. After {int(result.updates[-1])} steps the running mean is "
            f"{three(float(result.wrong[-1]))} with K microbatches and {three(float(result.right[-1]))} with one "
            f"batch, the running variance {three(result.wrong_variance)} and {three(result.right_variance)}. Run and "
            f"formula differ by {off:.1g}, rounding explains {result.tolerance.value:.1g}."
        )


class GroupVariance(Experiment[running_statistics.GroupVariance]):
    """The variance of a microbatch, by its size."""

    title = "Small groups vary less"
    question = "Microbatches of 2: what share of the whole variance do they show?"
    unit = "%"
    note = (
        "Measured over random partitions of one value an image, its mean brightness; bars: twice the standard error. "
        "Squares divide by b − 1, dots by b; line: (b − 1)/b. Crosses: cut from the images sorted by class, which no "
        "formula of b alone gives."
    )
    run = staticmethod(running_statistics.group_variance)
    shown = (running_statistics.variances,)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("images in a microbatch, b", "variance / S² (%)", log2="x", moving="xy")
        canvas.frame(self.axes, x=(1.7, 80), y=(0, 120), yticks=[100])
        self.line = canvas.line(self.axes, "modelled")
        self.whole = canvas.line(self.axes, "reference")
        self.biased = canvas.spread(self.axes)
        self.unbiased = canvas.line(self.axes, "right", linestyle="none", marker="s", fillstyle="none")
        self.sorted = canvas.line(self.axes, "wrong", linestyle=":")
        words = ("□ running", "● normalising", "× sorted")
        for at, word in enumerate(words):
            canvas.label(self.axes, 0.68, 0.95 - 0.1 * at, word, ha="left", va="center")

    def draw(self, canvas: Canvas, result: running_statistics.GroupVariance) -> None:
        sizes, S2 = result.sizes.tolist(), result.whole
        biased, unbiased, by_class, line = (
            (100 * each / S2).tolist() for each in (result.biased, result.unbiased, result.sorted, result.predicted)
        )
        errors = (200 * result.biased_error / S2).tolist()
        top = 1.1 * max(*unbiased, *biased, 100)
        canvas.frame(self.axes, x=(1.7, sizes[-1] ** 1.5), y=(0, top), xticks=[2, sizes[-1]], yticks=[100])
        self.line.set_data(sizes, line)
        self.whole.set_data([1.7, sizes[-1]], [100, 100])
        self.biased.put(sizes, [(share - e, share, share + e) for share, e in zip(biased, errors, strict=True)])
        self.unbiased.set_data(sizes, unbiased)
        self.sorted.set_data(sizes, by_class)

    def answer(self, result: running_statistics.GroupVariance) -> float:
        return 100 * float(result.biased[0]) / result.whole

    def headline(self, result: running_statistics.GroupVariance) -> str:
        return f"Microbatches of 2 show {percent(float(result.biased[0]) / result.whole)} of the whole variance"

    def describe(self, result: running_statistics.GroupVariance) -> str:
        rows = [
            f"b = {b}: {percent(float(found) / result.whole)}, formula {percent(float(line) / result.whole)}, "
            f"sorted {percent(float(cut) / result.whole)}"
            for b, found, line, cut in zip(
                result.sizes.tolist(), result.biased, result.predicted, result.sorted, strict=True
            )
        ]
        kept = percent(float(result.unbiased[0]) / result.whole)
        return (
            "Share of S², the variance of all images, in the variance that normalises. "
            f"{'; '.join(rows)}. The running one at b = 2: {kept}."
        )


class Padding(Experiment[running_statistics.Padding]):
    """The padding of each microbatch, and the mean that counts it."""

    title = "Padding is regrouped too"
    question = "In microbatches: what share of all places is padding?"
    unit = "%"
    note = (
        "Made lengths and values. Solid: tokens. Dashed: padding, to the longest of the microbatch. Number: its mean "
        "where the padding counts as zeros."
    )
    run = staticmethod(running_statistics.padding)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("position in the sequence", "sequence", whole="xy", moving="y")
        canvas.frame(self.axes, x=(0, 40), y=(16, 0), xticks=[0, 32], yticks=[0, 16])
        self.tokens = canvas.line(self.axes, "right", marker="", solid_capstyle="butt")
        self.padding = canvas.line(self.axes, "wrong", marker="", linestyle=(0, (0.6, 0.4)))
        self.cuts = canvas.line(self.axes, "reference", colour="muted")
        self.words = [canvas.text(self.axes, va="center", ha="left", size=0.9) for _ in range(16)]

    def draw(self, canvas: Canvas, result: running_statistics.Padding) -> None:
        B, K = len(result.lengths), len(result.share)
        longest = [int(result.lengths[result.microbatch == m].max()) for m in range(K)]
        rows = [
            (at + 0.5, int(n), longest[int(m)])
            for at, (n, m) in enumerate(zip(result.lengths, result.microbatch, strict=True))
        ]
        canvas.frame(self.axes, y=(B, 0), yticks=[0, B])
        for line, first, last in ((self.tokens, 0, 1), (self.padding, 1, 2)):
            ends = [(0, n, end) for _, n, end in rows]
            line.set_linewidth(0.55 * canvas.height / (B + 8) / 1.4)
            line.set_data(*polyline([(x[first], y), (x[last], y)] for x, (y, _, _) in zip(ends, rows, strict=True)))
        starts = torch.nn.functional.pad(result.microbatch.bincount().cumsum(0), (1, 0)).tolist()
        self.cuts.set_data(*polyline([(0, start), (32, start)] for start in starts))
        for m, words in enumerate(self.words):
            words.set_text(f"mean {float(result.means[m]):.2f}" if m < K else "")
            words.set_position((32.5, (starts[m] + starts[m + 1]) / 2 if m < K else 0))

    def answer(self, result: running_statistics.Padding) -> float:
        return 100 * result.total_share

    def headline(self, result: running_statistics.Padding) -> str:
        return f"{percent(result.one_batch_share)} padding in one batch, {percent(result.total_share)} in microbatches"

    def describe(self, result: running_statistics.Padding) -> str:
        means = ", ".join(f"{float(mean):.2f}" for mean in result.means)
        return (
            f"The tokens have the mean {result.true_mean:.2f}. A normalisation that counts padding sees "
            f"{result.one_batch_mean:.2f} in one batch, and {means} in the microbatches. A mask makes it see tokens."
        )
