"""Adam and cadence: what must advance once in an optimizer step, and what becomes of it when it advances K times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit import cadence
from labkit.cadence import schedule as schedules
from labkit.cadence import stepping, updates
from labkit.declare import counted, percent, show, three, times
from labkit.labs._canvas import Canvas
from labkit.labs._experiment import Experiment
from labkit.labs._translated import Translated
from labkit.rules import rule


class Count(Experiment[cadence.Count]):
    """The size of Adam's update where t counts microbatches."""

    name = "count"
    title = "Adam's step count"
    question = "The first update: what share of its right size?"
    unit = "%"
    note = (
        "Line: the closed form. Crosses: measured, two parameters under torch's Adam with a constant gradient; the t "
        "of one advances K times an update. 1 is right."
    )
    run = staticmethod(cadence.count)
    shown = (cadence.adam_step_ratio,)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer step", "update / right update", log="xy", moving="xy")
        canvas.frame(self.axes, x=(1, 1000), y=(0.4, 4))
        canvas.ticks(self.axes, x=[1, 10, 100, 1000], y=[0.5, 1, 2])
        self.one = canvas.line(self.axes, "reference")
        self.formula = canvas.line(self.axes, "modelled")
        self.measured = canvas.line(self.axes, "wrong", linestyle="none", markersize=7)
        self.words = [canvas.text(self.axes, ha=ha, va=va) for ha, va in (("left", "top"), ("center", "bottom"))]

    def draw(self, canvas: Canvas, result: cadence.Count) -> None:
        steps, last = result.steps.tolist(), int(result.steps[-1])
        low, high = min(result.first, result.last, 1.0), max(result.largest, 1.0)
        canvas.frame(self.axes, x=(0.85, last * 1.2), y=(low / 1.5, high * 1.5))
        canvas.ticks(self.axes, x=[10**k for k in range(5) if 10**k <= last])
        canvas.ticks(self.axes, y=sorted({1.0, *(float(f"{end:.2g}") for end in (low, high) if abs(end - 1) > 0.15)}))
        self.one.set_data([0.85, last * 1.2], [1, 1])
        self.formula.set_data(steps, result.formula.tolist())
        self.measured.set_data(steps, result.measured.tolist())
        falls = len(steps) > 1 and result.formula[1] < result.formula[0]
        self.words[0].set(text=three(result.first), va="bottom" if falls else "top")
        self.words[0].set_position((1.08, result.first * (1.06 if falls else 1 / 1.06)))
        peak = three(result.largest) if result.largest_at > 1 else ""
        self.words[1].set(text=peak, position=(result.largest_at, result.largest * 1.08))

    def answer(self, result: cadence.Count) -> float:
        return 100 * result.first

    def headline(self, result: cadence.Count) -> str:
        if result.accumulation_steps == 1:
            return "K = 1: counting microbatches is counting steps"
        peaked = result.largest_at > 1 and three(result.largest) != "1"
        peak = f", {three(result.largest)} times at step {result.largest_at}" if peaked else ""
        return f"The first update is {three(result.first)} times its right size{peak}"

    def describe(self, result: cadence.Count) -> str:
        return (
            f"t advances {times(result.accumulation_steps)} an update. Update over right update: {result.first:.3f} at "
            f"step 1, at most {result.largest:.3f} at step {result.largest_at}, {result.last:.3f} at step "
            f"{int(result.steps[-1])}. Formula and torch differ by {result.off:.1g}, rounding explains "
            f"{result.tolerance.value:.1g}."
        )


