"""What a counter says of a training: modelled."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FuncFormatter

from labkit import batch
from labkit.batch import Plan
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment, tables


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
