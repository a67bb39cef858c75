"""The peaks that the makers of accelerators print."""

from __future__ import annotations

from labkit import roofline
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.wording import percent, show


class Sparse(Experiment[roofline.SparsePeak]):
    """Trap 2: which peak?"""

    title = "Trap: sparse peak"
    question = "What share of the dense peak is reached?"
    unit = "%"
    note = "Modelled: the makers' figures, nothing is run. Sources stand in labkit.roofline.ACCELERATORS."
    run = staticmethod(roofline.sparse)
    aspect = 0.42

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("rate (TFLOP/s)", "", moving="x")
        self.axes.set_yticks([2, 1, 0], labels=["achieved", "dense", "sparse"])
        canvas.frame(self.axes, x=(0, 2000), y=(-0.6, 2.6))
        self.bars = [canvas.bar(self.axes, role) for role in ("measured", "right", "wrong")]
        self.words = [canvas.text(self.axes, va="center") for _ in self.bars]

    def draw(self, canvas: Canvas, result: roofline.SparsePeak) -> None:
        row = result.accelerator
        sparse = row.sparse or 0
        canvas.frame(self.axes, x=(0, sparse * 1.45), xticks=[0, sparse, row.dense])
        shares = ("", f"{percent(result.of_dense)} of it", f"{percent(result.of_sparse)} of it")
        for at, value in enumerate((result.achieved, row.dense, sparse)):
            self.bars[at].set_data([0, value], [2 - at, 2 - at])
            self.words[at].set_position((value + sparse / 60, 2 - at))
            self.words[at].set_text(shares[at])

    def answer(self, result: roofline.SparsePeak) -> float:
        return 100 * result.of_dense

    def headline(self, result: roofline.SparsePeak) -> str:
        dense, sparse = percent(result.of_dense), percent(result.of_sparse)
        return f"{dense} of what dense weights can reach, or {sparse} of the other peak"

    def describe(self, result: roofline.SparsePeak) -> str:
        row, dense, sparse = result.accelerator, percent(result.of_dense), percent(result.of_sparse)
        return (
            f"{show(result.achieved)} TFLOP/s on {row.name} is {dense} of its dense {row.dtype} peak, "
            f"{show(row.dense)}, and {sparse} of the sparse one, {show(row.sparse)}, which holds only if two of every "
            f"four weights are zero. Source: {row.source}, {row.date}."
        )
