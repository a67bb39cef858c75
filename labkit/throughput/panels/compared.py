"""Two settings of a step: what is faster about the second, and whether it can be told."""

from __future__ import annotations

import math
from typing import Any

from labkit import decision
from labkit.device import Spread
from labkit.frame.canvas import Canvas, quartiles
from labkit.frame.experiment import Experiment, tables
from labkit.throughput import compared, timing
from labkit.wording import percent, three, whole

RATES = ("steps/s", "positions/s", "valid tokens/s")


class Tokens(Experiment[compared.Change]):
    """A faster step with fewer valid tokens."""

    title = "A fast step, fewer tokens"
    question = "How many times the valid tokens/s of the step before?"
    unit = "times"
    note = (
        "Measured, median and quartiles of the ratio of neighbouring steps. Line: as before. The row that counts is "
        "the last: a cross where fewer valid tokens pass in a second."
    )
    run = staticmethod(compared.tokens)
    shown = (timing.step, compared.trim, compared.resize, compared.by_length)
    aspect = 0.45

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("a second, times the step before", "", log2="x", moving="x")
        self.axes.set_yticks([2, 1, 0], labels=["steps", "positions", "valid"])
        self.axes.tick_params(axis="y", length=0)
        canvas.frame(self.axes, x=(0.1, 10), y=(-0.6, 2.6))
        self.one = canvas.line(self.axes, "reference")
        self.measured = canvas.spread(self.axes, markersize=9)
        self.good, self.bad = (canvas.spread(self.axes, role, markersize=10) for role in ("right", "wrong"))
        self.bad.dots.set_linestyle("none")
        self.words = [canvas.text(self.axes, ha="center", va="bottom") for _ in RATES]

    def draw(self, canvas: Canvas, result: compared.Change) -> None:
        gains = [result.gain(counts) for counts in ((1, 1), result.positions, result.valid)]
        if not result.steps.count:
            gains = []
        ends = [1.0, *(end for each in gains for end in (each.lower, each.upper))]
        low, high = min(ends) / 2.5, max(ends) * 2.5
        canvas.frame(self.axes, x=(low, high))
        self.one.set_data([1, 1], [-0.6, 2.6])
        spans = list(map(quartiles, gains))
        self.measured.lay([2, 1][: len(spans)], spans[:2])
        lost = bool(spans) and spans[2][1] < 1
        self.good.lay(*(([0], spans[2:]) if spans and not lost else ([], [])))
        self.bad.lay(*(([0], spans[2:]) if lost else ([], [])))
        for at, words in enumerate(self.words):
            middle = spans[at][1] if spans else 1.0
            x, ha = _beside(middle, 0.1 * math.log(high / low))
            words.set(text=three(middle) if spans else "", position=(x, 2.18 - at), ha=ha)

    def answer(self, result: compared.Change) -> float:
        return result.gain(result.valid).median

    def headline(self, result: compared.Change) -> str:
        if not result.steps.count:
            return "Measuring"
        return f"{three(result.steps.median)} times the steps/s, {three(self.answer(result))} times the valid tokens/s"

    def describe(self, result: compared.Change) -> str:
        if result.progress < 1:
            return "The steps are being timed, before and after in turn."
        what = "Rows sorted by length" if result.change == "sorted" else f"Every row {result.length} tokens long"
        (before, after), (was, now) = result.positions, result.valid
        rates = (
            f"{name} {three(each.median)} ({three(each.lower)} … {three(each.upper)})"
            for name, each in zip(RATES, map(result.gain, ((1, 1), result.positions, result.valid)), strict=True)
        )
        old, new = (three(1e3 * each) for each in result.seconds)
        return (
            f"{what}: a step computes {after:,} positions and not {before:,}, and holds {now:,} valid tokens and not "
            f"{was:,}. It takes {new} ms and not {old}. Times the step before: {', '.join(rates)}."
        )


