"""Ranks that do not hold the same: one without a valid token, one with fewer microbatches."""

from __future__ import annotations

import math

from labkit.data_parallel import uneven_ranks
from labkit.data_parallel.panels.rank_weights import Rows, right
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.wording import percent, three


class EmptyRank(Experiment[uneven_ranks.EmptyRank]):
    """A rank that has nothing to predict."""

    title = "A rank without a valid token"
    question = "sum / max(n, 1) on every rank: how far off is the gradient?"
    unit = "%"
    note = "Measured in real DDP, float64. Striped: the gradient is wrong. Cross: it is not finite, on every rank."
    run = staticmethod(uneven_ranks.empty_rank)
    shown = (*uneven_ranks.POLICIES.values(), uneven_ranks.run_policies)
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("relative error (%)", "", moving="")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(-3, 110), y=(len(uneven_ranks.POLICIES) - 0.4, -0.6), xticks=[0, 100])
        self.dots = canvas.line(self.axes, "right", linestyle="none", markersize=9)
        self.bars = [canvas.bar(self.axes, "wrong", linewidth=12) for _ in uneven_ranks.POLICIES]
        self.lost = canvas.line(self.axes, "wrong", linestyle="none", markersize=12)
        self.words = [canvas.text(self.axes, ha="left", va="bottom") for _ in uneven_ranks.POLICIES]

    def draw(self, canvas: Canvas, result: uneven_ranks.EmptyRank) -> None:
        fine = [at for at, each in enumerate(result.policies) if each.relative_error <= result.tolerance]
        lost = [at for at, each in enumerate(result.policies) if each.broken]
        self.dots.set_data([0] * len(fine), [at + 0.2 for at in fine])
        self.lost.set_data([106] * len(lost), [at + 0.2 for at in lost])
        for at, each in enumerate(result.policies):
            shown = at not in fine and at not in lost
            self.bars[at].set_data([0, 100 * each.relative_error] if shown else [], [at + 0.2] * 2 if shown else [])
            said = _broken(each, result.ranks) if each.broken else right(each.relative_error, result.tolerance)
            self.words[at].set(text=f"{each.name}: {said}", position=(-2, at - 0.02))

    def answer(self, result: uneven_ranks.EmptyRank) -> float:
        return 100 * next(each for each in result.policies if each.name == "sum / max(n, 1)").relative_error

    def headline(self, result: uneven_ranks.EmptyRank) -> str:
        return f"sum / max(n, 1): no NaN, and {percent(self.answer(result) / 100)} off"

    def describe(self, result: uneven_ranks.EmptyRank) -> str:
        counts = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(result.counts))
        said = []
        for each in result.policies:
            loss = "NaN" if math.isnan(each.empty_loss) else three(each.empty_loss)
            lost = f"the gradient {_broken(each, result.ranks)}"
            what = lost if each.broken else right(each.relative_error, result.tolerance)
            said.append(f"{each.name}: the empty rank's loss is {loss}, {what}")
        return f"Valid tokens: {counts}. {'; '.join(said)}."


def _broken(policy: uneven_ranks.Policy, ranks: int) -> str:
    return f"NaN on {policy.broken} of {ranks} ranks"


class Uneven(Experiment[uneven_ranks.Uneven]):
    """The last rank has fewer microbatches than the others."""

    title = "A rank with fewer microbatches"
    question = "The lightest microbatch: how much of its right weight does it get?"
    unit = "times"
    note = (
        "Measured in real DDP: weights fitted from the first rank's gradient, 1 is right. A rank that gives no answer "
        "within a second hangs; all are ended then."
    )
    run = staticmethod(uneven_ranks.uneven)
    shown = (*uneven_ranks.WAYS.values(), uneven_ranks.run_way)
    aspect = 0.6

    def layout(self, canvas: Canvas) -> None:
        self.rows = Rows(canvas, 16)

    def draw(self, canvas: Canvas, result: uneven_ranks.Uneven) -> None:
        owner = result.owner.tolist()
        self.rows.draw(owner, result.counts.tolist(), [result.fitted.tolist()], instead=_hang(result))

    def answer(self, result: uneven_ranks.Uneven) -> float:
        return 0.0 if result.hangs else float(result.fitted.min())

    def headline(self, result: uneven_ranks.Uneven) -> str:
        if result.hangs:
            return f"{result.way}: {_hang(result)}"
        return f"{result.way}: no hang, {right(result.relative_error, result.tolerance)}"

    def describe(self, result: uneven_ranks.Uneven) -> str:
        steps = ", ".join(f"rank {rank}: {K}" for rank, K in enumerate(result.steps))
        if result.hangs:
            return f"Microbatches: {steps}. {result.hangs[0].upper()}{result.hangs[1:]}."
        weights = [
            f"rank {rank}: {three(w)}" for rank, w in zip(result.owner.tolist(), result.fitted.tolist(), strict=True)
        ]
        off = right(result.relative_error, result.tolerance)
        return f"Microbatches: {steps}. Weight × N of each: {', '.join(weights)}. In all: {off}."


def _hang(result: uneven_ranks.Uneven) -> str:
    return f"{result.hangs.partition(' gave')[0]} hangs" if result.hangs else ""
