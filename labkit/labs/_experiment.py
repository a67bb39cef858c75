"""The unit of every lab: one thing is varied, one picture shows what became of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from labkit.declare import show
from labkit.device import Spread
from labkit.labs._canvas import Canvas

R = TypeVar("R")


class Experiment(Generic[R]):
    """Parameters, `run`, `draw`, `describe` and a question.

    `run` is a pure function whose signature declares the controls. A long run is a generator: each `yield` is the
    result so far, whose `progress` goes from 0 to 1. `layout` makes the artists once, `draw` moves them to a result,
    `tease` shows what is given and a question mark where the answer will appear.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    unit: ClassVar[str] = ""
    note: ClassVar[str] = ""
    aspect: ClassVar[float] = 0.6
    run: Callable[..., Any]
    shown: tuple[Callable[..., Any], ...] = ()

    def layout(self, canvas: Canvas) -> None:
        """Make the axes and every artist."""
        raise NotImplementedError

    def draw(self, canvas: Canvas, result: R) -> None:
        """Move the artists to a result."""
        raise NotImplementedError

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        """Show what is given before the answer."""
        axes = canvas.figure.axes[0]
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        middle = (left * right) ** 0.5 if axes.get_xscale() == "log" else (left + right) / 2
        canvas.hide(axes, middle, (low * high) ** 0.5 if axes.get_yscale() == "log" else (low + high) / 2)

    def guess(self, canvas: Canvas, values: Mapping[str, Any], prediction: float | None) -> None:
        """Mark the learner's prediction, before and beside the answer; by default no mark."""

    def answer(self, result: R) -> float:
        """The number that the question asks for."""
        raise NotImplementedError

    def headline(self, result: R) -> str:
        """The one message of the picture, in a few words."""
        raise NotImplementedError

    def describe(self, result: R) -> str:
        """What the picture shows, with its numbers, for someone who does not see it."""
        raise NotImplementedError

    def source(self) -> str:
        """The source of the function that ran, and of what it calls to get its numbers."""
        return "\n\n".join(inspect.getsource(inspect.unwrap(f)).rstrip() for f in (*self.shown, self.run))


def table(result: Any) -> dict[str, list[Any]]:
    """A result as a table: one row for each number, or columns where the result holds series.

    >>> from labkit.declare import quantity
    >>> Speed = dataclasses.make_dataclass("Speed", [("rate", float, quantity("what was reached", "GFLOP/s"))])
    >>> table(Speed(160.0))
    {'columns': ['', 'value', 'unit', 'meaning'], 'rows': [['rate', '160', 'GFLOP/s', 'what was reached']]}
    """
    fields = [(field, getattr(result, field.name)) for field in dataclasses.fields(result)]
    series = [(field, list(value)) for field, value in fields if _is_series(value)]
    items = [list(value) for _, value in fields if _is_series(value) and value and dataclasses.is_dataclass(value[0])]
    if items:
        names = [field for field in dataclasses.fields(items[0][0])]
        return {
            "columns": [_head(field) for field in names],
            "rows": [[_cell(getattr(item, field.name)) for field in names] for item in items[0]],
        }
    if series:
        length = max(len(values) for _, values in series)
        columns = [_head(field) for field, values in series if len(values) == length]
        rows = zip(*(values for _, values in series if len(values) == length), strict=True)
        return {"columns": columns, "rows": [[_cell(value) for value in row] for row in rows]}
    rows_of = [
        [f.name.replace("_", " "), _cell(v), f.metadata.get("unit", ""), f.metadata.get("doc", "")] for f, v in fields
    ]
    return {"columns": ["", "value", "unit", "meaning"], "rows": rows_of}


def _head(field: dataclasses.Field[Any]) -> str:
    unit = field.metadata.get("unit", "")
    return field.name.replace("_", " ") + (f" ({unit})" if unit else "")


def _is_series(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def _cell(value: Any) -> str:
    if isinstance(value, Spread):
        return f"{show(value.median)} ({show(value.lower)} … {show(value.upper)})"
    if dataclasses.is_dataclass(value):
        return str(getattr(value, "name", getattr(value, "device", type(value).__name__)))
    return "yes" if value is True else "no" if value is False else show(value)
