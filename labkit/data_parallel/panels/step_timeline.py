"""One optimizer step of real ranks, in time."""

from __future__ import annotations

from typing import Any

from labkit.data_parallel import hook, step_timeline
from labkit.device import Spread
from labkit.frame.canvas import Canvas, polyline, quartiles
from labkit.frame.experiment import Experiment
from labkit.wording import percent, three

LANES = {"microbatch": 0.0, "wait": 0.0, "update": 0.0, "all-reduce": 0.46}
PARTS = ("microbatch", "synchronisation", "hidden", "exposed", "step")


class Timeline(Experiment[step_timeline.Timeline]):
    """One optimizer step on real ranks."""

    title = "A step of real ranks, in time"
    question = "Which share of the synchronisation does the backward hide?"
    unit = "%"
    note = (
        "Measured: the step of median length, one band a rank. Upper lane: microbatches, then waiting (striped) and "
        "the update. Lower lane: all-reduces on their way. Below: medians and quartiles of five steps. On few cores "
        "what is hidden is not free: it takes time from the backward."
    )
    run = staticmethod(step_timeline.timeline)
    shown = (
        step_timeline.accumulate,
        step_timeline.accumulate_alone,
        step_timeline.update,
        hook.record_span,
        hook.average,
        step_timeline.run_steps,
    )
    aspect = 0.72

    def layout(self, canvas: Canvas) -> None:
        grid = canvas.figure.add_gridspec(2, 1, height_ratios=(5, 4), hspace=0.5)
        self.axes = canvas.axes("time (ms)", "", position=grid[0], moving="xy")
        self.below = canvas.axes("time (ms)", "", position=grid[1], log="x", moving="x")
        self.axes.yaxis.set_visible(False)
        self.below.yaxis.set_visible(False)
        canvas.frame(self.axes, x=(-6, 30), y=(1.9, -0.5), xticks=[0, 30])
        canvas.frame(self.below, x=(0.02, 100), y=(len(PARTS) - 0.5, -0.5))
        roles = {"microbatch": "right", "wait": "wrong", "update": "text", "all-reduce": "muted"}
        self.bars = {
            name: canvas.bar(self.axes, role, **({"linewidth": 6} if name == "all-reduce" else {"linewidth": 12}))
            for name, role in roles.items()
        }
        self.words = [canvas.text(self.axes, va="center", ha="left") for _ in range(4)]
        self.spreads = canvas.spread(self.below, markersize=6)
        self.names = [canvas.text(self.below, va="center", ha="left") for _ in PARTS]

    def draw(self, canvas: Canvas, result: step_timeline.Timeline) -> None:
        total = max(each.end for each in result.stretches)
        room = min(0.4, 4.4 / canvas.columns)  # for "rank 0"
        left = -1.02 * total * room / (1 - room)
        canvas.frame(self.axes, x=(left, 1.02 * total), y=(result.ranks - 0.2, -0.5), xticks=[0, total])
        for name, bar in self.bars.items():
            some = [each for each in result.stretches if each.name == name]
            gap = 0.002 * total if name != "wait" else 0.0
            spans = [
                (each.start + gap, max(each.start + gap, each.end - gap), each.rank + LANES[name]) for each in some
            ]
            bar.set_data(*polyline([(begin, height), (end, height)] for begin, end, height in spans))
        for rank, words in enumerate(self.words):
            words.set(text=f"rank {rank}" if rank < result.ranks else "", position=(0.9 * left, rank + 0.2))
        spreads = [getattr(result, name) for name in PARTS]
        low = min([each.lower for each in spreads if each.lower > 1e-3], default=0.1)
        high = max(each.upper for each in spreads)
        left = low * (low / high) ** 0.6
        canvas.frame(self.below, x=(left, 1.3 * high))
        times = [[max(end, left) for end in quartiles(each)] for each in spreads]
        self.spreads.lay(range(len(PARTS)), [(lower, median, upper) for lower, median, upper in times])
        for at, (words, name) in enumerate(zip(self.names, PARTS, strict=True)):
            words.set(text=name, position=(left * (high / left) ** 0.015, at))

    def tables(self, result: step_timeline.Timeline) -> list[dict[str, Any]]:
        first, *rest = super().tables(result)
        return [first, *rest]

    def answer(self, result: step_timeline.Timeline) -> float:
        return 100 * result.hidden_share

    def headline(self, result: step_timeline.Timeline) -> str:
        share = percent(round(result.hidden_share, 2))
        return f"{share} of the synchronisation runs beside the backward, {three(result.exposed.median)} ms are exposed"

    def describe(self, result: step_timeline.Timeline) -> str:
        often = "all-reduce" if result.messages == 1 else "all-reduces"
        shorter = "shorter" if result.longer >= 0 else "longer, which is scatter"
        return (
            f"Medians, quartiles in brackets. Microbatch {ms(result.microbatch)}; synchronisation in "
            f"{result.messages} {often} {ms(result.synchronisation)}, of which a backward hides "
            f"{ms(result.hidden)}; exposed {ms(result.exposed)}; update {ms(result.optimizer)}; step "
            f"{ms(result.step)}. The same work without synchronisation is {three(abs(result.longer))} ms {shorter}."
        )


def ms(spread: Spread) -> str:
    """A time with its quartiles.

    >>> ms(Spread.of([1, 2, 3]))
    '2 ms (1.5 … 2.5)'
    """
    return f"{three(spread.median)} ms ({three(spread.lower)} … {three(spread.upper)})"
