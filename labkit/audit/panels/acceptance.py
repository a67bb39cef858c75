"""The acceptance test: four gates in their order, and two training runs beside what rounding grows to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.transforms import blended_transform_factory

from labkit.acceptance import Record, candidates
from labkit.acceptance.candidates import TracePair
from labkit.acceptance.record import FAILED, GATES, NOT_RUN, PASSED, UNSURE
from labkit.exercise.verdict import join
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment, tables
from labkit.listing import sources
from labkit.wording import percent, show, three, with_unit

PLACES = (0.02, 0.055, 0.28)  # of the figure: where mark, name and words of a gate stand
FLOOR = 1e-17  # nat: a difference of 0 stands here on a logarithmic axis
LOOPS = (candidates.token_mean, candidates.mean_of_means, candidates.half_sum, candidates.new_trainer)


class Acceptance(Experiment[Record]):
    """A candidate before the four gates."""

    title = "May it be adopted?"
    question = "How many of the four gates does the candidate pass?"
    unit = "gates"
    note = (
        "Measured: audits, gradients, moves of the parameters, traces. Modelled: the clock, with the noise you choose. "
        "Dot: passed. Cross: failed. ?: cannot tell. –: not run, since a gate before it failed. "
        "Below: each timed run of the base and of the new one; the thin line is what the margin asks for."
    )
    run = staticmethod(candidates.acceptance)
    aspect = 0.56

    def source(self) -> str:
        """The loops, the list of candidates, and what tests them."""
        functions: list[Any] = [*LOOPS, candidates.Pair, candidates.acceptance]
        return sources(*functions)

    def layout(self, canvas: Canvas) -> None:
        grid = canvas.figure.add_gridspec(2, 1, height_ratios=(5, 3), hspace=0.12)
        self.gates = canvas.axes("", "", position=grid[0], moving="")
        self.gates.set_axis_off()
        self.gates.spines[:].set_visible(False)
        self.gates.set(xlim=(0, 1), ylim=(3.6, -0.6))
        across = blended_transform_factory(canvas.figure.transFigure, self.gates.transData)
        style: dict[str, Any] = {"va": "center", "transform": across}
        self.names = [canvas.text(self.gates, **style) for _ in GATES]
        self.words = [canvas.text(self.gates, **style) for _ in GATES]
        self.signs = [canvas.text(self.gates, role="muted", ha="center", fontweight="bold", **style) for _ in GATES]
        free: dict[str, Any] = {"linestyle": "none", "markersize": 9, "clip_on": False, "transform": across}
        self.right, self.wrong = (canvas.line(self.gates, role, **free) for role in ("right", "wrong"))
        self.speed = canvas.axes("valid tokens/s of each run", "", position=grid[1], moving="x")
        self.speed.xaxis.set_major_formatter(lambda value, _: three(value))
        canvas.frame(self.speed, y=(-0.6, 1.6))
        self.speed.set_yticks([0, 1], ["new", "base"])
        self.asked = canvas.line(self.speed, "reference")
        self.runs = [canvas.line(self.speed, role, linestyle="none", markersize=7) for role in ("measured", "measured")]
        self.medians = [canvas.line(self.speed, "reference", colour="measured", linewidth=2) for _ in range(2)]
        self.none = canvas.text(self.speed, role="muted", ha="center", va="center")

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        self._untimed(canvas)
        canvas.hide(self.gates, 0.5, 1.5)

    def draw(self, canvas: Canvas, result: Record) -> None:
        marks: dict[str, list[float]] = {PASSED: [], FAILED: []}
        size = canvas.points(27)
        for at, (gate, numbers) in enumerate(zip(result.gates, short(result), strict=True)):
            for words in (self.names[at], self.words[at]):
                words.set_fontsize(size)  # the longest has to stay in a narrow picture
            self.names[at].set(text=gate.name, position=(PLACES[1], at))
            self.words[at].set(text=numbers, position=(PLACES[2], at))
            self.signs[at].set(text={UNSURE: "?", NOT_RUN: "–"}.get(gate.outcome, ""), position=(PLACES[0], at))
            marks.get(gate.outcome, []).append(at)
        for line, outcome in ((self.right, PASSED), (self.wrong, FAILED)):
            line.set_data([PLACES[0]] * len(marks[outcome]), marks[outcome])
        self._time(canvas, result)

    def _time(self, canvas: Canvas, result: Record) -> None:
        rates = result.candidate.throughputs, result.base.throughputs
        self.none.set(text="" if rates[0] else "not timed", position=(0.5, 0.5))
        if not rates[0]:
            self._untimed(canvas)
        for height, values in enumerate(rates):
            self.runs[height].set_data(values, [height] * len(values))
            middle = _median(values)
            self.medians[height].set_data([middle, middle], [height - 0.28, height + 0.28])
        wanted = _median(rates[1]) * (1 + result.margin)
        self.asked.set_data([wanted, wanted], [-0.6, 1.6])
        if rates[0]:
            ends = min(*rates[0], *rates[1], wanted), max(*rates[0], *rates[1], wanted)
            room = 0.06 * (ends[1] - ends[0]) or 1.0
            canvas.frame(self.speed, x=(ends[0] - room, ends[1] + room), xticks=[wanted, *ends])

    def _untimed(self, canvas: Canvas) -> None:
        canvas.frame(self.speed, x=(0, 1))
        canvas.ticks(self.speed, x=[])

    def tables(self, result: Record) -> list[dict[str, Any]]:
        gates = [[gate.name, gate.outcome, gate.said] for gate in result.gates]
        sides = zip(tables(result.base)[0]["rows"], tables(result.candidate)[0]["rows"], strict=True)
        both = [[name, a, b, unit] for (name, a, unit, _), (_, b, _, _) in sides]
        return [
            {"columns": ["gate", "outcome", "why"], "rows": gates},
            {"columns": ["", "base", "candidate", "unit"], "rows": both},
            {"columns": ["what this does not prove"], "rows": [[each] for each in result.not_proved]},
            tables(result)[0],
        ]

    def answer(self, result: Record) -> float:
        return float(result.passed)

    def headline(self, result: Record) -> str:
        stopped = next((gate.name for gate in result.gates if gate.outcome == FAILED), "")
        unsure = [gate.name for gate in result.gates if gate.outcome == UNSURE]
        why = f"it fails at {stopped}" if stopped else f"open at {join(unsure)}" if unsure else "four gates passed"
        return f"{result.verdict.capitalize()}: {why}"

    def describe(self, result: Record) -> str:
        gates = " ".join(
            f"{gate.name.capitalize()}, {gate.outcome}: {gate.said.removeprefix(gate.outcome + ': ')}"
            for gate in result.gates
        )
        count = f"{result.passed} of {len(result.gates)} gates passed"
        more = f"{result.not_proved[0]} The tables list more that is not proved."
        return f"{result.verdict.capitalize()}: {count}. {gates} Not proved: {more}"


def short(record: Record) -> list[str]:
    """Each gate in a few words and its numbers.

    >>> short(candidates.acceptance(candidate="dropped tail"))
    ['60 valid tokens before, 51 after', 'not run', 'not run', 'not run']
    """
    tokens = f"{record.base.tokens} valid tokens before, {record.candidate.tokens} after"
    band = f"rounding {record.loss_band[-1]:.1g}" if record.gates[1].outcome == PASSED else "not judged"
    losses = f"losses {record.loss_difference:.1g} apart, {band}"
    speed = f"{three(record.ratio)} × ({three(record.low)} … {three(record.high)}), margin {percent(record.margin)}"
    numbers = [tokens, _equality(record), losses, speed]
    return ["not run" if gate.outcome == NOT_RUN else words for gate, words in zip(record.gates, numbers, strict=True)]


def _equality(record: Record) -> str:
    if record.candidate.faults:
        return f"audit: {record.candidate.faults[0]}"
    if math.isnan(record.delta_difference):
        return "not asked: the batch may change"
    return f"gradients {record.gradient_difference:.1g} off, rounding {record.gradient_tolerance:.1g}"


def _median(values: tuple[float, ...]) -> float:
    return statistics.median(values) if values else math.nan


def _decade(value: float, _: object = None) -> str:
    """A tick of the differences: all powers of ten below 1 in one way, and the floor as 0."""
    return "0" if value < 2 * FLOOR else f"{value:.0e}" if value < 1 else show(value)


class Traces(Experiment[TracePair]):
    """Two training runs, and how far rounding drives them apart."""

    title = "Two traces, and rounding"
    question = "After how many of the updates are they further apart than rounding explains?"
    unit = "updates"
    note = (
        "Measured. Above: the loss, line for the base, marks for the candidate. Below: how far they are apart; the "
        "line is as far as three control runs went whose gradients were moved by what rounding can do. "
        "Dot: inside. Cross: outside. 0 stands below the powers of ten."
    )
    run = staticmethod(candidates.traces)
    aspect = 0.66

    def source(self) -> str:
        """The loops, and the comparison."""
        return sources(*LOOPS, candidates.traces)

    def layout(self, canvas: Canvas) -> None:
        grid = canvas.figure.add_gridspec(2, 1, height_ratios=(2, 3), hspace=0.14)
        self.loss = canvas.axes("", "loss (nat)", position=grid[0], whole="x", moving="xy")
        self.loss.tick_params(labelbottom=False)
        self.difference = canvas.axes("updates made", "apart (nat)", position=grid[1], whole="x", moving="xy", log="y")
        self.difference.yaxis.set_major_formatter(_decade)
        self.base = canvas.line(self.loss, "reference")
        self.band = canvas.line(self.difference, "reference", linewidth=1.6)
        self.marks = {
            (axes, role): canvas.line(axes, role, linestyle="none", markersize=7)
            for axes in (self.loss, self.difference)
            for role in ("right", "wrong")
        }
        self.rounding = canvas.text(self.difference, "rounding", role="muted", va="bottom", ha="right")

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        self._across(canvas, values["updates"])
        canvas.frame(self.difference, y=(FLOOR, 10.0))
        canvas.hide(self.difference, values["updates"] / 2, 1e-8)

    def _across(self, canvas: Canvas, updates: int) -> None:
        for axes in (self.loss, self.difference):
            canvas.frame(axes, x=(-0.03 * updates, 1.03 * updates), xticks=[0, updates])

    def draw(self, canvas: Canvas, result: TracePair) -> None:
        places = list(range(len(result.base)))
        self._across(canvas, places[-1])
        inside = [d <= most for d, most in zip(result.difference, result.band, strict=True)]
        for (axes, role), line in self.marks.items():
            values = result.candidate if axes is self.loss else [max(d, FLOOR) for d in result.difference]
            points = [at for at in places if inside[at] is (role == "right")]
            line.set_data(points, [values[at] for at in points])
        self.base.set_data(places, result.base)
        self.band.set_data(places, result.band)
        low, high = min(*result.base, *result.candidate), max(*result.base, *result.candidate)
        room = 0.08 * (high - low) or 0.1
        canvas.frame(self.loss, y=(low - room, high + room))
        top = max(*result.difference, *result.band)
        canvas.frame(self.difference, y=(FLOOR / 30, 30 * top), yticks=[FLOOR])
        late = result.band[3 * places[-1] // 4 :]
        height, va = (2 * max(late), "bottom") if inside[-1] else (min(late) / 2, "top")  # away from the marks
        self.rounding.set(position=(places[-1], height), va=va)

    def answer(self, result: TracePair) -> float:
        return float(result.outside)

    def headline(self, result: TracePair) -> str:
        updates = len(result.base) - 1
        if not result.telling:
            return f"No test: rounding grows to {result.band[-1]:.1g} nat in {updates} updates"
        if not result.outside:
            return f"Inside after every update, {updates} in all"
        return f"Outside after {result.outside} of {updates} updates"

    def describe(self, result: TracePair) -> str:
        updates = len(result.base) - 1
        difference = max(result.difference)
        first = f" The first time is after update {result.first}." if result.outside else ""
        far = f"{three(result.changed)} nat"
        telling = f"Training took the loss {far} from where it began"
        if not result.telling:
            telling = f"That is more than 1 % of {far}, how far training took the loss, so nothing is told"
        return (
            f"After {with_unit(updates, 'updates')} the base's loss is {three(result.base[-1])} and the candidate's "
            f"{three(result.candidate[-1])} nat. They are at most {three(difference)} nat apart, and outside of what "
            f"rounding explains after {show(result.outside)} of the updates.{first} Rounding grows to "
            f"{result.band[-1]:.1g} nat. {telling}. In one gradient rounding explains {result.tolerance:.1g}."
        )
