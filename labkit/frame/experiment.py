"""The unit of every lab: one thing is varied, one picture shows what became of it."""

from __future__ import annotations

import dataclasses
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from labkit.device import Spread
from labkit.frame.canvas import Canvas
from labkit.gradients import Gradients
from labkit.listing import sources
from labkit.wording import show

R = TypeVar("R")
WHERE = "the example in docs/contributing.md"


class Experiment(Generic[R]):
    """Parameters, `run`, `draw`, `describe` and a question.

    `run` is a pure function whose signature declares the controls. A long run is a generator: each `yield` is the
    result so far, whose `progress` goes from 0 to 1. `layout` makes the artists once, `draw` moves them to a result,
    `tease` shows what is given and a question mark where the answer will appear.
    """

    name: ClassVar[str]  # of `run`, unless a class says otherwise
    title: ClassVar[str]
    question: ClassVar[str]
    unit: ClassVar[str] = ""
    note: ClassVar[str] = ""
    aspect: ClassVar[float] = 0.6
    pictures: ClassVar[tuple[str, ...]] = ("picture",)  # "direction" and "entries" are drawn from its gradients
    run: Callable[..., Any]
    shown: tuple[Callable[..., Any], ...] = ()

    def __init_subclass__(cls) -> None:
        """Refuse a class that is not complete, in one sentence, when it is made."""
        super().__init_subclass__()
        missing = [part for part in ("run", "title", "question") if not hasattr(cls, part)]
        missing += [part for part, each in vars(Experiment).items() if getattr(cls, part) is each and _abstract(each)]
        if missing:
            raise TypeError(f"the experiment {cls.__name__} lacks {', '.join(missing)}: try {WHERE}")
        if "name" not in vars(cls):
            cls.name = inspect.unwrap(cls.run).__name__
        if cls.__name__ != cls.name.title().replace("_", ""):
            fitting = cls.name.title().replace("_", "")
            raise TypeError(f"the experiment {cls.__name__} runs {cls.name!r}: try class {fitting}")

    @abstractmethod
    def layout(self, canvas: Canvas) -> None:
        """Make the axes and every artist."""

    @abstractmethod
    def draw(self, canvas: Canvas, result: R) -> None:
        """Move the artists to a result."""

    def gradients(self, result: R) -> Gradients:
        """This gradient and the correct one, where `pictures` names their direction or entries."""
        both: Gradients = result.gradients  # type: ignore[attr-defined]
        return both

    def tease(self, canvas: Canvas, values: Mapping[str, Any]) -> None:
        """Show what is given before the answer."""
        axes = canvas.figure.axes[0]
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        middle = (left * right) ** 0.5 if axes.get_xscale() == "log" else (left + right) / 2
        canvas.hide(axes, middle, (low * high) ** 0.5 if axes.get_yscale() == "log" else (low + high) / 2)

    def guess(self, canvas: Canvas, values: Mapping[str, Any], prediction: float | None) -> None:
        """Mark the learner's prediction, before and beside the answer; by default no mark."""

    @abstractmethod
    def answer(self, result: R) -> float:
        """The number that the question asks for."""

    @abstractmethod
    def headline(self, result: R) -> str:
        """The one message of the picture, in a few words."""

    @abstractmethod
    def describe(self, result: R) -> str:
        """What the picture shows, with its numbers, for someone who does not see it."""

    def tables(self, result: R) -> list[dict[str, Any]]:
        """The result's numbers, for those who want to copy them."""
        return tables(result)

    def source(self) -> str:
        """The source of the function that ran, and of what it calls to get its numbers."""
        return sources(*self.shown, self.run)


def _abstract(part: object) -> bool:
    return getattr(part, "__isabstractmethod__", False)


def tables(result: Any) -> list[dict[str, Any]]:
    """A result as tables: its numbers a row each; then its series as columns; then its lists of records.

    >>> from labkit.declare import quantity
    >>> Speed = dataclasses.make_dataclass("Speed", [("rate", float, quantity("what was reached", "GFLOP/s"))])
    >>> tables(Speed(160.0))
    [{'columns': ['', 'value', 'unit', 'meaning'], 'rows': [['rate', '160', 'GFLOP/s', 'what was reached']]}]
    """
    fields = [(field, getattr(result, field.name)) for field in dataclasses.fields(result)]
    single = [
        [field.name.replace("_", " "), _cell(value), field.metadata.get("unit", ""), field.metadata.get("doc", "")]
        for field, value in fields
        if not _is_series(value) and not isinstance(value, Gradients)
    ]
    series = [(field, list(value)) for field, value in fields if _is_series(value) and len(value)]
    records = [values for _, values in series if dataclasses.is_dataclass(values[0])]
    plain = [(field, values) for field, values in series if not _is_series(values[0]) and values not in records]
    found = [{"columns": ["", "value", "unit", "meaning"], "rows": single}] if single else []
    for length in sorted({len(values) for _, values in plain}):
        columns = [(field, values) for field, values in plain if len(values) == length]
        rows = zip(*(values for _, values in columns), strict=True)
        found.append({"columns": [_head(f) for f, _ in columns], "rows": [list(map(_cell, row)) for row in rows]})
    return found + [_records(values) for values in records]


def _records(items: list[Any]) -> dict[str, Any]:
    names = dataclasses.fields(items[0])
    rows = [[_cell(getattr(item, field.name)) for field in names] for item in items]
    return {"columns": [_head(field) for field in names], "rows": rows}


def _head(field: dataclasses.Field[Any]) -> str:
    unit = field.metadata.get("unit", "")
    return field.name.replace("_", " ") + (f" ({unit})" if unit else "")


def _is_series(value: Any) -> bool:
    """Something with items in order; a tensor without dimensions is a number."""
    return isinstance(value, (tuple, list)) or getattr(value, "ndim", 0) > 0


def _cell(value: Any) -> str:
    if isinstance(value, Spread):
        return f"{show(value.median)} ({show(value.lower)} … {show(value.upper)})"
    if isinstance(value, Mapping):
        return ", ".join(map(str, value))
    if dataclasses.is_dataclass(value):
        return str(getattr(value, "name", getattr(value, "device", value)))
    value = value.item() if hasattr(value, "item") else value
    return "yes" if value is True else "no" if value is False else show(value)
