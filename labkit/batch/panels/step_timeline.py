"""One optimizer step in time, and what a counter says about a training: modelled, both."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FuncFormatter

from labkit import batch
from labkit.batch import Plan, step_timeline
from labkit.frame.canvas import Canvas, polyline
from labkit.frame.experiment import Experiment, tables
from labkit.wording import percent, three


class Timeline(Experiment[step_timeline.Timeline]):
    """Where the time of one optimizer step goes."""

    title = "One optimizer step in time"
    question = "What share of the step waits for the synchronisation?"
    unit = "%"
    note = (
        "Modelled: five times are added up, nothing is measured. In the row sync, thick: the step waits; thin: a "
        "backward pass hides it. Reading data and pipeline bubbles are left out."
    )
    run = staticmethod(batch.timeline)
    aspect = 0.42

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("time (ms)", "", moving="x")
        self.axes.set_yticks([3, 2, 1, 0], labels=["forward", "backward", "sync", "update"])
        self.axes.tick_params(axis="y", length=0)
        canvas.frame(self.axes, x=(0, 1000), y=(-0.6, 3.6))
        self.end = canvas.line(self.axes, "reference", colour="muted", linestyle=":")
        self.hidden = canvas.line(self.axes, "reference", colour="muted", linewidth=2.5, solid_capstyle="butt")
        roles = {"forward": "modelled", "backward": "modelled", "synchronise": "wrong", "update": "text"}
        self.bars = {name: canvas.bar(self.axes, role, linestyle="-") for name, role in roles.items()}
        self.words = [canvas.text(self.axes, ha="left", va="center") for _ in roles]

    def draw(self, canvas: Canvas, result: step_timeline.Timeline) -> None:
        total = result.total
        canvas.frame(self.axes, x=(0, 1.22 * total), xticks=[0, total])
        self.end.set_data([total, total], [-0.6, 3.6])
        for at, (name, bar) in enumerate(self.bars.items()):
            bar.set_data(*_stretches([(p.start, p.end) for p in waits(result) if p.name == name], 3 - at))
        self.hidden.set_data(*_stretches([(p.start, p.end) for p in result.parts if p.name == "synchronise"], 1))
        spent = (result.forward, result.backward, result.waiting, result.optimizer)
        for at, (words, time) in enumerate(zip(self.words, spent, strict=True)):
            words.set(position=(1.02 * total, 3 - at), text=percent(time / total))

    def answer(self, result: step_timeline.Timeline) -> float:
        return 100 * result.waiting / result.total

    def headline(self, result: step_timeline.Timeline) -> str:
        return f"{percent(result.waiting / result.total)} of {three(result.total)} ms wait for the synchronisation"

    def describe(self, result: step_timeline.Timeline) -> str:
        K, synchronised = (sum(part.name == name for part in result.parts) for name in ("forward", "synchronise"))
        hidden = f", {three(result.hidden)} ms more are hidden beside a backward pass" if result.hidden else ""
        often = "once" if synchronised == 1 else f"{synchronised} times"
        apart = f" The same {K} microbatches as {K} optimizer steps: {three(result.unaccumulated)} ms." if K > 1 else ""
        return (
            f"K = {K}: forward {three(result.forward)} ms, backward {three(result.backward)} ms; synchronised {often}, "
            f"waiting {three(result.waiting)} ms{hidden}; update {three(result.optimizer)} ms; together "
            f"{three(result.total)} ms.{apart}"
        )


def waits(result: step_timeline.Timeline) -> list[step_timeline.Part]:
    """The parts of a step, a synchronisation only from where no backward pass hides it."""
    parts = list(result.parts)
    for at, part in enumerate(parts):
        if part.name == "synchronise":
            parts[at] = step_timeline.Part(part.name, result.parts[at - 1].end, part.end)
    return parts


def _stretches(spans: list[tuple[float, float]], height: float) -> tuple[list[float], list[float]]:
    """Points of a line with gaps between the stretches."""
    return polyline([(low, height), (high, height)] for low, high in spans)


class Progress(Experiment[batch.Progress]):
    """The same number on a screen, read in two ways."""

    title = "How far is the training?"
    question = "Valid tokens at this optimizer step, in trillions?"
    unit = "trillion tokens"
    note = (
        "Modelled: counted, nothing runs. Bar: valid tokens. Line: token positions, padding included. Striped: the "
        "same number, if it counts dataloader iterations."
    )
    run = staticmethod(batch.progress)
    shown = (Plan, batch.plan)
    aspect = 0.4

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("tokens", "", moving="x")
        self.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: large(value)))
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 1), y=(-0.5, 2.2))
        self.positions = [canvas.line(self.axes, "reference", solid_capstyle="butt") for _ in range(2)]
        self.bars = [canvas.bar(self.axes, role) for role in ("right", "wrong")]
        self.words = [canvas.text(self.axes, ha="left", va="bottom") for _ in range(2)]

    def draw(self, canvas: Canvas, result: batch.Progress) -> None:
        most = result.right.positions
        canvas.frame(self.axes, x=(0, 1.12 * most))
        canvas.ticks(self.axes, x=[0, most / 2, most])  # long numbers
        for at, reading in enumerate((result.right, result.wrong)):
            height = 1.2 * (1 - at)
            self.bars[at].set_data([0, reading.valid], [height, height])
            self.positions[at].set_data([reading.valid, reading.positions], [height, height])
            between = "\n" if canvas.page.width < 30 * canvas.page.font else " "
            said = f"{result.counter:,} {reading.counted}:{between}{large(reading.valid)} valid tokens"
            self.words[at].set(position=(most / 100, height + 0.3), text=said)

    def tables(self, result: batch.Progress) -> list[dict[str, Any]]:
        both = [tables(each)[0]["rows"] for each in (result.right, result.wrong)]
        rows = [[right[0], right[1], wrong[1], *right[2:]] for right, wrong in zip(*both, strict=True)]
        columns = ["", f"if {result.counter:,} counts steps", "if it counts iterations", "unit", "meaning"]
        return [{"columns": columns, "rows": rows}]

    def answer(self, result: batch.Progress) -> float:
        return result.right.valid / 1e12

    def headline(self, result: batch.Progress) -> str:
        return (
            f"Step {result.counter:,} at {result.tokens_per_update:,} tokens: {large(result.right.valid)} valid tokens"
        )

    def describe(self, result: batch.Progress) -> str:
        right, wrong = result.right, result.wrong
        return (
            f"Optimizer step {result.counter:,} of a plan {result.plan}: {right.samples:,} sequences, "
            f"{large(right.positions)} token positions, {large(right.valid)} of them valid; every replica took "
            f"{right.iterations:,} microbatches from its dataloader. If {result.counter:,} counts those iterations, it "
            f"is only {wrong.steps:,} optimizer steps and {large(wrong.valid)} valid tokens."
        )


def large(count: float) -> str:
    """A number of tokens as it is said, from a billion on to a hundredth.

    >>> large(699_786_067_968), large(32_768)
    ('0.70 trillion', '32,768')
    """
    if count < 1e9:
        return f"{count:,.0f}"
    return f"{count / 1e9:.2f} billion" if count < 1e11 else f"{count / 1e12:,.2f} trillion"
