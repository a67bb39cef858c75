"""Data parallel: what a rank's microbatches weigh, and where a step synchronises."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from labkit import rules
from labkit.data_parallel import compare, hook, loops, sync
from labkit.declare import counted, percent, three, times
from labkit.labs._canvas import Canvas
from labkit.labs._experiment import Experiment
from labkit.labs._ranks import Death, Disagreement, Empty, Shards, Unlike
from labkit.labs._ranks_time import Time, Wire
from labkit.labs._ranks_weights import Rows, right

ROWS = 16


class Weights(Experiment[compare.Recipe]):
    """The weight of every rank's microbatches in the gradient that DDP left."""

    name = "recipes"
    title = "What a rank's tokens weigh"
    question = "How large is the relative error of the gradient?"
    unit = "%"
    note = (
        "Measured in real processes: fitted from the gradient that each rank has after the all-reduce. Bars: what the "
        "recipe's algebra predicts. 1 is right. A row is a microbatch; lines part the ranks."
    )
    run = staticmethod(compare.recipes)
    aspect = 0.62

    def source(self) -> str:
        """The loops of all recipes, then what a rank runs and what compares."""
        shown: list[Any] = [*loops.RECIPES.values(), loops.quiet, loops.on_all_ranks, loops.replica, loops.run_recipe]
        return "\n\n".join(inspect.getsource(each).rstrip() for each in (*shown, compare.share, compare.recipes))

    def layout(self, canvas: Canvas) -> None:
        self.rows = Rows(canvas, ROWS)

    def draw(self, canvas: Canvas, result: compare.Recipe) -> None:
        self.rows.draw(
            result.owner.tolist(), result.counts.tolist(), result.fitted.tolist(), result.predicted[0].tolist()
        )

    def answer(self, result: compare.Recipe) -> float:
        return 100 * result.relative_error

    def headline(self, result: compare.Recipe) -> str:
        if result.apart > result.tolerance.value:
            return f"{result.recipe}: every rank has a gradient of its own, {percent(result.apart)} apart"
        return f"{result.recipe}: {right(result.relative_error, result.tolerance.value)}"

    def describe(self, result: compare.Recipe) -> str:
        rule = rules.rule(result.recipe)
        said = [
            f"rank {int(rank)}: {three(round(w, 9))} ({int(n)} tokens)"
            for rank, w, n in zip(result.owner, result.fitted[0].tolist(), result.counts, strict=True)
        ]
        fix = "" if rule.right else f" The fix: {loops.WORLD if result.recipe == 'mean-of-means' else rule.fix}."
        fine = result.relative_error <= result.tolerance.value
        off = f"{result.relative_error:.1g}" if fine else percent(result.relative_error)
        apart = f" Another rank's gradient is {percent(result.apart)} away." if result.apart > 1e-9 else ""
        return (
            f"Weight × N of each microbatch in the first rank's gradient: {', '.join(said)}. Norm ratio "
            f"{three(result.norm_ratio)}, cosine {three(result.cosine)}, relative error "
            f"{off}; rounding explains {result.tolerance.value:.1g}.{apart} What it looks "
            f"like: {rule.looks_like}.{fix}"
        )


