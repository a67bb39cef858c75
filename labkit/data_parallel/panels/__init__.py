"""Data parallel: recipes, no_sync and buckets on real ranks, what an all-reduce costs, ranks that are not alike.

>>> import labkit
>>> labkit.labs.data_parallel("recipes", ranks=3).values["ranks"]
3
"""

from __future__ import annotations

from typing import Any

from labkit import rules, workers
from labkit.data_parallel import compare, hook, no_sync, rank_losses
from labkit.data_parallel.panels.allreduce_time import Allreduce
from labkit.data_parallel.panels.killed_rank import Killed
from labkit.data_parallel.panels.overflow_on_one_rank import Overflow
from labkit.data_parallel.panels.rank_weights import Rows, right
from labkit.data_parallel.panels.sharding import Fsdp
from labkit.data_parallel.panels.step_timeline import Timeline
from labkit.data_parallel.panels.uneven_ranks import EmptyRank, Uneven
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.listing import sources
from labkit.wording import percent, three, times, with_unit

ROWS = 16


class Recipes(Experiment[compare.Recipe]):
    """The weight of every rank's microbatches in the gradient that DDP left."""

    title = "What a rank's tokens weigh"
    question = "How large is the relative error of the gradient?"
    unit = "%"
    note = (
        "Measured in real processes: fitted from the gradient that each rank has after the all-reduce. Bars: what the "
        "recipe's algebra predicts. 1 is right. A row is a microbatch; lines part the ranks."
    )
    pictures = ("weights", "direction", "entries")
    run = staticmethod(compare.recipes)
    aspect = 0.62

    def source(self) -> str:
        """The loops of all recipes, then what a rank runs and what compares."""
        shown: list[Any] = [
            *rank_losses.RECIPES.values(),
            rank_losses.quiet,
            rank_losses.on_all_ranks,
            rank_losses.replica,
            rank_losses.run_recipe,
        ]
        return sources(*shown, compare.share, compare.recipes)

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
        fix = "" if rule.right else f" The fix: {rank_losses.WORLD if result.recipe == 'mean-of-means' else rule.fix}."
        fine = result.relative_error <= result.tolerance.value
        off = f"{result.relative_error:.1g}" if fine else percent(result.relative_error)
        apart = f" Another rank's gradient is {percent(result.apart)} away." if result.apart > 1e-9 else ""
        return (
            f"Weight × N of each microbatch in the first rank's gradient: {', '.join(said)}. Norm ratio "
            f"{three(result.norm_ratio)}, cosine {three(result.cosine)}, relative error "
            f"{off}; rounding explains {result.tolerance.value:.1g}.{apart} What it looks "
            f"like: {rule.looks_like}.{fix}"
        )


