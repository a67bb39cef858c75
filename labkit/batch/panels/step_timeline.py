"""One optimizer step in time: modelled."""

from __future__ import annotations

from labkit import batch
from labkit.batch import step_timeline
from labkit.frame.canvas import Canvas, polyline
from labkit.frame.experiment import Experiment
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
