"""The roofline: a modelled ceiling, this machine measured, and four traps.

>>> import labkit
>>> labkit.labs.roofline().experiments[0]
'ceiling'

With the name of an experiment the panel shows that one alone; values set its controls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from labkit import roofline
from labkit.device import Spread
from labkit.frame.canvas import Canvas, quartiles
from labkit.frame.experiment import Experiment
from labkit.roofline.panels.accelerators import Sparse
from labkit.wording import show, three

INTENSITIES = (0.125, 64.0)


class Ceiling(Experiment[roofline.Ceiling]):
    """The modelled ceiling: the lower of two limits."""

    title = "A modelled ceiling"
    question = "What rate does the roof allow?"
    unit = "GFLOP/s"
    note = (
        "Modelled: a ceiling from two numbers. No microbatch is run or swept here, "
        "and there is no accumulation, mask, bubble or optimizer in it."
    )
    run = staticmethod(roofline.ceiling)
    shown = (roofline.attainable,)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("intensity (FLOP/byte)", "rate (GFLOP/s)", log="y", log2="x")
        canvas.frame(self.axes, x=INTENSITIES)
        self.roof = canvas.line(self.axes, "modelled")
        self.drop = canvas.line(self.axes, "reference", colour="muted", linestyle=":")
        self.dot = canvas.line(self.axes, "right", linestyle="none", markersize=10, clip_on=False)
        self.ring = canvas.line(self.axes, "guess", colour="text")

    def draw(self, canvas: Canvas, result: roofline.Ceiling) -> None:
        self._frame(canvas, result.ceiling, result.intensity)
        low, high = INTENSITIES
        ridge = min(max(result.ridge, low), high)
        slope = [min(x * result.bandwidth, result.ceiling) for x in (low, ridge, high)]
        self.roof.set_data([low, ridge, high], slope)
        self.dot.set_data([result.intensity], [result.attainable])

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        self._frame(canvas, values["ceiling"], values["intensity"])
        canvas.hide(self.axes, values["intensity"], values["ceiling"] / 20)

    def guess(self, canvas: Canvas, values: Mapping[str, Any], prediction: float | None) -> None:
        self.drop.set_visible(True)
        self.ring.set_visible(prediction is not None)
        self.ring.set_data([values["intensity"]], [prediction or 1])

    def _frame(self, canvas: Canvas, ceiling: float, intensity: float) -> None:
        canvas.frame(self.axes, y=(ceiling / 2000, ceiling * 2), yticks=[ceiling])
        self.drop.set_data([intensity, intensity], [ceiling / 2000, ceiling * 2])

    def answer(self, result: roofline.Ceiling) -> float:
        return result.attainable

    def headline(self, result: roofline.Ceiling) -> str:
        return f"{result.bound.capitalize()}: {show(result.attainable)} of {show(result.ceiling)} GFLOP/s"

    def describe(self, result: roofline.Ceiling) -> str:
        return (
            f"At {show(result.intensity)} FLOP/byte, {show(result.bandwidth)} GB/s feed at most "
            f"{show(result.intensity * result.bandwidth)} GFLOP/s; the ceiling is {show(result.ceiling)}. "
            f"The lower one is {show(result.attainable)}. They meet at the ridge, {show(result.ridge)} FLOP/byte."
        )


class Machine(Experiment[roofline.Sweep]):
    """This machine's own roofs, and real matmuls under them."""

    title = "This machine, measured"
    question = "The fastest microbatch: how many times the rate of b = 1?"
    unit = "times"
    note = (
        "Line: modelled from the two measured roofs. Dots: measured rates, median and quartiles; their intensity is "
        "modelled. Roofs are the best run, as STREAM quotes it. One step has more in it than its matmuls."
    )
    run = staticmethod(roofline.machine)
    shown = (roofline.bound, roofline.place)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("modelled intensity (FLOP/byte)", "rate (GFLOP/s)", log="y", log2="x", moving="xy")
        canvas.frame(self.axes, x=(0.125, 512), y=(1, 2000))
        self.roof = canvas.line(self.axes, "modelled")
        marks = {"overhead-bound": "x", "memory-bound": "o", "compute-bound": "s"}
        self.dots = {word: canvas.spread(self.axes, marker=mark, markersize=8) for word, mark in marks.items()}
        self.words = {word: canvas.text(self.axes, ha="center", va="top") for word in marks}

    def draw(self, canvas: Canvas, result: roofline.Sweep) -> None:
        machine, rows = result.machine, result.rows
        bandwidth, ceiling = machine.bandwidth, machine.ceiling
        top = ceiling if math.isfinite(ceiling) else 64 * bandwidth
        right = max([512.0, *(1.5 * row.intensity for row in rows)])
        low = min(bandwidth / 16, self._name(canvas, result, right, top))
        high = max([top * 2, *(1.5 * row.rates.upper for row in rows)])
        canvas.frame(self.axes, x=(0.125, right), y=(low, high), yticks=[top])
        x = [0.125, top / bandwidth, right]
        self.roof.set_data(x, [min(each * bandwidth, top) for each in x])
        for word, dots in self.dots.items():
            mine = [row for row in rows if row.bound == word]
            dots.put([row.intensity for row in mine], [quartiles(row.rates) for row in mine])

    def _name(self, canvas: Canvas, result: roofline.Sweep, right: float, top: float) -> float:
        """Put each word below the roof, dots and words that stand where it stands; the lowest height that is taken."""
        rows = result.rows
        half = (right / 0.125) ** (4.2 / canvas.columns)  # of a word's width, as a factor
        lowest = min([top / 100, *(row.rates.lower for row in rows)])
        line = (2 * top / lowest) ** (1.6 / canvas.lines)  # of a line's height, as a factor
        taken: list[tuple[float, float]] = [(row.intensity, row.rates.lower / line**0.4) for row in rows]
        for word, text in self.words.items():
            mine = [row for row in rows if row.bound == word]
            text.set_text(word if mine else "")
            if mine:
                places = [min(max(row.intensity, 0.125 * half), right / half) for row in mine]
                roofs = [x / half * result.machine.bandwidth / line**0.4 for x in places]
                heights = [
                    min([roof, *(low for at, low in taken if x / half <= at <= x * half)])
                    for x, roof in zip(places, roofs, strict=True)
                ]
                near = max(range(len(mine)), key=lambda at: heights[at] / mine[at].rates.lower)
                x, y = places[near], heights[near]
                text.set_position((x, y))
                taken += [(at, y / line) for at in (x / half, x, x * half)]
        return min([math.inf, *(low for _, low in taken)])

    def answer(self, result: roofline.Sweep) -> float:
        return max(row.rates.median for row in result.rows) / result.rows[0].rates.median

    def headline(self, result: roofline.Sweep) -> str:
        if not result.rows:
            return "Measuring the roofs"
        best = max(result.rows, key=lambda row: row.rates.median)
        if best.microbatch == 1:
            return f"b = 1: {three(best.rates.median)} GFLOP/s, and none is faster"
        return f"b = 1: {three(result.rows[0].rates.median)} GFLOP/s; b = {best.microbatch}: {three(best.rates.median)}"

    def describe(self, result: roofline.Sweep) -> str:
        machine = result.machine
        threads = "1 thread" if machine.threads == 1 else f"{machine.threads} threads"
        roofs = f"{machine.device}, {threads}, {machine.dtype}: memory {_spread(machine.bandwidths)} GB/s"
        if not result.rows:
            return f"{roofs}. The compute roof is being measured."
        words = [f"from b = {row.microbatch} on {row.bound}" for row in _turns(result.rows)]
        busy = _busy([machine.bandwidths, machine.ceilings, *(row.rates for row in result.rows)])
        left = f" Left out, one call would take too long: b = {result.left_out[0]} and more." if result.left_out else ""
        return (
            f"{roofs}, matmul {_spread(machine.ceilings)} GFLOP/s (median, quartiles). They meet at "
            f"{three(machine.ridge)} FLOP/byte. Where the dots stand: {', '.join(words)}.{left}{busy}"
        )


