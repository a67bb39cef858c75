"""A path and the state of an optimizer, over whole updates."""

from __future__ import annotations

import math

import torch

from labkit.cadence import stepping, updates
from labkit.frame.canvas import Canvas, polyline
from labkit.frame.experiment import Experiment
from labkit.listing import sources
from labkit.rules import rule
from labkit.wording import percent, three, with_unit


class Path(Experiment[updates.Path]):
    """Two weights on their way down."""

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
        return sources(*dict.fromkeys(loops), updates.walk, updates.path)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("first weight", "second weight", moving="xy")
        canvas.frame(self.axes, x=(-1.5, 3), y=(-1, 3))
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
            f"{result.rule} changes {found.changes}. After {with_unit(windows, 'windows')} the loss above the least is "
            f"{three(float(result.wrong_loss[-1]))}, by the right path {three(float(result.right_loss[-1]))}. "
            f"What it looks like: {found.looks_like}. The fix: {found.fix}."
        )


def _ellipses(result: updates.Path) -> tuple[list[float], list[float]]:
    """Lines of equal loss around the minimum: that of the start, and four inside it."""
    turn = torch.linspace(0, 2 * math.pi, 73, dtype=torch.float64)
    circle = torch.stack([turn.cos(), turn.sin()])
    root = torch.linalg.cholesky(torch.linalg.inv(result.hessian))
    start = float(result.right_loss[0])
    shares = (1.0, 0.5, 0.2, 0.07, 0.02)
    rings = (result.minimum[:, None] + math.sqrt(2 * share * start) * root @ circle for share in shares)
    return polyline(ring.T.tolist() for ring in rings)


class State(Experiment[updates.State]):
    """One number of the training's state."""

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
        return sources(*loops, updates.formula, updates.run, updates.state)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer steps", "value", whole="x", moving="xy")
        canvas.frame(self.axes, x=(0, 40), y=(0, 1))
        self.lines = [canvas.line(self.axes, role, marker="", linewidth=2) for role in ("right", "wrong")]
        self.dots = [canvas.line(self.axes, role, linestyle="none", markersize=6) for role in ("right", "wrong")]

    def draw(self, canvas: Canvas, result: updates.State) -> None:
        steps = result.steps.tolist()
        top = max(float(result.right.max()), float(result.wrong.max()))
        last = int(steps[-1])
        canvas.frame(self.axes, x=(-0.02 * last, last * 1.05), y=(-0.04 * top, 1.1 * top), xticks=[0, last])
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
            f"After {with_unit(last, 'optimizer steps')}: {three(float(result.wrong[-1]))}, right is "
            f"{three(float(result.right[-1]))}. Half of the start is gone after {three(result.half_life_wrong)} steps "
            f"and not after {three(result.half_life_right)}. What it looks like: {found.looks_like}. The fix: "
            f"{found.fix}."
        )
