"""Throughput: steps by the size of a microbatch, what is faster about them, whether it can be told, a data loader.

>>> import labkit
>>> labkit.labs.throughput("decision", runs=9).values["runs"]
9
"""

from __future__ import annotations

from labkit import throughput
from labkit.device import Spread
from labkit.frame.canvas import Canvas, quartiles
from labkit.frame.experiment import Experiment
from labkit.throughput import timing
from labkit.throughput.panels.compared import Decision, Tokens
from labkit.throughput.panels.loader import Loader
from labkit.wording import percent, three, whole

MS = 1e3


class Sweep(Experiment[throughput.Sweep]):
    """A step of one global batch, against the size of its microbatches."""

    title = "The size of a microbatch"
    question = "At b = 1: what per cent of the step is launch overhead, K · a?"
    unit = "%"
    note = (
        "Dots: measured, median and quartiles, from before zero_grad to after optimizer.step. Line: the model "
        "K · (a + c · b) + optimizer, fitted. Thin line: its part K · a."
    )
    run = staticmethod(throughput.sweep)
    shown = (timing.step, timing.interleave, throughput.fitted)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("b, sequences in a microbatch", "time of a step (ms)", log="y", log2="x", moving="xy")
        canvas.frame(self.axes, x=(0.75, 90), y=(1, 200))
        self.line = canvas.line(self.axes, "modelled")
        self.launches = canvas.line(self.axes, "reference")
        self.measured = canvas.spread(self.axes)
        self.words = canvas.text(self.axes, ha="right", va="top")

    def draw(self, canvas: Canvas, result: throughput.Sweep) -> None:
        b = [row.microbatch for row in result.rows]
        steps = [quartiles(row.steps, MS) for row in result.rows]
        known = result.launch > 0
        lines = [(result.modelled(size) * MS, result.modelled(size) * result.overhead(size) * MS) for size in b * known]
        spots = [lines[min(2, len(lines) - 1)][1]] if lines else []
        bottom = min([*(low for low, _, _ in steps), *spots]) / 3
        top = 2 * max(high for _, _, high in steps)
        canvas.frame(self.axes, x=(0.75, 1.4 * result.sequences), y=(bottom, top))
        self.measured.put(b, steps)
        self.line.set_data(b * known, [whole for whole, _ in lines])
        self.launches.set_data(b * known, [launches for _, launches in lines])
        self.words.set_text("K · a" if known else "")
        if known:
            self.words.set_position((b[min(2, len(b) - 1)] / 1.1, spots[0] / 1.1))

    def answer(self, result: throughput.Sweep) -> float:
        return 100 * result.overhead(1)

    def headline(self, result: throughput.Sweep) -> str:
        if result.progress < 1:
            return f"{len(result.rows)} sizes seen, {percent(result.progress)} of the steps done"
        first, last = result.rows[0], result.rows[-1]
        return f"b = {last.microbatch}: {three(last.tokens / first.tokens)} times the valid tokens/s of b = 1"

    def describe(self, result: throughput.Sweep) -> str:
        if result.progress < 1:
            return "The steps are being timed, all sizes in turn."
        rows = result.rows[0], result.rows[-1]
        step = " and ".join(ms(row.steps) for row in rows)
        tokens, sequences = (" and ".join(map(whole, both)) for both in zip(*map(_rates, rows), strict=True))
        return (
            f"{result.device}. A step of {result.sequences} sequences takes {step} with b = 1 and "
            f"b = {rows[1].microbatch}: {tokens} valid tokens/s, {sequences} sequences/s. Median and quartiles of "
            f"{rows[0].steps.count}. The fit: a = {three(MS * result.launch)} ms a microbatch, "
            f"c = {three(MS * result.per_sequence)} ms a sequence, optimizer {three(MS * result.optimizer)} ms; no dot "
            f"is more than {percent(round(result.residual, 6))} off. At b = 1 the part K · a is "
            f"{percent(result.overhead(1))}."
        )


def _rates(row: throughput.Row) -> tuple[float, float]:
    return row.tokens, row.sequences


def ms(times: Spread) -> str:
    """A time with its quartiles.

    >>> ms(Spread.of([0.01, 0.02, 0.03]))
    '20 ms (15 … 25)'
    """
    low, middle, high = (three(MS * each) for each in (times.lower, times.median, times.upper))
    return f"{middle} ms ({low} … {high})"


class Pair(Experiment[throughput.Pair]):
    """A microbatch that is faster, and a step that is not."""

    title = "A fast microbatch, a slow step"
    question = "The step of large microbatches: how many times the time of the other?"
    unit = "times"
    note = "Measured, median and quartiles. Dots: the small microbatch. Squares: the large one. One global batch."
    run = staticmethod(throughput.pair)
    shown = (timing.step, timing.interleave)
    aspect = 0.42

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("time (ms)", "", log="x", moving="x")
        self.axes.set_yticks([1, 0], labels=["micro-\nbatch", "step"])
        self.axes.tick_params(axis="y", length=0)
        canvas.frame(self.axes, x=(0.3, 300), y=(-0.6, 1.6))
        self.dots = [canvas.spread(self.axes, marker=mark, markersize=9) for mark in ("o", "s")]
        self.words = [[canvas.text(self.axes, ha="center", va=va) for _ in range(2)] for va in ("bottom", "top")]

    def draw(self, canvas: Canvas, result: throughput.Pair) -> None:
        times = [[quartiles(each, MS) for each in (row.microbatches, row.steps)] for row in result.rows]
        ends = [end for each in times for interval in each for end in interval] or [1.0, 100.0]
        low, high = min(ends) / 4, max(ends) * 4
        canvas.frame(self.axes, x=(low, high))
        for at, dots in enumerate(self.dots):
            mine = times[at] if times else []
            heights = [1.12 - 0.24 * at, 0.12 - 0.24 * at]
            dots.lay(heights[: len(mine)], mine)
            for words in self.words[at]:
                words.set_text("")
            for words, height, (_, middle, _) in zip(self.words[at], heights, mine, strict=False):
                said = f"b = {result.rows[at].microbatch}: {three(middle)}"
                words.set(text=said, position=(middle, height + 0.12 - 0.24 * at))

    def answer(self, result: throughput.Pair) -> float:
        return result.step_ratio

    def headline(self, result: throughput.Pair) -> str:
        if not result.rows:
            return "Measuring"
        micro, step = three(result.microbatch_ratio), three(result.step_ratio)
        return f"The large microbatch takes {micro} times as long, its step {step} times"

    def describe(self, result: throughput.Pair) -> str:
        if result.progress < 1:
            return "The steps are being timed, both settings in turn."
        said = (
            f"b = {row.microbatch}: a microbatch takes {ms(row.microbatches)}, and a step of "
            f"K = {row.accumulation_steps} of them {ms(row.steps)}, {whole(row.tokens)} valid tokens/s"
            for row in result.rows
        )
        return f"{'. '.join(said)}. Median and quartiles of {result.rows[0].steps.count} steps, in turn."


EXPERIMENTS = (Sweep, Pair, Tokens, Decision, Loader)