def _beside(ratio: float, near: float) -> tuple[float, str]:
    """Where the words of a ratio stand, and how: over its dot, or beside it where they would lie on the line at 1."""
    if abs(math.log(ratio)) > near:
        return ratio, "center"
    return (1.02 * ratio, "left") if ratio >= 1 else (ratio / 1.02, "right")


class Decision(Experiment[compared.Runs]):
    """Faster, not faster, or not to be told."""

    title = "Is it really faster?"
    question = "How many times the throughput?"
    unit = "times"
    note = (
        "Dots: measured runs over the median before. Below: the ratio of the medians and its 90 % interval. Line: the "
        "declared margin. Only an interval that lies beyond it counts."
    )
    run = staticmethod(compared.decision)
    shown = (timing.step, compared.run, decision.arrangements, decision.decide)
    aspect = 0.45

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("times the median before", "", moving="x")
        self.axes.set_yticks([2, 1, 0], labels=["before", "after", "ratio"])
        self.axes.tick_params(axis="y", length=0)
        canvas.frame(self.axes, x=(0.5, 2), y=(-0.8, 3.1))
        self.bar = canvas.line(self.axes, "reference")
        self.runs = [canvas.line(self.axes, "measured", markersize=7) for _ in range(2)]
        self.ratio = {word: canvas.spread(self.axes, role, markersize=10) for word, role in ROLES.items()}
        self.ratio["not faster"].dots.set_linestyle("none")
        self.words = [canvas.text(self.axes, va="bottom"), canvas.text(self.axes, ha="center", va="top")]

    def draw(self, canvas: Canvas, result: compared.Runs) -> None:
        found = result.decision
        middle = Spread.of(result.before).median
        runs = [[each / middle for each in side] for side in (result.before, result.after)]
        bar = 1 + result.margin
        ends = [bar, 1.0, *runs[0], *runs[1], *((found.low, found.high) if found else ())]
        wide = max(max(ends) - min(ends), 0.05)
        low, high = min(ends) - 0.15 * wide, max(ends) + 0.15 * wide
        canvas.frame(self.axes, x=(low, high))
        self.bar.set_data([bar, bar], [-0.15, 2.6])
        for at, line in enumerate(self.runs):
            line.set_data(runs[at], [2 - at] * len(runs[at]))
        for word, spread in self.ratio.items():
            mine = [(found.low, found.ratio, found.high)] if found and found.verdict == word else []
            spread.lay([0] * len(mine), mine)
        late = bar > (low + high) / 2
        self.words[0].set(text=f"{bar:.4g}", position=(bar, 2.62), ha="right" if late else "left")
        self.words[1].set(text=found.verdict if found else "", position=((low + high) / 2, -0.27))

    def answer(self, result: compared.Runs) -> float:
        assert result.decision
        return result.decision.ratio

    def headline(self, result: compared.Runs) -> str:
        if not result.decision:
            return f"{len(result.after)} runs of each"
        verdict = result.decision.verdict
        return f"{verdict.capitalize()}: margin {percent(result.margin)}, {len(result.after)} runs each"

    def describe(self, result: compared.Runs) -> str:
        if result.progress < 1 or not result.decision:
            return "The runs are under way, before and after in turn."
        sides = (Spread.of(side) for side in (result.before, result.after))
        (was, *past), (now, *ends) = (map(whole, (side.median, side.lowest, side.highest)) for side in sides)
        said = result.decision.explain()
        which = "The very same setting twice" if result.same else "b = {} against b = {}".format(*result.microbatches)
        return (
            f"{which}: {was} valid tokens/s before ({' … '.join(past)}), {now} after ({' … '.join(ends)}). "
            f"{said[0].upper()}{said[1:]}"
        )

    def tables(self, result: compared.Runs) -> list[dict[str, Any]]:
        return tables(result) + (tables(result.decision) if result.decision else [])


ROLES = {"faster": "right", "cannot tell": "measured", "not faster": "wrong"}