class Counting(Experiment[roofline.Counting]):
    """Trap 1: what is one FLOP?"""

    title = "Trap: multiply-add"
    question = "Count 2 FLOP a multiply-add, not 1: how many times the rate?"
    unit = "times"
    note = "Measured: one matmul on this machine. Dot and cross are the same run."
    run = staticmethod(roofline.counting)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("intensity (FLOP/byte)", "rate (GFLOP/s)", log="y", log2="x")
        canvas.frame(self.axes, x=(0.125, 512), y=(0.5, 2000))
        self.step = canvas.line(self.axes, "reference", colour="muted", linestyle=":")
        self.dots = [canvas.line(self.axes, role, linestyle="none", markersize=10) for role in ("wrong", "right")]
        self.words = [canvas.text(self.axes, va="center") for _ in self.dots]

    def draw(self, canvas: Canvas, result: roofline.Counting) -> None:
        x, y = (result.intensity_one, result.intensity_two), (result.rate_one, result.rate_two)
        self.step.set_data(x, y)
        side, away = ("left", 1.3) if x[1] < 8 else ("right", 1 / 1.3)  # where there is room
        for at, count in enumerate((1, 2)):
            self.dots[at].set_data([x[at]], [y[at]])
            self.words[at].set(text=f"counted as {count}", position=(x[at] * away, y[at]), ha=side)

    def answer(self, result: roofline.Counting) -> float:
        return result.rate_two / result.rate_one

    def headline(self, result: roofline.Counting) -> str:
        return f"One run reads {three(result.rate_one)} or {three(result.rate_two)} GFLOP/s"

    def describe(self, result: roofline.Counting) -> str:
        return (
            f"{result.multiply_adds:,} multiply-adds took {three(1e6 * result.times.median)} µs. As 1 FLOP each: "
            f"{three(result.rate_one)} GFLOP/s at {three(result.intensity_one)} FLOP/byte; as 2, the makers' count: "
            f"{three(result.rate_two)} at {three(result.intensity_two)}. A rate needs a peak of the same count."
        )


