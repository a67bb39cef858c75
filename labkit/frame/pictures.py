"""What one experiment can show: its own picture, and where its result holds gradients, their direction and entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.text import Text

from labkit.direction import words
from labkit.frame.arrows import Arrows
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.frame.heat_map import HeatMap
from labkit.wording import percent, three


class Own:
    """The picture that an experiment draws by itself."""

    aspect = 0.0  # the experiment's

    def __init__(self, experiment: Experiment[Any]) -> None:
        self.experiment = experiment

    def layout(self, canvas: Canvas) -> None:
        """Make the artists."""
        self.experiment.layout(canvas)

    def draw(self, canvas: Canvas, result: Any) -> None:
        """Move them to a result."""
        self.experiment.draw(canvas, result)

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        """What is given before the answer."""
        self.experiment.tease(canvas, values)

    def guess(self, canvas: Canvas, values: Mapping[str, Any], prediction: float | None) -> None:
        """Mark the prediction."""
        self.experiment.guess(canvas, values, prediction)

    def describe(self, result: Any) -> str:
        """The sentence under it."""
        return self.experiment.describe(result)

    def tables(self, result: Any) -> list[dict[str, Any]]:
        """Its numbers."""
        return self.experiment.tables(result)


class Direction(Own):
    """Correct and this gradient as arrows."""

    aspect = 0.56

    def layout(self, canvas: Canvas) -> None:
        self.arrows = Arrows(canvas)
        self.missing = _words(canvas, self.arrows.axes)

    def draw(self, canvas: Canvas, result: Any) -> None:
        both = self.experiment.gradients(result)
        self.missing.set_text("" if both.drawable else "no arrow: this gradient is not finite")
        if both.drawable:
            self.arrows.draw(both.plane, both.labels, both.names)
        else:
            canvas.only(self.missing)

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        _hide(canvas, self.arrows.axes)

    def guess(self, canvas: Canvas, values: Mapping[str, Any], prediction: float | None) -> None:
        pass

    def describe(self, result: Any) -> str:
        both = self.experiment.gradients(result)
        if not both.drawable:
            return f"{both.names[1].capitalize()} left a gradient that is not finite: it has no direction."
        plane = both.plane
        links = "Thin: the parts of each, head to tail." if len(plane.chain) > 2 else ""
        beyond = "What lies outside this plane cancels in their sum." if plane.outside > 1e-6 else ""
        return " ".join(filter(None, (words(plane, both.names[1]), links, beyond)))


class Entries(Direction):
    """The entries of one parameter."""

    parameter = ""

    def describe(self, result: Any) -> str:
        both = self.experiment.gradients(result)
        if not both.drawable:
            return super().describe(result)
        seen = both.entries(self.parameter)
        rows, columns = seen.reference.shape
        share = float(seen.difference.abs().max()) / (seen.largest or 1.0)
        least = "at most rounding" if both.plane.equal else f"at most {percent(share)} of the largest entry"
        part = (
            ""
            if (rows, columns) == seen.shape
            else f" Shown: the {rows} rows of {seen.shape[0]} with the largest entries."
        )
        return f"{seen.parameter}: the two differ by {least}.{part}"

    def tables(self, result: Any) -> list[dict[str, Any]]:
        both = self.experiment.gradients(result)
        if not both.drawable:
            return super().tables(result)
        seen = both.entries(self.parameter)
        norms = [values.norm(dim=1).tolist() for values in (seen.reference, seen.gradient, seen.difference)]
        rows = [[name, *map(three, each)] for name, each in zip(seen.rows, zip(*norms, strict=True), strict=True)]
        heads = [f"row of {seen.parameter}", *(f"norm, {name}" for name in (*both.names, "difference"))]
        return [{"columns": heads, "rows": rows}, *super().tables(result)]

    def layout(self, canvas: Canvas) -> None:
        self.map = HeatMap(canvas)
        self.missing = _words(canvas, self.map.axes[1])

    def draw(self, canvas: Canvas, result: Any) -> None:
        both = self.experiment.gradients(result)
        self.missing.set_text("" if both.drawable else "this gradient is not finite")
        if both.drawable:
            self.map.draw(canvas, both.entries(self.parameter), (*both.names, "difference"))
        else:
            canvas.only(self.missing)

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        _hide(canvas, self.map.axes[1])


def pictures(experiment: Experiment[Any]) -> dict[str, Own]:
    """The pictures that an experiment declares, by name, the one that carries its message first.

    >>> from labkit.accumulation.panels import Weights
    >>> list(pictures(Weights()))
    ['weights', 'direction', 'entries']
    """
    kinds: dict[str, type[Own]] = {"direction": Direction, "entries": Entries}
    return {name: kinds.get(name, Own)(experiment) for name in experiment.pictures}


def _words(canvas: Canvas, axes: Any) -> Text:
    return canvas.text(axes, transform=axes.transAxes, ha="center", va="center", role="muted")


def _hide(canvas: Canvas, axes: Any) -> None:
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    canvas.hide(axes, (left + right) / 2, (low + high) / 2)