class Moments(Experiment[cadence.Moments]):
    """Adam's moments, once for a step and once for a microbatch."""

    name = "moments"
    title = "Moments of microbatches"
    question = "Late in the run: what share of its right size has the update?"
    unit = "%"
    note = "Measured: one parameter, the same noisy gradients for both, learning rate 1."
    run = staticmethod(cadence.moments)
    shown = (cadence.adam_updates,)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer step", "update / learning rate", log="x", moving="xy")
        canvas.frame(self.axes, x=(1, 300), y=(0, 1.2))
        canvas.ticks(self.axes, x=[1, 10, 100], y=[0, 0.5, 1])
        self.lines = [canvas.line(self.axes, role, markersize=5) for role in ("right", "wrong")]
        for word, height, va in (("dots: once a step", 0.98, "top"), ("crosses: K times a step", 0.02, "bottom")):
            canvas.label(self.axes, 0.98, height, word, ha="right", va=va)

    def draw(self, canvas: Canvas, result: cadence.Moments) -> None:
        steps, last = result.steps.tolist(), int(result.steps[-1])
        both = torch.cat([result.right, result.wrong])
        low, high = min(0.0, float(both.min())), max(1.0, float(both.max()))
        room = max(0.2, 0.14 * (high - low))  # for the words above and below
        canvas.frame(self.axes, x=(0.9, last * 1.1), y=(low - room, high + room))
        canvas.ticks(self.axes, x=[10**k for k in range(4) if 10**k <= last], y=_round_ticks(low, high))
        for line, values in zip(self.lines, (result.right, result.wrong), strict=True):
            line.set_data(steps, values.tolist())

    def answer(self, result: cadence.Moments) -> float:
        return 100 * result.ratio

    def headline(self, result: cadence.Moments) -> str:
        return f"Late updates are {percent(result.ratio)} of their right size"

    def describe(self, result: cadence.Moments) -> str:
        return (
            f"Noise of one microbatch: {three(result.noise)} times the mean gradient. The mean update of the second "
            f"half is {three(result.ratio)} of the right one; the limit for slow moments, √((G² + σ²/K) / (G² + σ²)), "
            f"is {three(result.formula)}."
        )


def _round_ticks(low: float, high: float) -> list[float]:
    """0 and 1, and the ends where they lie well outside."""
    ends = [float(f"{end:.1g}") for end in (low, high) if end < -0.5 or end > 1.5]
    return sorted({0.0, 1.0, *ends})


class Path(Experiment[updates.Path]):
    """Two weights on their way down."""

    name = "path"
    title = "The path of the weights"
    question = "How far apart do the paths end, over the length of the right one?"
    unit = "%"
    note = (
        "Measured: two weights, a quadratic loss whose level lines are drawn, the same microbatches for both paths. "
        "Dots: everything once a window. Crosses: by the rule."
    )
    run = staticmethod(updates.path)
    aspect = 0.62

    def source(self) -> str:
        """The loops of the rules, then what walks."""
        loops = [rule(word).loop for word in ("once-per-window", "step-per-microbatch", *updates.NEEDS)]
        return _source(*dict.fromkeys(loops), updates.walk, updates.path)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("first weight", "second weight", moving="xy")
        canvas.frame(self.axes, x=(-1.5, 3), y=(-1, 3))
        canvas.ticks(self.axes, x=[-1, 0, 1, 2], y=[0, 1, 2])
        self.levels = canvas.line(self.axes, "reference", colour="muted")
        self.wrong = canvas.line(self.axes, "wrong", markersize=6)
        self.right = canvas.line(self.axes, "right", markersize=5)
        self.least = canvas.line(self.axes, "reference", linestyle="none", marker="+", markersize=14)
        self.start = canvas.text(self.axes, "start", ha="right", va="center")

    def draw(self, canvas: Canvas, result: updates.Path) -> None:
        both = torch.cat([result.right, result.wrong, result.minimum[None]])
        low, high = both.amin(0), both.amax(0)
        middle, half = (low + high) / 2, 0.6 * (high - low).clamp(min=0.5)
        (left, bottom), (right, top) = (middle - half).tolist(), (middle + half).tolist()
        left -= 0.08 * (right - left)  # room for a word beside the start
        canvas.frame(self.axes, x=(left, right), y=(bottom, top))
        canvas.ticks(self.axes, x=_inside(left, right), y=_inside(bottom, top))
        self.levels.set_data(*_ellipses(result))
        self.right.set_data(*result.right.T.tolist())
        self.wrong.set_data(*result.wrong.T.tolist())
        self.least.set_data(*result.minimum[:, None].tolist())
        x, y = result.right[0].tolist()
        self.start.set_position((x - 0.02 * (right - left), y))

    def answer(self, result: updates.Path) -> float:
        return 0.0 if result.equal else 100 * result.distance / result.travelled

    def headline(self, result: updates.Path) -> str:
        if result.equal:
            return f"{result.optimizer}: the same path within rounding"
        return f"{result.optimizer}: the ends are {percent(result.distance / result.travelled)} of the way apart"

    def describe(self, result: updates.Path) -> str:
        windows = len(result.right) - 1
        found = rule(result.rule)
        return (
            f"{result.rule} changes {found.changes}. After {counted(windows, 'windows')} the loss above the least is "
            f"{three(float(result.wrong_loss[-1]))}, by the right path {three(float(result.right_loss[-1]))}. "
            f"What it looks like: {found.looks_like}. The fix: {found.fix}."
        )