class NoSync(Experiment[sync.Collectives]):
    """Where no_sync stands, and how many all-reduces run."""

    name = "collectives"
    title = "Where no_sync stands"
    question = "How many all-reduces, if only the backward stands inside?"
    unit = "all-reduces"
    note = (
        "Counted in real DDP by a communication hook. A row says what stands inside no_sync, of all but the last "
        "microbatch. Solid: the gradient is right. Striped: it is wrong, and every rank has its own."
    )
    run = staticmethod(sync.collectives)
    aspect = 0.66

    def source(self) -> str:
        """The six patterns, the hook, and what compares them."""
        shown: list[Any] = [*sync.PATTERNS.values(), hook.counted, hook.averaged, sync.run_patterns, sync.collectives]
        return "\n\n".join(inspect.getsource(each).rstrip() for each in shown)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("all-reduces of one optimizer step", "", moving="x")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 5), y=(len(sync.PATTERNS) - 0.4, -0.6))
        canvas.ticks(self.axes, x=[0, 1, 4])
        self.bars = [[canvas.bar(self.axes, role, linewidth=10) for role in ("right", "wrong")] for _ in sync.PATTERNS]
        self.words = [canvas.text(self.axes, ha="left", va="bottom") for _ in sync.PATTERNS]

    def draw(self, canvas: Canvas, result: sync.Collectives) -> None:
        most = max(each.all_reduces for each in result.patterns)
        canvas.frame(self.axes, x=(0, 1.15 * most))
        canvas.ticks(self.axes, x=sorted({0, 1, result.accumulation_steps}))
        for at, each in enumerate(result.patterns):
            fine = each.relative_error <= result.tolerance
            for good, bar in zip((True, False), self.bars[at], strict=True):
                bar.set_data([0, each.all_reduces] if good == fine else [], [at + 0.2] * 2 if good == fine else [])
            off = "" if fine else f", {percent(each.relative_error)} off"
            self.words[at].set(text=f"{each.name}: {each.all_reduces}{off}", position=(0.01 * most, at))

    def answer(self, result: sync.Collectives) -> float:
        return next(each.all_reduces for each in result.patterns if each.name == "only backward")

    def headline(self, result: sync.Collectives) -> str:
        only = times(int(self.answer(result)))
        return f"no_sync around the backward alone: synchronised {only} all the same"

    def describe(self, result: sync.Collectives) -> str:
        said = []
        for each in result.patterns:
            off = right(each.relative_error, result.tolerance)
            ranks = f", ranks {percent(each.apart)} apart" if each.apart > result.tolerance else ""
            said.append(f"{each.name}: {each.all_reduces}, {off}{ranks}")
        once = result.patterns[0].bytes / result.patterns[0].all_reduces / 1e3
        return (
            f"{counted(result.ranks, 'ranks')}, K = {result.accumulation_steps}, all-reduces of {three(once)} kB. By "
            f"what stands inside no_sync: {'; '.join(said)}."
        )


class Buckets(Experiment[sync.Buckets]):
    """The messages that one gradient travels in."""

    name = "buckets"
    title = "Buckets"
    question = "In how many all-reduces does this gradient travel?"
    unit = "all-reduces"
    note = "Counted in real DDP by a communication hook: eight layers of 1 MiB each. A bar is one all-reduce."
    run = staticmethod(sync.buckets)
    shown = (hook.counted, hook.averaged, sync.run_buckets)
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("gradient sent so far (MiB)", "", moving="")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 8.4), y=(sync.LAYERS - 0.4, -1.6))
        canvas.ticks(self.axes, x=[0, 2, 4, 6, 8])
        self.bars = [canvas.bar(self.axes, "measured") for _ in range(sync.LAYERS)]
        self.words = canvas.text(self.axes, ha="left", va="center")

    def draw(self, canvas: Canvas, result: sync.Buckets) -> None:
        sizes = [size / 2**20 for size in result.sizes.tolist()]
        for at, bar in enumerate(self.bars):
            there = at < len(sizes)
            start = sum(sizes[:at])
            bar.set_data([start, start + sizes[at]] if there else [], [at, at] if there else [])
        spread = result.backward
        said = f"backward {three(spread.median)} ms (half of them {three(spread.lower)} … {three(spread.upper)})"
        self.words.set(text=said, position=(0.1, -1))

    def answer(self, result: sync.Buckets) -> float:
        return result.messages

    def headline(self, result: sync.Buckets) -> str:
        return f"{_often(result)} for the same {three(result.bytes / 2**20)} MiB"

    def describe(self, result: sync.Buckets) -> str:
        sizes = ", ".join(three(size / 2**20) for size in result.sizes.tolist())
        return (
            f"bucket_cap_mb = {three(result.cap)}: {_often(result)} of {sizes} MiB, together "
            f"{result.bytes:,} bytes. One synchronised backward takes {three(result.backward.median)} ms, the fastest "
            f"of {result.backward.count} takes {three(result.backward.lowest)}, the slowest "
            f"{three(result.backward.highest)}."
        )


def _often(result: sync.Buckets) -> str:
    return f"{result.messages} {'all-reduce' if result.messages == 1 else 'all-reduces'}"


EXPERIMENTS: Sequence[type[Experiment[Any]]] = (
    *(Weights, NoSync, Buckets, Time, Wire),
    *(Empty, Unlike, Disagreement, Death, Shards),
)
