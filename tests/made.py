"""Experiments made for tests: one quick, one long, one that refuses and one that is broken."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Annotated, Any

from labkit.declare import Choice, Range, Switch, quantity
from labkit.errors import LabError
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Product:
    product: float = quantity("rows times columns", "cells")


@dataclasses.dataclass(frozen=True)
class Count:
    counts: tuple[int, ...] = quantity("what was counted", "steps")
    progress: float = quantity("share that is done")


def product(
    *,
    rows: Annotated[float, Range(1, 100, unit="rows", help="how many")] = 3.0,
    columns: Annotated[int, Range(1, 64, log=True, unit="columns")] = 4,
    kind: Annotated[str, Choice(("full", "empty"))] = "full",
    twice: Annotated[bool, Switch("count each cell twice")] = False,
) -> Product:
    if kind == "empty" and rows > 50:
        raise LabError(f"rows = {rows:g} cannot be empty: try at most 50")
    return Product(0.0 if kind == "empty" else rows * columns * (2 if twice else 1))


def count(*, steps: Annotated[int, Range(1, 1000)] = 5, pause: Annotated[float, Range(0, 1)] = 0.0) -> Iterator[Count]:
    for step in range(1, steps + 1):
        time.sleep(pause)
        yield Count(tuple(range(step)), step / steps)


def broken(*, when: Annotated[int, Range(0, 3)] = 0) -> Product:
    if when:
        raise ZeroDivisionError("a fault of its own")
    return Product(1.0)


class Quick(Experiment[Product]):
    """One dot whose height is the product."""

    name = "quick"
    title = "A product"
    question = "How many cells?"
    unit = "cells"
    run = staticmethod(product)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("rows", "cells")
        canvas.frame(self.axes, x=(0, 100), y=(0, 1000))
        self.dot = canvas.line(self.axes, "right")
        self.words = canvas.text(self.axes)

    def draw(self, canvas: Canvas, result: Any) -> None:
        canvas.frame(self.axes, y=(0, max(1000, result.product)))
        self.dot.set_data([50], [result.product])
        self.words.set_text("here")

    def answer(self, result: Any) -> float:
        return result.product

    def headline(self, result: Any) -> str:
        return f"{result.product:g} cells"

    def describe(self, result: Any) -> str:
        return f"There are {result.product:g} cells."


class Long(Quick):
    """The same picture for a run that takes its time."""

    name = "long"
    run = staticmethod(count)

    def draw(self, canvas: Canvas, result: Any) -> None:
        self.dot.set_data([50], [len(result.counts)])

    def answer(self, result: Any) -> float:
        return len(result.counts)

    def headline(self, result: Any) -> str:
        return f"{len(result.counts)} steps"

    def describe(self, result: Any) -> str:
        return f"Counted {len(result.counts)} steps."


class Broken(Quick):
    """Its run raises something that is no LabError."""

    name = "broken"
    run = staticmethod(broken)
