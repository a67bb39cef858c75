"""One rank skips a step, the others do not."""

from __future__ import annotations

from labkit.data_parallel import overflow_on_one_rank
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.wording import percent, three


class Overflow(Experiment[overflow_on_one_rank.Drift]):
    """One rank skips a step, the others do not."""

    title = "An overflow on one rank"
    question = "After the last step: how far apart are the replicas?"
    unit = "% of the way"
    note = (
        "Measured in real DDP, float64. The overflow is an inf in one rank's copy of the averaged gradient. Distance: "
        "between the replicas, of the way that one has gone by then."
    )
    run = staticmethod(overflow_on_one_rank.overflow)
    shown = (
        overflow_on_one_rank.finite,
        overflow_on_one_rank.any_overflow,
        overflow_on_one_rank.spoil,
        overflow_on_one_rank.scaled_step,
        overflow_on_one_rank.run_training,
    )
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer step", "distance (% of the way)", whole="x", moving="xy")
        canvas.frame(self.axes, x=(0, 13), y=(-5, 100))
        self.when = canvas.line(self.axes, "reference")
        self.lines = {True: canvas.line(self.axes, "right"), False: canvas.line(self.axes, "wrong")}
        self.words = canvas.text(self.axes, "overflow", va="top")

    def draw(self, canvas: Canvas, result: overflow_on_one_rank.Drift) -> None:
        distance = result.distance.tolist()
        last, top = len(distance), max(1.0, *distance)
        canvas.frame(self.axes, x=(0, last + 1), y=(-0.05 * top, 1.25 * top), xticks=[1, last])
        self.when.set_data([result.overflow_at] * 2, [-0.05 * top, 1.25 * top])
        early = result.overflow_at < last / 2
        place = result.overflow_at + (0.01 if early else -0.01) * last
        self.words.set(x=place, y=1.23 * top, ha="left" if early else "right")
        for right_, line in self.lines.items():
            shown = right_ == (result.last == 0)
            line.set_data(range(1, last + 1) if shown else [], distance if shown else [])

    def answer(self, result: overflow_on_one_rank.Drift) -> float:
        return result.last

    def headline(self, result: overflow_on_one_rank.Drift) -> str:
        if result.agree:
            return "All ranks skip the step together: the replicas stay equal"
        return f"One rank skips a step alone: the replicas are {percent(result.last / 100)} of the way apart"

    def describe(self, result: overflow_on_one_rank.Drift) -> str:
        scales = ", ".join(f"rank {rank}: 2^{log:.0f}" for rank, log in enumerate(result.scales.tolist()))
        who = "every rank skips it" if result.agree else "that rank alone skips it"
        return (
            f"At step {result.overflow_at} the gradient of rank {result.overflow_on} overflows, and {who}. Distance of "
            f"the replicas after {len(result.distance)} steps: {three(result.last)} % of the way that one has gone. "
            f"Loss scales in the end: {scales}."
        )
