"""Ranks that hold shards."""

from __future__ import annotations

from typing import Any

from labkit.data_parallel import sharding
from labkit.data_parallel.panels.rank_weights import right
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.listing import sources


class Fsdp(Experiment[sharding.Sharded]):
    """FSDP2's collectives."""

    title = "Parameters in shards: FSDP2"
    question = "How many all-gathers does one optimizer step make?"
    unit = "all-gathers"
    note = "Counted on each rank: torch.distributed.fsdp.fully_shard, four layers, each sharded by itself, float64."
    run = staticmethod(sharding.fsdp)
    aspect = 0.4

    def source(self) -> str:
        """What a rank runs, and what compares."""
        shown: list[Any] = [sharding.shard, sharding.run_sharded, sharding.fsdp]
        return sources(*shown)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("collectives of one optimizer step", "", whole="x", moving="x")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 30), y=(1.6, -0.6))
        self.bars = [canvas.bar(self.axes, "measured") for _ in range(2)]
        self.words = [canvas.text(self.axes, ha="left", va="bottom") for _ in range(2)]

    def draw(self, canvas: Canvas, result: sharding.Sharded) -> None:
        found = {"all-gathers": result.all_gathers, "reduce-scatters": result.reduce_scatters}
        most = max(1, *found.values())
        canvas.frame(self.axes, x=(0, 1.05 * most), xticks=[0, *found.values()])
        for at, (name, count) in enumerate(found.items()):
            self.bars[at].set_data([0, count], [at + 0.2] * 2)
            self.words[at].set(text=f"{name}: {count}", position=(0.01 * most, at - 0.1))

    def answer(self, result: sharding.Sharded) -> float:
        return result.all_gathers

    def headline(self, result: sharding.Sharded) -> str:
        return f"{result.all_gathers} all-gathers and {result.reduce_scatters} reduce-scatters in one step"

    def describe(self, result: sharding.Sharded) -> str:
        return (
            f"{result.layers} layers, K = {result.accumulation_steps}: {result.all_gathers} all-gathers and "
            f"{result.reduce_scatters} reduce-scatters on each rank. In the end a rank keeps {result.shard:,} of "
            f"{result.parameters:,} numbers of the gradient. The whole of it: "
            f"{right(result.relative_error, result.tolerance)}, {result.relative_error:.1g} off."
        )