def _source(*functions: Any) -> str:
    return Experiment.source(type("Shown", (Experiment,), {"run": functions[-1], "shown": functions[:-1]})())


def _ellipses(result: updates.Path) -> tuple[list[float], list[float]]:
    """Lines of equal loss around the minimum: that of the start, and four inside it."""
    turn = torch.linspace(0, 2 * math.pi, 73, dtype=torch.float64)
    circle = torch.stack([turn.cos(), turn.sin()])
    root = torch.linalg.cholesky(torch.linalg.inv(result.hessian))
    start = float(result.right_loss[0])
    x: list[float] = []
    y: list[float] = []
    for share in (1.0, 0.5, 0.2, 0.07, 0.02):
        ring: Tensor = result.minimum[:, None] + math.sqrt(2 * share * start) * root @ circle
        x += [*ring[0].tolist(), math.nan]
        y += [*ring[1].tolist(), math.nan]
    return x, y


def _inside(low: float, high: float) -> list[float]:
    """Up to four round numbers between the limits."""
    step = 10.0 ** math.floor(math.log10(high - low))
    step *= next(times for times in (0.2, 0.5, 1, 2, 5, 10) if (high - low) / (times * step) < 4.5)
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


class State(Experiment[updates.State]):
    """One number of the training's state."""

    name = "state"
    title = "Decay, momentum, average"
    question = "After the first optimizer step: how many times its right value?"
    unit = "times"
    note = (
        "Measured with torch's optimizers: dots, once a step; crosses, K times. Lines: the closed form. A weight "
        "without gradient under decoupled decay; the momentum buffer under a constant gradient; an average after its "
        "weight jumped to 1."
    )
    run = staticmethod(updates.state)

    def source(self) -> str:
        """The loops, then what runs them."""
        loops = [stepping.decay_per_microbatch, stepping.memory_per_microbatch, stepping.ema_per_microbatch]
        return _source(*loops, updates.formula, updates.run, updates.state)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer steps", "value", moving="xy")
        canvas.frame(self.axes, x=(0, 40), y=(0, 1))
        canvas.ticks(self.axes, x=[0, 20, 40], y=[0, 1])
        self.lines = [canvas.line(self.axes, role, marker="", linewidth=2) for role in ("right", "wrong")]
        self.dots = [canvas.line(self.axes, role, linestyle="none", markersize=6) for role in ("right", "wrong")]

    def draw(self, canvas: Canvas, result: updates.State) -> None:
        steps = result.steps.tolist()
        top = max(float(result.right.max()), float(result.wrong.max()))
        canvas.frame(self.axes, x=(-0.02 * steps[-1], steps[-1] * 1.05), y=(-0.04 * top, 1.1 * top))
        canvas.ticks(self.axes, x=sorted({0, int(steps[-1]) // 2, int(steps[-1])}), y=[0, float(f"{top:.2g}")])
        every = max(1, len(steps) // 25)
        for at, (measured, formula) in enumerate(
            ((result.right, result.right_formula), (result.wrong, result.wrong_formula))
        ):
            self.lines[at].set_data(steps, formula.tolist())
            self.dots[at].set_data(steps[::every], measured[::every].tolist())

    def answer(self, result: updates.State) -> float:
        return result.ratio

    def headline(self, result: updates.State) -> str:
        names = {"decay-per-microbatch": "the weight", "momentum-per-microbatch": "the buffer"}
        what = names.get(result.rule, "the average")
        return f"After one step {what} is {three(result.ratio)} times what it should be"

    def describe(self, result: updates.State) -> str:
        last, found = int(result.steps[-1]), rule(result.rule)
        return (
            f"After {counted(last, 'optimizer steps')}: {three(float(result.wrong[-1]))}, right is "
            f"{three(float(result.right[-1]))}. Half of the start is gone after {three(result.half_life_wrong)} steps "
            f"and not after {three(result.half_life_right)}. What it looks like: {found.looks_like}. The fix: "
            f"{found.fix}."
        )


class Schedules(Experiment[schedules.Schedules]):
    """The learning rate against optimizer steps and samples."""

    name = "schedules"
    title = "The schedule"
    question = "After how many optimizer steps is the learning rate 0?"
    unit = "steps"
    note = (
        "Measured: torch's LambdaLR, really stepped; linear warmup, then a cosine. Solid: once a step. Dashed: by the "
        "rule. Below: optimizer steps. Above: the sequences seen until then."
    )
    run = staticmethod(schedules.schedules)
    shown = (schedules.warmup_cosine, schedules.stepped)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer steps", "learning rate / base", moving="x")
        canvas.frame(self.axes, x=(0, 500), y=(-0.05, 1.1))
        canvas.ticks(self.axes, x=[0, 250, 500], y=[0, 0.5, 1])
        self.right = canvas.line(self.axes, "right", marker="", linewidth=2.5)
        self.wrong = canvas.line(self.axes, "wrong", marker="", linewidth=2.5)
        self.end = canvas.text(self.axes, ha="left", va="bottom")
        self.seen = [canvas.text(self.axes, ha=ha, va="bottom", size=0.9) for ha in ("left", "center", "right")]

    def draw(self, canvas: Canvas, result: schedules.Schedules) -> None:
        steps, U = result.updates.tolist(), int(result.updates[-1])
        canvas.frame(self.axes, x=(0, U))
        canvas.ticks(self.axes, x=[0, U // 2, U])
        self.right.set_data(steps, result.right.tolist())
        self.wrong.set_data(steps, result.wrong.tolist())
        early = result.wrong_ends < U
        self.end.set(text=f"0 at step {result.wrong_ends}" if early else "", position=(result.wrong_ends, 0.03))
        for words, at in zip(self.seen, (0, U // 2, U), strict=True):
            unit = " sequences" if at == U else ""
            words.set(text=f"{int(result.samples[at]):,}{unit}" if at else "", position=(at, 1.02))

    def answer(self, result: schedules.Schedules) -> float:
        return float(result.wrong_ends)

    def headline(self, result: schedules.Schedules) -> str:
        U = int(result.updates[-1])
        return f"The learning rate is 0 after {result.wrong_ends} of {U} optimizer steps"

    def describe(self, result: schedules.Schedules) -> str:
        return (
            f"{result.rule}: warmup ends after {result.wrong_warmup_ends} optimizer steps, meant were "
            f"{result.warmup_ends}. The learning rates add up to {percent(result.area_ratio)} of the right sum. "
            f"Counted in microbatches, an evaluation every {schedules.EVALUATE_EVERY} runs "
            f"{result.evaluations_wrong} times, meant were {result.evaluations_right}; a loss scale that grows after "
            f"{show(schedules.GROWTH_INTERVAL)} grows {result.scaler_growths_wrong} times, meant "
            f"were {result.scaler_growths_right}."
        )


EXPERIMENTS: Sequence[type[Experiment[Any]]] = (Count, Moments, Path, State, Schedules, Translated)
