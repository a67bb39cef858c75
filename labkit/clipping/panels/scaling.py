"""Loss scaling: what half precision loses, the scaler's search, and ranks that disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from labkit.clipping import overflow_across_ranks, scaling
from labkit.clipping.overflow_across_ranks import Drift
from labkit.clipping.scaling import Overflows
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.wording import percent, three

LEFT, RIGHT = -46, 26  # log2 of the smallest and the largest entry on the picture


class Underflow(Experiment[scaling.Underflow]):
    """Entries of the gradient that half precision cannot hold."""

    title = "What half precision loses"
    question = "Which share of the gradient's entries becomes exactly 0?"
    unit = "%"
    note = (
        "Measured: a real gradient by torch.autocast on the CPU, beside the same in float64. Solid: all entries. "
        "Dashed, crosses: those that became 0, inf or NaN. Thin lines: the type's smallest and largest number."
    )
    run = staticmethod(scaling.underflow)
    shown = (scaling.half_loss,)
    aspect = 0.55

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("log2 of an entry of S · gradient", "entries (%)")
        canvas.frame(self.axes, x=(LEFT, RIGHT), y=(0, 25))
        self.limits = [canvas.line(self.axes, "reference") for _ in range(2)]
        self.all = canvas.line(self.axes, "right", marker="", drawstyle="steps-mid")
        self.lost = canvas.line(self.axes, "wrong", drawstyle="steps-mid")
        self.words = [canvas.text(self.axes, va="top") for _ in range(2)]

    def draw(self, canvas: Canvas, result: scaling.Underflow) -> None:
        x = [float(size) + 0.5 for size in result.sizes.tolist()]
        top = float(result.share.max())
        canvas.frame(self.axes, y=(0, 1.35 * top))
        self.all.set_data(x, result.share.tolist())
        lost = [(at, share) for at, share in zip(x, result.lost.tolist(), strict=True) if share]
        self.lost.set_data([at for at, _ in lost], [share for _, share in lost])
        for side, place in enumerate((result.smallest, result.largest)):
            inside = LEFT < place < RIGHT
            self.limits[side].set_data([place] * 2 if inside else [], [0, 1.35 * top] if inside else [])
            word = ("smallest", "largest")[side]
            self.words[side].set_text(word if inside else (f"← {word}", f"{word} →")[side])
            edge = (LEFT + 1, RIGHT)[side]
            self.words[side].set(
                x=place - 0.6 if inside else edge, y=1.33 * top, ha="right" if inside or side else "left"
            )

    def answer(self, result: scaling.Underflow) -> float:
        return result.zero

    def headline(self, result: scaling.Underflow) -> str:
        if not result.zero and not result.infinite:
            return f"{result.dtype}: no entry is lost"
        return f"{result.dtype}: {percent(result.zero / 100)} became 0 and {percent(result.infinite / 100)} inf or NaN"

    def describe(self, result: scaling.Underflow) -> str:
        error = (
            "the gradient is useless"
            if math.isnan(result.relative_error)
            else (f"unscaled, the gradient is {percent(result.relative_error)} off")
        )
        return (
            f"{result.dtype} holds numbers from 2^{result.smallest:.0f} to just below 2^{result.largest:.0f}. The "
            f"median entry of the scaled gradient is 2^{round(result.median, 1) + 0.0:.1f}. "
            f"{percent(result.zero / 100)} of the entries became exactly 0 and {percent(result.infinite / 100)} inf or "
            f"NaN; {error}."
        )


class Overflow(Experiment[Overflows]):
    """A scaler that looks for the largest scale, counted right and wrong."""

    title = "The scaler's search"
    question = "The scaler updated at every microbatch: how many steps are skipped?"
    unit = "optimizer steps"
    note = "Measured: torch.amp.GradScaler and real overflows of float16. Dots and crosses: steps that were skipped."
    run = staticmethod(scaling.overflow)
    shown = (scaling.next_scale, scaling.per_window, scaling.per_microbatch, scaling.half_training)
    aspect = 0.66

    def layout(self, canvas: Canvas) -> None:
        grid = canvas.figure.add_gridspec(2, 1, hspace=0.4)
        self.axes = [canvas.axes("", "log2 S", position=grid[0], whole="xy", moving="xy")]
        self.axes += [canvas.axes("optimizer step", "log2 S", position=grid[1], whole="xy", moving="xy")]
        for axes in self.axes:
            self._frame(canvas, axes, 40, 9, 25)
        self.lines = [
            canvas.line(axes, role, marker="", drawstyle="steps-post")
            for axes, role in zip(self.axes, ("right", "wrong"), strict=True)
        ]
        self.marks = [
            canvas.line(axes, role, linestyle="none", markersize=8)
            for axes, role in zip(self.axes, ("right", "wrong"), strict=True)
        ]
        self.words = [canvas.text(axes, va="top", ha="left") for axes in self.axes]

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        for axes in self.axes:
            self._frame(canvas, axes, values["updates"], 9, 25)
        canvas.hide(self.axes[1], values["updates"] / 2, 17)

    def draw(self, canvas: Canvas, result: Overflows) -> None:
        both = [result.scale, result.scale_per_microbatch]
        known = [float(value) for scale in both for value in scale.tolist() if math.isfinite(value)]
        low, high = min(known) - 1, max(known) + 1
        steps = list(range(1, result.updates + 1))
        said = ("a window", result.right_skipped), ("a microbatch", result.wrong_skipped)
        for at, (scale, skips) in enumerate(zip(both, (result.skips, result.skips_per_microbatch), strict=True)):
            self._frame(canvas, self.axes[at], result.updates, low, high)
            self.lines[at].set_data([*steps, steps[-1] + 1], [*scale.tolist(), float(scale[-1])])
            skipped = [step for step, skip in zip(steps, skips.tolist(), strict=True) if skip]
            self.marks[at].set_data(skipped, [float(scale[step - 1]) for step in skipped])
            self.words[at].set_text(f"one update {said[at][0]}: {said[at][1]} skipped")
            self.words[at].set_position((0.5, high + 0.5 * (high - low)))

    def _frame(self, canvas: Canvas, axes: Axes, updates: int, low: float, high: float) -> None:
        x, y = (0, updates + 1), (low, high + 0.5 * (high - low))
        canvas.frame(axes, x=x, y=y, xticks=[1, updates], yticks=[low + 1, high - 1])

    def answer(self, result: Overflows) -> float:
        return result.wrong_skipped

    def headline(self, result: Overflows) -> str:
        if result.progress < 1:
            return f"{result.done} of {result.updates} steps"
        return f"Steps skipped: {result.right_skipped} counted in windows, {result.wrong_skipped} in microbatches"

    def describe(self, result: Overflows) -> str:
        at = result.done - 1
        return (
            f"{result.done} optimizer steps. Skipped with one update of the scaler a window: {result.right_skipped}, "
            f"and S is 2^{float(result.scale[at]):.0f} in the last. Skipped with one update a microbatch: "
            f"{result.wrong_skipped}, and S is 2^{float(result.scale_per_microbatch[at]):.0f}."
        )


class Ranks(Experiment[Drift]):
    """One rank skips a step, the other does not."""

    title = "Ranks that disagree"
    question = "After the last step: how far apart, in per cent of the way?"
    unit = "%"
    note = (
        "Measured, float64. Two ranks in one process, half of the model each; no network. The overflow is an inf put "
        "into one rank's gradient. Distance: from the same training where both skip that step."
    )
    run = staticmethod(overflow_across_ranks.ranks)
    shown = (overflow_across_ranks.owners, overflow_across_ranks.spoil, overflow_across_ranks.coupled_step)
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer step", "distance (% of the way)", whole="x", moving="xy")
        canvas.frame(self.axes, x=(0, 21), y=(0, 50))
        self.when = canvas.line(self.axes, "reference")
        self.right = canvas.line(self.axes, "right", markersize=6)
        self.wrong = canvas.line(self.axes, "wrong", markersize=6)
        self.words = canvas.text(self.axes, "overflow", va="top")

    def draw(self, canvas: Canvas, result: Drift) -> None:
        distance = result.distance.tolist()
        last, top = len(distance), max(1.0, *distance)
        apart = distance[-1] > 0
        at = result.overflow_at
        canvas.frame(self.axes, x=(0, last + 1), y=(-0.05 * top, 1.25 * top), xticks=[1, last])
        self.when.set_data([at, at], [-0.05 * top, 1.25 * top])
        early = at < last / 2
        self.words.set(x=at + (0.01 if early else -0.01) * last, y=1.23 * top, ha="left" if early else "right")
        self.right.set_data([] if apart else range(1, last + 1), [] if apart else distance)
        self.wrong.set_data(range(1, last + 1) if apart else [], distance if apart else [])

    def answer(self, result: Drift) -> float:
        return float(result.distance[-1])

    def headline(self, result: Drift) -> str:
        if result.factor == 1:
            return "Both skip, both halve their scale: no distance"
        return f"{percent(self.answer(result) / 100)} apart, from one step that only one rank skipped"

    def describe(self, result: Drift) -> str:
        first, last = (f"2^{float(scale[-1]):.0f}" for scale in (result.scale_first, result.scale_last))
        said = f"The {result.overflow_on} rank's gradient overflows at step {result.overflow_at}"
        if result.factor == 1:
            return f"{said}. Both ranks skip it, both scales are {first} in the end, and the distance is 0."
        return (
            f"{said}, and that rank alone skips it. In the end the first rank's scale is {first} and the last one's "
            f"{last}: the loss is scaled with the last one, so the first rank's unscaled gradient is "
            f"{three(result.factor)} times what it should be. The parameters are {three(self.answer(result))} % of the "
            f"way apart; the first rank's alone {three(float(result.first[-1]))} %, the last one's "
            f"{three(float(result.last[-1]))} %."
        )
