"""What a declared parameter may be, and what it may not, as hypothesis strategies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from labkit.declare import Choice, Parameter, Range, parameters

NONSENSE = st.one_of(
    st.none(), st.text(max_size=5), st.just(math.nan), st.booleans(), st.just([]), st.complex_numbers()
)


def allowed(parameter: Parameter) -> st.SearchStrategy[Any]:
    """Every value that the declaration admits, its extremes often."""
    rule = parameter.rule
    if isinstance(rule, Range):
        ends = st.sampled_from([parameter.kind(rule.low), parameter.kind(rule.high), parameter.default])
        if parameter.kind is int:
            return ends | st.integers(int(rule.low), int(rule.high))
        return ends | st.floats(rule.low, rule.high)
    return st.sampled_from(rule.options) if isinstance(rule, Choice) else st.booleans()


def forbidden(parameter: Parameter) -> st.SearchStrategy[Any]:
    """Values beyond the declaration."""
    rule = parameter.rule
    if isinstance(rule, Range):
        beyond = st.floats(max_value=rule.low, exclude_max=True) | st.floats(min_value=rule.high, exclude_min=True)
        return beyond | NONSENSE
    if isinstance(rule, Choice):
        return NONSENSE.filter(lambda value: value not in rule.options) | st.integers()
    return st.integers() | st.none() | st.text()


def settings_of(run: Callable[..., Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of a function's parameters, each with an allowed value."""
    return st.fixed_dictionaries({}, optional={name: allowed(p) for name, p in parameters(run).items()})