class Cache(Experiment[roofline.Cache]):
    """Trap 3: whose bandwidth?"""

    title = "Trap: cache"
    question = "The fastest working set: how many times memory's bandwidth?"
    unit = "times"
    note = (
        "Measured: the triad a = b + 3c, counted as STREAM counts it. Dots: median, quartiles. Line and numbers: the "
        "best runs."
    )
    run = staticmethod(roofline.cache)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("three arrays together (MiB)", "bandwidth (GB/s)", log2="x")
        canvas.frame(self.axes, x=(0.02, 400), y=(0, 100))
        self.memory = canvas.line(self.axes, "modelled")
        self.dots = canvas.spread(self.axes)
        self.words = canvas.text(self.axes, "memory", ha="right", va="bottom")

    def draw(self, canvas: Canvas, result: roofline.Cache) -> None:
        top = 1.15 * result.fastest
        canvas.frame(self.axes, y=(0, top), yticks=[0, result.fastest, result.memory])
        self.memory.set_data([0.02, 400], [result.memory] * 2)
        begins = 400 / 20000 ** (4.5 / canvas.columns)  # the word, above all dots there
        under = [point.bandwidths.upper for point in result.points if point.size / 2**20 > begins]
        self.words.set_position((380, max([result.memory, *under]) + top / 60))
        self.dots.put([p.size / 2**20 for p in result.points], [quartiles(p.bandwidths) for p in result.points])

    def answer(self, result: roofline.Cache) -> float:
        return result.ratio

    def headline(self, result: roofline.Cache) -> str:
        return f"A working set that stays in cache reads {three(result.ratio)} times memory's bandwidth"

    def describe(self, result: roofline.Cache) -> str:
        best = max(result.points, key=lambda point: point.bandwidths.highest)
        busy = _busy([point.bandwidths for point in result.points])
        return (
            f"{three(result.points[-1].size / 2**20)} MiB come from memory at {three(result.memory)} GB/s, "
            f"{three(best.size / 2**20)} MiB from a cache: {three(result.fastest)}, {three(result.ratio)} times that. "
            f"A roof measured on small arrays is not the roof that large weights meet.{busy}"
        )


