"""A parameter is declared once, in the signature of the function that uses it.

The same line makes the control on the page, the check with its message, the row of documentation
and the domain that the tests draw from.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

from labkit.errors import LabError
from labkit.wording import as_float, show

Value = float | int | str | bool


@dataclasses.dataclass(frozen=True)
class Range:
    """A number from `low` to `high`, both included.

    >>> Range(1, 8, unit="rows").check("microbatch", 4, int)
    4
    >>> Range(1, 8, unit="rows").check("microbatch", 12, int)
    Traceback (most recent call last):
    labkit.errors.LabError: microbatch = 12 is outside 1 … 8 rows: try 8
    """

    low: float
    high: float
    log: bool = False
    unit: str = ""
    help: str = ""
    step: float | None = None

    def check(self, name: str, value: object, kind: type) -> float | int:
        """The value as a `kind` (float or int), exactly as given; LabError when it is none or outside."""
        number = as_float(value)
        if math.isnan(number):
            raise LabError(f"{name} = {value!r} is not a number: try {self._near(self.low, kind)}")
        if kind is int and math.isfinite(number) and number != int(number):
            whole = max(self.low, min(self.high, math.floor(number)))
            raise LabError(f"{name} = {show(number)} is not a whole number: try {show(whole)}")
        if not self.low <= number <= self.high:
            unit = f" {self.unit}" if self.unit else ""
            allowed = f"{show(self.low)} … {show(self.high)}{unit}"
            raise LabError(f"{name} = {show(number)} is outside {allowed}: try {self._near(number, kind)}")
        return int(number) if kind is int else number

    def _near(self, value: float, kind: type) -> str:
        return f"{kind(max(self.low, min(self.high, value))):.17g}"  # a rounded bound could lie outside

    def positions(self, kind: type) -> list[float]:
        """The values that a slider stops at; a number field reaches every other."""
        if self.log and kind is int:
            doublings = int(math.log2(self.high / self.low))
            values: list[float] = [self.low * 2**k for k in range(doublings + 1)]
        elif self.log:
            count = max(1, round(8 * math.log2(self.high / self.low)))
            values = [float(f"{self.low * (self.high / self.low) ** (k / count):.3g}") for k in range(count + 1)]
        else:
            step = self.step or (1 if kind is int else (self.high - self.low) / 100)
            values = [self.low + step * k for k in range(int((self.high - self.low) / step + 1e-9) + 1)]
        inside = {kind(min(self.high, max(self.low, round(v, 12)))) for v in values}
        return sorted(inside | {kind(self.low), kind(self.high)})


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of a few words.

    >>> Choice(("dense", "sparse")).check("peak", "spares", str)
    Traceback (most recent call last):
    labkit.errors.LabError: peak = 'spares' is none of dense, sparse: try 'sparse'
    """

    options: tuple[str, ...]
    help: str = ""

    def check(self, name: str, value: object, kind: type) -> str:
        """The value itself; LabError when it is none of the options."""
        if value in self.options:
            return str(value)
        near = (difflib.get_close_matches(str(value), self.options, 1, 0.0) or self.options)[0]
        raise LabError(f"{name} = {value!r} is none of {', '.join(self.options)}: try {near!r}")


@dataclasses.dataclass(frozen=True)
class Switch:
    """On or off.

    >>> Switch().check("shuffle", True, bool)
    True
    """

    help: str = ""

    def check(self, name: str, value: object, kind: type) -> bool:
        """The value itself; LabError when it is neither True nor False."""
        if not isinstance(value, bool):
            raise LabError(f"{name} = {value!r} is neither on nor off: try True or False")
        return value


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One declared parameter of a function: its name, type, rule and default."""

    name: str
    kind: type
    rule: Range | Choice | Switch
    default: Value

    @property
    def label(self) -> str:
        """The name as people read it."""
        return self.name.replace("_", " ")

    def check(self, value: object) -> Value:
        """The value, checked against the rule."""
        return self.rule.check(self.label, value, self.kind)


def parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The declared parameters of a function, in the order of its signature.

    >>> from typing import Annotated
    >>> def run(*, steps: Annotated[int, Range(1, 64)] = 8): ...
    >>> parameters(run)["steps"].default
    8
    """
    hints = typing.get_type_hints(function, include_extras=True)
    declared = {}
    for name, parameter in inspect.signature(function).parameters.items():
        for rule in getattr(hints.get(name), "__metadata__", ()):
            if isinstance(rule, (Range, Choice, Switch)):
                kind = typing.get_args(hints[name])[0]
                declared[name] = Parameter(name, kind if kind in (float, int, bool) else str, rule, parameter.default)
    return declared


def checked(declared: Mapping[str, Parameter], values: Mapping[str, object]) -> dict[str, Value]:
    """The values that are given, each checked by its declaration; LabError names the first that fails."""
    for name in values:
        if name not in declared:
            near = (difflib.get_close_matches(name, declared, 1, 0.0) or ["no name at all"])[0]
            raise LabError(f"there is no control {name!r} here, only {', '.join(declared) or 'none'}: try {near}")
    return {name: declared[name].check(value) for name, value in values.items()}


def quantity(doc: str, unit: str = "") -> Any:
    """A field of a result, with what it means and its unit.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Result:
    ...     rate: float = quantity("what the loop reached", "GFLOP/s")
    >>> dataclasses.fields(Result)[0].metadata["unit"]
    'GFLOP/s'
    """
    return dataclasses.field(metadata={"doc": doc, "unit": unit})
