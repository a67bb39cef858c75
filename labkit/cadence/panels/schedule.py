"""Learning rates over optimizer steps and over samples."""

from __future__ import annotations

from labkit.cadence import schedule
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.wording import percent, show


class Schedules(Experiment[schedule.Schedules]):
    """The learning rate against optimizer steps and samples."""

    title = "The schedule"
    question = "After how many optimizer steps is the learning rate 0?"
    unit = "steps"
    note = (
        "Measured: torch's LambdaLR, really stepped; linear warmup, then a cosine. Solid: once a step. Dashed: by the "
        "rule. Below: optimizer steps. Above: the sequences seen until then."
    )
    run = staticmethod(schedule.schedules)
    shown = (schedule.warmup_cosine, schedule.run_schedule)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer steps", "learning rate / base", whole="x", moving="x")
        canvas.frame(self.axes, x=(0, 500), y=(-0.05, 1.1))
        self.right = canvas.line(self.axes, "right", marker="", linewidth=2.5)
        self.wrong = canvas.line(self.axes, "wrong", marker="", linewidth=2.5)
        self.end = canvas.text(self.axes, ha="left", va="bottom")
        self.seen = [canvas.text(self.axes, ha=ha, va="bottom", size=0.9) for ha in ("left", "center", "right")]

    def draw(self, canvas: Canvas, result: schedule.Schedules) -> None:
        steps, U = result.updates.tolist(), int(result.updates[-1])
        canvas.frame(self.axes, x=(0, U))
        canvas.ticks(self.axes, x=[0, U // 2, U])  # over each stands the number of samples
        self.right.set_data(steps, result.right.tolist())
        self.wrong.set_data(steps, result.wrong.tolist())
        early = result.wrong_ends < U
        self.end.set(text=f"0 at step {result.wrong_ends}" if early else "", position=(result.wrong_ends, 0.03))
        for words, at in zip(self.seen, (0, U // 2, U), strict=True):
            unit = " sequences" if at == U else ""
            words.set(text=f"{int(result.samples[at]):,}{unit}" if at else "", position=(at, 1.02))

    def answer(self, result: schedule.Schedules) -> float:
        return float(result.wrong_ends)

    def headline(self, result: schedule.Schedules) -> str:
        U = int(result.updates[-1])
        return f"The learning rate is 0 after {result.wrong_ends} of {U} optimizer steps"

    def describe(self, result: schedule.Schedules) -> str:
        return (
            f"{result.rule}: warmup ends after {result.wrong_warmup_ends} optimizer steps, meant were "
            f"{result.warmup_ends}. The learning rates add up to {percent(result.area_ratio)} of the right sum. "
            f"Counted in microbatches, an evaluation every {schedule.EVALUATE_EVERY} runs "
            f"{result.evaluations_wrong} times, meant were {result.evaluations_right}; a loss scale that grows after "
            f"{show(schedule.GROWTH_INTERVAL)} grows {result.scaler_growths_wrong} times, meant "
            f"were {result.scaler_growths_right}."
        )