class Precision(Experiment[roofline.Precision]):
    """Trap 4: does the device have the type at all?"""

    title = "Trap: emulated type"
    question = "bfloat16: how many times the rate of float32 here?"
    unit = "times"
    note = "Bars: measured, best run of the same square matmul. Lines: what half or twice the bytes would promise."
    run = staticmethod(roofline.precision)
    aspect = 0.5
    names = ("float32", "float64", "bfloat16", "float16")

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("rate (GFLOP/s)", "", moving="x")
        self.axes.set_yticks([3, 2, 1, 0], labels=self.names)
        canvas.frame(self.axes, x=(0, 100), y=(-0.6, 3.6))
        self.bars = {name: canvas.bar(self.axes, "measured") for name in self.names}
        self.promised = canvas.line(self.axes, "reference", marker="|", markersize=26, linestyle="none")
        self.words = {name: canvas.text(self.axes, va="center") for name in self.names}

    def draw(self, canvas: Canvas, result: roofline.Precision) -> None:
        high = max(max(row.rates.highest, row.promised) for row in result.rows)
        canvas.frame(self.axes, x=(0, 1.3 * high))
        rows = {row.dtype: row for row in result.rows}
        places = {name: 3 - at for at, name in enumerate(self.names)}
        self.promised.set_data([row.promised for row in rows.values()], [places[name] for name in rows])
        for name, at in places.items():
            rate = rows[name].rates.highest if name in rows else 0.0
            self.bars[name].set_data([0, rate], [at, at])
            self.words[name].set_position((rate + high / 60, at))
            self.words[name].set_text("emulated" if name in rows and rows[name].emulated else "")

    def answer(self, result: roofline.Precision) -> float:
        return next(row.ratio for row in result.rows if row.dtype == "bfloat16")

    def headline(self, result: roofline.Precision) -> str:
        return ", ".join(f"{row.dtype} {three(row.ratio)}×" for row in result.rows)

    def describe(self, result: roofline.Precision) -> str:
        rates = ", ".join(f"{row.dtype} {three(row.rates.highest)}" for row in result.rows)
        slow = [row.dtype for row in result.rows if row.emulated]
        word = f" {' and '.join(slow)}: no instructions for it here, so it is emulated." if slow else ""
        busy = _busy([row.rates for row in result.rows])
        return f"A matmul of {result.size} × {result.size}, in GFLOP/s: {rates}.{word}{busy}"


def _spread(spread: Spread) -> str:
    return f"{three(spread.median)} ({three(spread.lower)} … {three(spread.upper)})"


def _busy(spreads: Sequence[Spread]) -> str:
    """What to think of runs of which a quarter is more than twice as fast as another quarter."""
    if all(spread.upper <= 2 * spread.lower for spread in spreads if spread.count):
        return ""
    return " The runs scatter; perhaps something else keeps this machine busy. Step again when it rests."


def _turns(rows: Sequence[roofline.Row]) -> list[roofline.Row]:
    """The rows at which the word changes."""
    return [row for at, row in enumerate(rows) if not at or row.bound != rows[at - 1].bound]


EXPERIMENTS = (Ceiling, Machine, Counting, Sparse, Cache, Precision)
