"""Batch quantities: what one optimizer step is made of, the wanted batch, two plans, a step in time, progress.

>>> import labkit
>>> labkit.labs.batch("planner", world=128).values["world"]
128
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.collections import PolyCollection

from labkit import batch
from labkit.batch import Plan, Planned
from labkit.batch.panels.progress import Progress, large
from labkit.batch.panels.step_timeline import Timeline
from labkit.frame.canvas import Canvas, polyline
from labkit.frame.experiment import Experiment, tables
from labkit.wording import show, three

PLACES = 8
MUCH = 8  # more sizes of a microbatch leave no room for words at each


def drawn(count: int) -> list[int]:
    """The numbers of those that are drawn; 0 stands for all that are left out.

    >>> drawn(3), drawn(64)
    ([1, 2, 3], [1, 2, 3, 4, 5, 6, 0, 64])
    """
    return list(range(1, count + 1)) if count <= PLACES else [*range(1, PLACES - 1), 0, count]


class Planner(Experiment[Planned]):
    """One optimizer step as a grid of microbatches."""

    title = "One optimizer step"
    question = "How many sequences does one optimizer step consume?"
    unit = "sequences"
    note = (
        "Modelled: counted from the plan, nothing runs. A tile is one microbatch, and the number in it says how many "
        "sequences. Gaps stand for more of the same."
    )
    run = staticmethod(batch.planner)
    shown = (Plan, batch.plan)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("microbatch of the optimizer step", "replica", moving="")
        self.axes.set(xticks=[], yticks=[])
        self.axes.spines[:].set_visible(False)
        self.tiles = canvas.paint(PolyCollection([]), "faint")
        self.axes.add_collection(self.tiles)
        self.edges = canvas.line(self.axes, "modelled", linewidth=1.5)
        self.sizes = [canvas.text(self.axes, ha="center", va="center") for _ in range(PLACES**2)]
        self.rows = [canvas.text(self.axes, ha="right", va="center") for _ in range(PLACES)]
        self.columns = [canvas.text(self.axes, ha="center", va="top") for _ in range(PLACES)]
        self.more = canvas.text(self.axes, role="muted", ha="center", va="center")
        self.shared = canvas.text(self.axes, ha="left", va="bottom")
        canvas.frame(self.axes, x=(0, PLACES), y=(PLACES, -1))

    def draw(self, canvas: Canvas, result: Planned) -> None:
        rows, columns = drawn(result.replicas), drawn(result.plan.accumulation)
        height, width = len(rows), len(columns)
        canvas.frame(self.axes, x=(0, width), y=(height, -height / 8))
        tiles = [(x, y) for y, row in enumerate(rows) for x, column in enumerate(columns) if row and column]
        corners = [
            [(x + u, y + v) for u, v in ((0.05, 0.07), (0.95, 0.07), (0.95, 0.93), (0.05, 0.93))] for x, y in tiles
        ]
        self.tiles.set_verts(corners)
        self.edges.set_data(*polyline((*tile, tile[0]) for tile in corners))
        _place(self.sizes, [(x + 0.5, y + 0.5, str(result.plan.microbatch)) for x, y in tiles])
        _place(self.rows, [(-width / 60, y + 0.5, str(row or "⋮")) for y, row in enumerate(rows)])
        _place(self.columns, [(x + 0.5, height * 1.01, str(column or "⋯")) for x, column in enumerate(columns)])
        between = "\n" if canvas.page.width < 30 * canvas.page.font else " "
        shared = f"a row is one replica:{between}" + (
            f"{result.devices} devices that share its sequences" if result.devices > 1 else "one device"
        )
        left_out = f"{result.replicas - PLACES + 1:,} more replicas" if 0 in rows else ""
        _place([self.more], [(width / 2, PLACES - 1.5, left_out)])
        _place([self.shared], [(width * 0.01, -height / 40, shared)])

    def tables(self, result: Planned) -> list[dict[str, Any]]:
        return [*tables(result.plan), *tables(result)]

    def answer(self, result: Planned) -> float:
        return result.global_batch

    def headline(self, result: Planned) -> str:
        made = result.plan
        return (
            f"{made.microbatch} sequences × {made.replicas} replicas × {made.accumulation} microbatches = "
            f"{result.global_batch:,} sequences"
        )

    def describe(self, result: Planned) -> str:
        made = result.plan
        left = f"; {result.left:,} sequences are left and fill no step" if result.left else ""
        return (
            f"World {made.world} / (tp {made.tp} × pp {made.pp} × cp {made.cp}) = {made.replicas} replicas: the ranks "
            f"of one replica share its sequences, so they do not multiply the batch. One replica holds "
            f"{made.microbatch} × {made.sequence_length} = {result.tokens_per_microbatch:,} tokens at a time, one "
            f"optimizer step consumes {result.global_batch:,} sequences, {result.tokens_per_update:,} tokens. The "
            f"epoch has {result.updates:,} updates{left}."
        )


def _place(texts: Sequence[Any], words: Sequence[tuple[float, float, str]]) -> None:
    """Words at their places, and no words where there are more artists."""
    for at, text in enumerate(texts):
        x, y, said = words[at] if at < len(words) else (0, 0, "")
        text.set(position=(x, y), text=said)


class Wanted(Experiment[batch.Wanted]):
    """From the batch that is wanted to the microbatch and the accumulation steps."""

    title = "The batch that is wanted"
    question = "How many accumulation steps, at the fewest?"
    unit = "microbatches"
    note = (
        "Modelled: counted, nothing runs. K: accumulation steps. Dot: exactly what is wanted. Cross: the nearest K "
        "below and above. Without any dot the answer is the K of the nearest cross."
    )
    run = staticmethod(batch.wanted)
    shown = (batch.cuts,)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("microbatch b (sequences)", "tokens against wanted (%)", whole="x", moving="xy")
        self.line = canvas.line(self.axes, "reference")
        self.wrong = canvas.line(self.axes, "wrong", linestyle="none", markersize=9)
        self.right = canvas.line(self.axes, "right", linestyle="none", markersize=10)
        self.over = [canvas.text(self.axes, ha="center", va="bottom") for _ in range(MUCH)]
        self.under = [canvas.text(self.axes, ha="center", va="top") for _ in range(MUCH)]
        canvas.frame(self.axes, x=(0, 7), y=(-10, 10))

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        largest = values["largest_microbatch"]
        self._frame(canvas, largest)
        low, high = self.axes.get_ylim()
        canvas.hide(self.axes, (1 + largest) / 2, (low + high) / 2)

    def _frame(self, canvas: Canvas, largest: int) -> None:
        canvas.frame(self.axes, x=(0.5 - largest / 30, 0.5 + largest * 31 / 30), xticks=[1, largest])

    def draw(self, canvas: Canvas, result: batch.Wanted) -> None:
        largest = result.ways[-1].microbatch
        off = {way: 100 * way.off / result.tokens for way in result.ways}
        low, high = min(0.0, *off.values()), max(0.0, *off.values())
        room = 0.18 * (high - low) or 1.0
        self._frame(canvas, largest)
        canvas.frame(self.axes, y=(low - room, high + room), yticks=[0, low, high])
        self.line.set_data([0, largest + 1], [0, 0])
        for line, exact in ((self.right, True), (self.wrong, False)):
            mine = [way for way in result.ways if (way.off == 0) == exact]
            line.set_data([way.microbatch for way in mine], [off[way] for way in mine])
        most = min(MUCH, canvas.columns / 4)  # so many words stand side by side
        few = largest <= most and max(way.accumulation for way in result.ways) < 100
        told = result.ways if few else (result.best,)
        for words, sign, side in (
            (self.over, 1, [w for w in told if w.off >= 0]),
            (self.under, -1, [w for w in told if w.off < 0]),
        ):
            _place(words, [(w.microbatch, off[w] + sign * room / 4, f"K = {w.accumulation}") for w in side])

    def tables(self, result: batch.Wanted) -> list[dict[str, Any]]:
        return tables(result)

    def answer(self, result: batch.Wanted) -> float:
        return result.best.accumulation

    def headline(self, result: batch.Wanted) -> str:
        best = result.best
        if result.exact:
            return f"b = {best.microbatch}, K = {best.accumulation:,}: exactly {result.tokens:,} tokens"
        return f"Nothing gives {result.tokens:,} tokens exactly"

    def describe(self, result: batch.Wanted) -> str:
        largest = result.ways[-1]
        if not result.exact:
            near = " and ".join(_way(way, result) for way in (result.below, result.above) if way)
            return (
                f"A batch is a multiple of S × D = {result.smallest:,} tokens, one sequence on every replica, and "
                f"{result.tokens:,} is none. The nearest: {near}."
            )
        others = "; ".join(f"b = {way.microbatch}, K = {way.accumulation:,}" for way in result.exact[1:5])
        also = f" Exact too, with more passes: {others}." if others else ""
        if largest.off:
            also += f" With b = {largest.microbatch}, the largest that fits, no K is exact."
        return f"{_way(result.best, result)}.{also}"


def _way(way: batch.Way, result: batch.Wanted) -> str:
    got = f"{way.microbatch} × {result.replicas} × {way.accumulation:,} sequences, {way.tokens:,} tokens"
    return f"{got} ({way.off:+,})" if way.off else f"{got}, exactly"


class TwoPlans(Experiment[batch.TwoPlans]):
    """Two plans: what stays and what changes."""

    title = "Two plans"
    question = "Plan B: how many updates has the epoch?"
    unit = "updates"
    note = (
        "Modelled: counted, nothing runs; sequences of 4096 tokens, activation memory as many sequences as one replica "
        "holds at a time. Dot: the same in both plans. Cross: it changes; that alone is not wrong."
    )
    run = staticmethod(batch.two_plans)
    shown = (Plan, batch.plan)
    aspect = 0.78

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("plan B, as a multiple of plan A", "", log="x", moving="x")
        self.axes.set_yticks([])
        self.one = canvas.line(self.axes, "reference", marker="|", markersize=11, linestyle="none")
        self.way = canvas.line(self.axes, "wrong", marker="", linewidth=1.5)
        self.wrong = canvas.line(self.axes, "wrong", linestyle="none", markersize=9)
        self.right = canvas.line(self.axes, "right", linestyle="none", markersize=9)
        self.words = [canvas.text(self.axes, ha="left", va="bottom") for _ in range(8)]
        canvas.frame(self.axes, x=(0.2, 5), y=(7.5, -1))

    def draw(self, canvas: Canvas, result: batch.TwoPlans) -> None:
        ratios = [row.b / row.a if row.a else float("nan") for row in result.rows]
        widest = max(2.0, *(max(ratio, 1 / ratio) for ratio in ratios if ratio > 0))
        canvas.frame(self.axes, x=(widest**-1.15, widest**1.15))
        canvas.ticks(self.axes, x=[float(f"{each:.4g}") for each in (1 / widest, 1, widest)])
        for marks in (self.right, self.wrong):
            marks.set_markersize(min(9, canvas.height / 50))  # rows that are close leave room for words alone
        self.one.set_data([1] * len(result.rows), range(len(result.rows)))
        changed = [at for at, row in enumerate(result.rows) if not row.same]
        same = [at for at, row in enumerate(result.rows) if row.same]
        self.right.set_data([1] * len(same), same)
        self.wrong.set_data([ratios[at] for at in changed], changed)
        self.way.set_data(*polyline([(1, at), (ratios[at], at)] for at in changed))
        _place(self.words, [(widest**-1.1, at - 0.22, _row(row)) for at, row in enumerate(result.rows)])

    def tables(self, result: batch.TwoPlans) -> list[dict[str, Any]]:
        rows = [
            [row.name, show(row.a), show(row.b), row.unit, "same" if row.same else "changes"] for row in result.rows
        ]
        return [{"columns": ["", f"A {result.a}", f"B {result.b}", "unit", ""], "rows": rows}]

    def answer(self, result: batch.TwoPlans) -> float:
        return result.rows[2].b

    def headline(self, result: batch.TwoPlans) -> str:
        if len(result.changed) > 1 and not result.rows[0].same:
            return f"A {result.a}, B {result.b}: {len(result.changed)} things change at once"
        same = "the same global batch" if result.rows[0].same else "only the global batch changes"
        return f"A {result.a}, B {result.b}: {same}, {_number(result.rows[0])} sequences"

    def describe(self, result: batch.TwoPlans) -> str:
        changes = [_row(row) for row in result.rows if not row.same]
        listed = f" What changes from A to B: {'; '.join(changes)}." if changes else ""
        return f"{compared(result)}{listed}"


def compared(result: batch.TwoPlans) -> str:
    """What a comparison of two plans can tell."""
    changed, batches = result.changed, f"{result.a.global_batch:,} → {result.b.global_batch:,} sequences"
    if not changed:
        return "Both plans are the same."
    if changed == ("global batch",):
        return f"Only the global batch changes, {batches}, by the accumulation steps alone."
    if result.rows[0].same:
        return (
            f"The global batch stays {result.a.global_batch:,} sequences, so both optimise alike. As systems they "
            f"differ in {' and '.join(changed)}."
        )
    return (
        f"{len(changed)} things change at once: {' and '.join(changed)}. The batch goes {batches}. "
        "Whatever differs afterwards, this comparison cannot tell which of them did it. To change the batch alone, "
        "keep microbatch and replicas and turn the accumulation steps."
    )


def _row(row: batch.Row) -> str:
    return f"{row.name}: {_number(row)}"


def _number(row: batch.Row) -> str:
    a, b = (large(each) if each == int(each) else three(each) for each in (row.a, row.b))
    return a if row.same else f"{a} → {b}"


EXPERIMENTS = (Planner, Wanted, TwoPlans, Timeline, Progress)
