"""All-reduces, by their bytes."""

from __future__ import annotations

import math

from labkit.data_parallel import allreduce_time
from labkit.data_parallel.panels.step_timeline import ms
from labkit.frame.canvas import Canvas, quartiles
from labkit.frame.experiment import Experiment
from labkit.wording import three


class Allreduce(Experiment[allreduce_time.AllReduce]):
    """Time of an all-reduce against its bytes."""

    title = "What an all-reduce costs"
    question = "How long do these messages take together?"
    unit = "ms"
    note = (
        "Measured on this machine now: medians and quartiles, the slowest rank. Line: latency + bytes / bandwidth, "
        "fitted with the least relative error. Ring: the payload in its messages; short bar: what the line says of it."
    )
    run = staticmethod(allreduce_time.allreduce)
    shown = (allreduce_time.Line, allreduce_time.line, allreduce_time.run_all_reduces)
    aspect = 0.6

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("payload (kB)", "time (ms)", log="xy", moving="y")
        canvas.frame(self.axes, x=(0.002, 60_000), y=(0.05, 100))
        self.line = canvas.line(self.axes, "modelled")
        self.measured = canvas.spread(self.axes, markersize=6)
        self.ring = canvas.line(self.axes, "guess")
        self.payload = canvas.spread(self.axes, markersize=6)
        self.modelled = canvas.line(self.axes, "modelled", marker="_", markersize=18, markeredgewidth=3)
        self.words = canvas.text(self.axes, ha="left", va="top")

    def draw(self, canvas: Canvas, result: allreduce_time.AllReduce) -> None:
        every = [*result.measured, result.found]
        low = min(each.lower for each in every) / 3
        high = 12 * max([*(each.upper for each in every), result.modelled])
        canvas.frame(self.axes, y=(low, high))
        self.measured.put([size / 1e3 for size in result.sizes.tolist()], [*map(quartiles, result.measured)])
        line = [4 * 10 ** (k / 8) for k in range(54)]
        self.line.set_data([size / 1e3 for size in line], [1e3 * result.line.seconds(size) for size in line])
        at = result.payload / 1e3
        self.ring.set_data([at], [result.found.median])
        self.payload.put([at], [quartiles(result.found)])
        self.modelled.set_data([at], [result.modelled])
        self.words.set(text=_line(result), position=(0.003, high / 1.3))

    def answer(self, result: allreduce_time.AllReduce) -> float:
        return result.found.median

    def headline(self, result: allreduce_time.AllReduce) -> str:
        return f"{_messages(result)}: {three(result.found.median)} ms, the line says {three(result.modelled)} ms"

    def describe(self, result: allreduce_time.AllReduce) -> str:
        ends = (
            f"4 bytes take {three(result.measured[0].median)} ms, 8.39 MB take {three(result.measured[-1].median)} ms"
        )
        return (
            f"{result.ranks} ranks. {ends}. The {_line(result)}; it misses by {three(result.residual)} %, root mean "
            f"square. {_messages(result)}, one after the other: measured {ms(result.found)}, by the line "
            f"{three(result.modelled)} ms."
        )


def _line(result: allreduce_time.AllReduce) -> str:
    rate = f"{three(result.bandwidth)} MB/s" if math.isfinite(result.bandwidth) else "no end of bandwidth"
    return f"line: {three(result.latency)} ms and {rate}"


def _messages(result: allreduce_time.AllReduce) -> str:
    often = "1 message" if result.messages == 1 else f"{result.messages} messages"
    return f"{three(result.payload / 1e6)} MB in {often}"
