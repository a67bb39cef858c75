"""A loop that waits for its data, and one that loads ahead."""

from __future__ import annotations

from labkit.frame.canvas import Canvas, quartiles
from labkit.frame.experiment import Experiment
from labkit.throughput import loader
from labkit.wording import three

MS = 1e3


class Loader(Experiment[loader.Loader]):
    """Load and compute one after the other, or at once."""

    title = "A slow data loader"
    question = "How many times as fast is the loop with prefetch?"
    unit = "times"
    note = (
        "Dots: measured loops, median and quartiles. Upright lines: modelled. Bars: what an item takes to load "
        "(declared, grey) and a step to compute (measured, blue)."
    )
    run = staticmethod(loader.loader)
    shown = (loader.items, loader.loop, loader.schedule)
    aspect = 0.45

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("time for each step (ms)", "", moving="x")
        self.axes.set_yticks([1, 0], labels=["in turn", "ahead"])
        self.axes.tick_params(axis="y", length=0)
        canvas.frame(self.axes, x=(0, 30), y=(-0.6, 1.75))
        style = {"linewidth": 9}
        self.loads = [canvas.bar(self.axes, "muted", **style) for _ in range(2)]
        self.computes = [canvas.bar(self.axes, "right", **style) for _ in range(2)]
        self.models = [canvas.line(self.axes, "modelled") for _ in range(2)]
        self.measured = [canvas.spread(self.axes, markersize=9) for _ in range(2)]
        self.words = [canvas.text(self.axes, ha="left", va="center") for _ in range(2)]
        self.names = [canvas.text(self.axes, word, ha="center", va="bottom") for word in ("load", "compute")]

    def draw(self, canvas: Canvas, result: loader.Loader) -> None:
        load, compute = MS * result.load, MS * result.compute.median
        models = [MS * each for each in (result.plain_modelled, result.ahead_modelled)]
        times = [[quartiles(each, MS)] if each.count else [] for each in (result.plain, result.ahead)]
        most = max([load + compute, *models, *(high for mine in times for _, _, high in mine)])
        canvas.frame(self.axes, x=(0, 1.35 * most))
        for bar, (low, high), height in zip(
            [*self.loads, *self.computes],
            [(0, load), (0, load), (load, load + compute), (0, compute)],
            [1.1, 0.17, 1.1, -0.03] if result.depth else [1.1, 0.1, 1.1, 0.1],
            strict=True,
        ):
            bar.set_data([low, high], [height, height])
        if not result.depth:
            self.computes[1].set_data([load, load + compute], [0.1, 0.1])
        for at, mine in enumerate(times):
            self.models[at].set_data([models[at]] * 2, [0.7 - at, 1.3 - at])
            self.measured[at].lay([0.78 - at] * len(mine), mine)
            self.words[at].set_text(f"{three(mine[0][1])} ms" if mine else "")
            end = mine[0][2] if mine else 0.0
            beside = end if end + 0.35 * most < models[at] else max(models[at], end)
            self.words[at].set_position((beside + most / 20, 0.78 - at))
        wide = [span > 0.2 * most for span in (load, compute)]
        for name, word, middle, shown in zip(
            self.names, ("load", "compute"), (load / 2, load + compute / 2), wide, strict=True
        ):
            name.set(text=word if shown else "", position=(middle, 1.3))

    def answer(self, result: loader.Loader) -> float:
        return result.gain

    def headline(self, result: loader.Loader) -> str:
        if not result.ahead.count:
            return "Measuring"
        return f"{three(result.gain)} times as fast with prefetch; the model says {three(_modelled(result))}"

    def describe(self, result: loader.Loader) -> str:
        if result.progress < 1:
            return "The loops are being timed in turn."
        load, compute = MS * result.load, MS * result.compute.median
        plain, ahead = (
            f"{three(MS * each.median)} ms ({three(MS * each.lower)} … {three(MS * each.upper)})"
            for each in (result.plain, result.ahead)
        )
        slow = f" Loading is the longer of the two: no prefetch gets below {three(load)} ms, only a faster loader does."
        hint = slow if load > compute else ""
        return (
            f"An item takes {three(load)} ms to load, {'one in four all of it' if result.uneven else 'each the same'}, "
            f"and a step {three(compute)} ms to compute. In turn a step takes {plain}, modelled "
            f"{three(MS * result.plain_modelled)}; with up to {result.depth} items loaded ahead {ahead}, modelled "
            f"{three(MS * result.ahead_modelled)}. Median and quartiles of {result.plain.count} loops.{hint}"
        )


def _modelled(result: loader.Loader) -> float:
    return result.plain_modelled / result.ahead_modelled
