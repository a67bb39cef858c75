"""A rank is killed while the others wait for it."""

from __future__ import annotations

from labkit.data_parallel import killed_rank
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.wording import three


class Killed(Experiment[killed_rank.Killed]):
    """A rank is killed while the others wait for it."""

    title = "A rank is killed"
    question = "How long until the notebook knows?"
    unit = "s"
    note = "Measured: a real SIGKILL, while the others wait in a collective. Then the same ranks are asked for again."
    run = staticmethod(killed_rank.killed)
    shown = (killed_rank.run_doomed,)
    aspect = 0.3

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("time (s)", "", moving="x")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 1), y=(-0.6, 1.2))
        self.bars = [canvas.bar(self.axes, role) for role in ("wrong", "right")]
        self.words = canvas.text(self.axes, ha="left", va="center")

    def draw(self, canvas: Canvas, result: killed_rank.Killed) -> None:
        end = result.noticed + result.again
        canvas.frame(self.axes, x=(0, 1.05 * end), xticks=[result.noticed])
        self.bars[0].set_data([0, result.noticed], [0, 0])
        self.bars[1].set_data([result.noticed, end], [0, 0])
        said = f"{three(result.noticed)} s to the sentence, {three(result.again)} s to new ranks"
        self.words.set(text=said, position=(0.01 * end, 0.75))

    def answer(self, result: killed_rank.Killed) -> float:
        return result.noticed

    def headline(self, result: killed_rank.Killed) -> str:
        return f"Known after {three(result.noticed)} s, and the next run works"

    def describe(self, result: killed_rank.Killed) -> str:
        answers = ", ".join(map(three, result.answers))
        return (
            f"The notebook was told: “{result.said}”. That took {three(result.noticed)} s. New ranks answered "
            f"{three(result.again)} s later, each with the sum of 1 over all of them: {answers}."
        )