class Collectives(Experiment[no_sync.Collectives]):
    """Where no_sync stands, and how many all-reduces run."""

    title = "Where no_sync stands"
    question = "How many all-reduces, if only the backward stands inside?"
    unit = "all-reduces"
    note = (
        "Counted in real DDP by a communication hook. A row says what stands inside no_sync, of all but the last "
        "microbatch. Solid: the gradient is right. Striped: it is wrong, and every rank has its own."
    )
    run = staticmethod(no_sync.collectives)
    aspect = 0.66

    def source(self) -> str:
        """The six patterns, the hook, and what compares them."""
        shown: list[Any] = [
            *no_sync.PATTERNS.values(),
            hook.record_bytes,
            hook.average,
            no_sync.run_patterns,
            no_sync.collectives,
        ]
        return sources(*shown)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("all-reduces of one optimizer step", "", whole="x", moving="x")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 5), y=(len(no_sync.PATTERNS) - 0.4, -0.6))
        self.bars = [
            [canvas.bar(self.axes, role, linewidth=10) for role in ("right", "wrong")] for _ in no_sync.PATTERNS
        ]
        self.words = [canvas.text(self.axes, ha="left", va="bottom") for _ in no_sync.PATTERNS]

    def draw(self, canvas: Canvas, result: no_sync.Collectives) -> None:
        most = max(each.all_reduces for each in result.patterns)
        canvas.frame(self.axes, x=(0, 1.15 * most), xticks=[0, result.accumulation_steps, 1])
        for at, each in enumerate(result.patterns):
            fine = each.relative_error <= result.tolerance
            for good, bar in zip((True, False), self.bars[at], strict=True):
                bar.set_data([0, each.all_reduces] if good == fine else [], [at + 0.2] * 2 if good == fine else [])
            off = "" if fine else f", {percent(each.relative_error)} off"
            self.words[at].set(text=f"{each.name}: {each.all_reduces}{off}", position=(0.01 * most, at))

    def answer(self, result: no_sync.Collectives) -> float:
        return next(each.all_reduces for each in result.patterns if each.name == "only backward")

    def headline(self, result: no_sync.Collectives) -> str:
        only = times(int(self.answer(result)))
        return f"no_sync around the backward alone: synchronised {only} all the same"

    def describe(self, result: no_sync.Collectives) -> str:
        said = []
        for each in result.patterns:
            off = right(each.relative_error, result.tolerance)
            ranks = f", ranks {percent(each.apart)} apart" if each.apart > result.tolerance else ""
            said.append(f"{each.name}: {each.all_reduces}, {off}{ranks}")
        once = result.patterns[0].bytes / result.patterns[0].all_reduces / 1e3
        return (
            f"{with_unit(result.ranks, 'ranks')}, K = {result.accumulation_steps}, all-reduces of {three(once)} kB. By "
            f"what stands inside no_sync: {'; '.join(said)}."
        )


class Buckets(Experiment[no_sync.Buckets]):
    """The messages that one gradient travels in."""

    title = "Buckets"
    question = "In how many all-reduces does this gradient travel?"
    unit = "all-reduces"
    note = "Counted in real DDP by a communication hook: eight layers of 1 MiB each. A bar is one all-reduce."
    run = staticmethod(no_sync.buckets)
    shown = (hook.record_bytes, hook.average, no_sync.run_buckets)
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("gradient sent so far (MiB)", "", moving="")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 8.4), y=(no_sync.LAYERS - 0.4, -1.6))
        self.bars = [canvas.bar(self.axes, "measured") for _ in range(no_sync.LAYERS)]
        self.words = canvas.text(self.axes, ha="left", va="center")

    def draw(self, canvas: Canvas, result: no_sync.Buckets) -> None:
        sizes = [size / 2**20 for size in result.sizes.tolist()]
        for at, bar in enumerate(self.bars):
            there = at < len(sizes)
            start = sum(sizes[:at])
            bar.set_data([start, start + sizes[at]] if there else [], [at, at] if there else [])
        spread = result.backward
        said = f"backward {three(spread.median)} ms (half of them {three(spread.lower)} … {three(spread.upper)})"
        self.words.set(text=said, position=(0.1, -1))

    def answer(self, result: no_sync.Buckets) -> float:
        return result.messages

    def headline(self, result: no_sync.Buckets) -> str:
        return f"{_often(result)} for the same {three(result.bytes / 2**20)} MiB"

    def describe(self, result: no_sync.Buckets) -> str:
        sizes = ", ".join(three(size / 2**20) for size in result.sizes.tolist())
        return (
            f"bucket_cap_mb = {three(result.cap)}: {_often(result)} of {sizes} MiB, together "
            f"{result.bytes:,} bytes. One synchronised backward takes {three(result.backward.median)} ms, the fastest "
            f"of {result.backward.count} takes {three(result.backward.lowest)}, the slowest "
            f"{three(result.backward.highest)}."
        )


def _often(result: no_sync.Buckets) -> str:
    return f"{result.messages} {'all-reduce' if result.messages == 1 else 'all-reduces'}"


prepare = workers.warm  # the ranks load torch while the learner reads
EXPERIMENTS = (
    *(Recipes, Collectives, Buckets, Timeline, Allreduce),
    *(EmptyRank, Uneven, Overflow, Killed, Fsdp),
)
