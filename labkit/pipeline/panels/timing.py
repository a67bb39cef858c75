"""Time in a pipeline: a step as bars, the bubble against M, and the best M of a fixed batch."""

from __future__ import annotations

from labkit import pipeline
from labkit.frame.canvas import Canvas, polyline, quartiles
from labkit.frame.experiment import Experiment
from labkit.pipeline import simulated_stages, slicing, stages, timing
from labkit.pipeline.slicing import Slices
from labkit.pipeline.timing import Bubbles, Timelines, Work
from labkit.wording import percent, three

NUMBERED = 64  # bars of a picture that carry the number of their microbatch, at most


class Timeline(Experiment[Timelines]):
    """One step, rank by rank."""

    title = "One step of a pipeline in time"
    question = "What share of the ranks’ time is bubble, modelled?"
    unit = "%"
    note = (
        "Blue: forward; black, on a dark page white: backward; the number: the microbatch; grey: bubble. Above "
        "modelled, below measured: real processes and schedules, whose stages sleep. “Keeps”: inputs kept for "
        "backward at once, counted."
    )
    run = staticmethod(pipeline.timeline)
    shown = (
        timing.order,
        timing.interleave,
        timing.simulate,
        timing.idle,
        stages.step,
        simulated_stages.Sleep,
        simulated_stages.run_sleepers,
    )
    aspect = 0.6

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("time (ms)", "", moving="x")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 200), y=(5, -1))
        self.bubbles, self.forward, self.backward = (
            canvas.bar(self.axes, role, linewidth=13) for role in ("faint", "modelled", "text")
        )
        self.numbers = [canvas.text(self.axes, role="paper", ha="center", va="center") for _ in range(NUMBERED)]
        self.names = [canvas.text(self.axes, ha="right", va="center") for _ in range(8)]
        self.kept = [canvas.text(self.axes, ha="left", va="center") for _ in range(4)]
        self.blocks = [canvas.text(self.axes, ha="left", va="center") for _ in range(2)]

    def draw(self, canvas: Canvas, result: Timelines) -> None:
        P, total = result.ranks, max(result.total, result.measured_total)
        canvas.frame(self.axes, x=(0, 1.24 * total), y=(2 * P + 1.6, -1.2), xticks=[0, result.total])
        ends, blocks = (result.total, result.measured_total), (result.modelled, result.measured)
        self.bubbles.set_data(*_bars([(0, ends[row // P], _height(row, P)) for row in range(2 * P)]))
        for kind, bars in (("forward", self.forward), ("backward", self.backward)):
            placed = [(w, w.rank + at * P) for at, block in enumerate(blocks) for w in block if w.kind == kind]
            bars.set_data(*_bars([(w.begin, w.end - total / 300, _height(row, P)) for w, row in placed]))
        self._number(canvas, result.modelled, total)
        for row, words in enumerate(self.names):
            words.set(text=f"rank {row % P}" if row < 2 * P else "", position=(-0.01 * total, _height(row, P)))
        for rank, words in enumerate(self.kept):
            words.set_text(f"keeps {result.kept[rank]}" if rank < P else "")
            words.set_position((1.02 * total, _height(rank + P, P)))
        shares = (("modelled", result.bubble), ("measured", result.measured_bubble))
        for at, (words, (name, share)) in enumerate(zip(self.blocks, shares, strict=True)):
            words.set(text=f"{name}: {percent(share)} bubble", position=(0.01 * total, _height(at * P, P) - 0.9))

    def _number(self, canvas: Canvas, works: tuple[Work, ...], total: float) -> None:
        narrowest = min(work.end - work.begin for work in works) / (1.24 * total)
        room = len(works) <= NUMBERED and narrowest * canvas.columns > 1
        for at, words in enumerate(self.numbers):
            shown = room and at < len(works)
            words.set_text(str(works[at].microbatch + 1) if shown else "")
            if shown:
                words.set_position(((works[at].begin + works[at].end) / 2, works[at].rank))

    def answer(self, result: Timelines) -> float:
        return 100 * result.bubble

    def headline(self, result: Timelines) -> str:
        return (
            f"{result.schedule}, {result.ranks} ranks, M = {result.microbatches}: {percent(result.bubble)} bubble, "
            f"keeps {max(result.kept)}"
        )

    def describe(self, result: Timelines) -> str:
        kept, predicted = (", ".join(map(str, each)) for each in (result.kept, result.predicted_kept))
        return (
            f"Modelled: {three(result.total)} ms, {percent(result.bubble)} of the ranks’ time is bubble. Measured: "
            f"{three(result.measured_total)} ms, {percent(result.measured_bubble)}; messages and a busy machine add to "
            f"it. Inputs kept for backward at once, rank by rank: {kept} counted, {predicted} by "
            f"the order of the work."
        )


def _height(row: int, ranks: int) -> float:
    """Where a rank's bar lies: the modelled block above, the measured one below."""
    return row if row < ranks else row + 1.4


def _bars(spans: list[tuple[float, float, float]]) -> tuple[list[float], list[float]]:
    """Points of a line with gaps, from (begin, end, height)."""
    return polyline([(begin, height), (end, height)] for begin, end, height in spans)


class Bubble(Experiment[Bubbles]):
    """The bubble against the number of microbatches."""

    name = "bubble"  # the formula has that name
    title = "The bubble against M"
    question = "The largest M: what share of the time is bubble, modelled?"
    unit = "%"
    note = (
        "Line: modelled, messages take no time. Dots: measured, real schedules whose stages sleep, median and "
        "quartiles of three steps. Above the line: messages and a busy machine. The longer the sleep, the less of it."
    )
    run = staticmethod(pipeline.bubbles)
    shown = (timing.bubble, timing.modelled_bubble, timing.sleeping, timing.idle, simulated_stages.run_sleepers)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("M, microbatches", "bubble (%)", log2="x", moving="x")
        canvas.frame(self.axes, x=(0.8, 20), y=(0, 100))
        self.line = canvas.line(self.axes, "modelled")
        self.dots = canvas.spread(self.axes)
        self.words = canvas.text(self.axes, ha="right", va="top")

    def draw(self, canvas: Canvas, result: Bubbles) -> None:
        sizes, shares = result.sizes, [100 * share for share in result.modelled]
        canvas.frame(self.axes, x=(sizes[0] / 1.25, sizes[-1] * 1.25))
        self.line.set_data(sizes, shares)
        done = result.measured
        self.dots.put(sizes[: len(done)], [quartiles(spread, 100) for spread in done])
        self.words.set(text=f"M = {sizes[-1]}: {three(shares[-1])} % modelled", position=(sizes[-1] * 1.2, 97))

    def answer(self, result: Bubbles) -> float:
        return 100 * result.modelled[-1]

    def headline(self, result: Bubbles) -> str:
        if result.progress < 1:
            return f"{len(result.measured)} of {len(result.sizes)} numbers of microbatches"
        first, last = (percent(result.modelled[at]) for at in (0, -1))
        return f"M from {result.sizes[0]} to {result.sizes[-1]}: bubble from {first} to {last}"

    def describe(self, result: Bubbles) -> str:
        if result.progress < 1:
            return "The steps are under way."
        rows = zip(result.sizes, result.modelled, result.measured, strict=True)
        told = "; ".join(f"M = {M}: {percent(share)}, measured {percent(seen.median)}" for M, share, seen in rows)
        return (
            f"{result.schedule} on {result.ranks} ranks, modelled and measured. {told}. The first rank kept "
            f"{', '.join(map(str, result.kept))} inputs for backward at once."
        )


class Cut(Experiment[Slices]):
    """A fixed batch, cut ever finer."""

    title = "The same batch in more pieces"
    question = "Which M takes the least time, by its parts?"
    unit = "microbatches"
    note = (
        "Line: (M + P − 1) · (passes of one microbatch + two messages), each measured apart while all ranks work, "
        "the least of 15. Ring: its lowest point. Dots: whole steps of the real schedule, median and quartiles. Above "
        "the line: the library’s own work for each microbatch, and a busy machine."
    )
    run = staticmethod(pipeline.cut)
    shown = (slicing.Layers, slicing.there_and_back, slicing.echo, slicing.time_calls, slicing.run, slicing.measure)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("M, microbatches of one batch", "one step (ms)", log="y", log2="x", moving="xy")
        canvas.frame(self.axes, x=(0.8, 40), y=(1, 1000))
        self.line = canvas.line(self.axes, "modelled")
        self.dots = canvas.spread(self.axes)
        self.ring = canvas.line(self.axes, "guess")
        self.words = canvas.text(self.axes, ha="center", va="top")

    def draw(self, canvas: Canvas, result: Slices) -> None:
        sizes, done = result.sizes, result.slices
        times = [t for each in done for t in (each.modelled, each.step.lower, each.step.upper)] or [10.0, 100.0]
        low, high = min(times) / 4, max(times) * 1.5
        canvas.frame(self.axes, x=(sizes[0] / 1.4, sizes[-1] * 1.4), y=(low, high))
        M = [each.microbatches for each in done]
        self.line.set_data(M, [each.modelled for each in done])
        self.dots.put(M, [quartiles(each.step) for each in done])
        best = result.best if result.progress == 1 else None
        self.ring.set_data(*(([best.microbatches], [best.modelled]) if best else ([], [])))
        self.words.set_text(f"M = {best.microbatches}: {three(best.modelled)} ms" if best else "")
        if best:
            middle = min(max(best.microbatches, sizes[0] * 2), sizes[-1] / 2)
            self.words.set_position((middle, best.modelled / (high / low) ** 0.12))

    def answer(self, result: Slices) -> float:
        return float(result.best.microbatches)

    def headline(self, result: Slices) -> str:
        if result.progress < 1:
            return f"{len(result.slices)} of {len(result.sizes)} numbers of microbatches"
        best = result.best
        return (
            f"{result.batch} rows: by its parts fastest with M = {best.microbatches}, measured with M = "
            f"{result.fastest.microbatches}"
        )

    def describe(self, result: Slices) -> str:
        if result.progress < 1:
            return "The steps are under way."
        shown = {each.microbatches: each for each in (result.slices[0], result.best, result.slices[-1])}
        told = "; ".join(
            f"M = {M}: {each.rows} rows, bubble {percent(each.bubble)}, {three(each.rate)} GFLOP/s, {M} × "
            f"{three(each.payload / 1024)} KiB in {three(each.message.lowest)} ms each"
            for M, each in shown.items()
        )
        parts, steps = (
            ", ".join(three(time) for time in times)
            for times in zip(*((each.modelled, each.step.median) for each in result.slices), strict=True)
        )
        return (
            f"{result.schedule} on {result.ranks} ranks. {told}. A step for M = {', '.join(map(str, result.sizes))}: "
            f"by its parts {parts} ms, measured {steps} ms."
        )
