"""The declaration: what it admits runs exactly as given, what it refuses is answered with a remedy that is true."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.declare import Choice, Parameter, Range, Switch, checked, parameters
from labkit.errors import LabError
from tests.made import product
from tests.strategies import allowed, forbidden

PARAMETERS = list(parameters(product).values())
RANGES = [
    Parameter("x", float, Range(0.125, 64, log=True), 2.0),
    Parameter("x", int, Range(1, 100), 3),
    Parameter("x", int, Range(1, 4096, log=True), 3),
    Parameter("x", float, Range(-1, 1, step=0.25), 0.0),
    Parameter("x", float, Range(1 / 3, 2 / 3), 0.5),
]


def test_parameters_come_from_the_signature() -> None:
    rows, columns, kind, twice = PARAMETERS
    assert (rows.kind, rows.default, rows.rule.help) == (float, 3.0, "how many")
    assert (columns.kind, kind.kind, twice.kind) == (int, str, bool)


@given(st.data(), st.sampled_from(PARAMETERS + RANGES))
def test_what_is_allowed_runs_exactly_as_given(data: st.DataObject, parameter: Parameter) -> None:
    value = data.draw(allowed(parameter))
    assert parameter.check(value) == value
    assert type(parameter.check(value)) is parameter.kind


@given(st.data(), st.sampled_from(PARAMETERS + RANGES))
def test_what_is_not_is_refused_with_the_value_and_a_true_remedy(data: st.DataObject, parameter: Parameter) -> None:
    value = data.draw(forbidden(parameter))
    with pytest.raises(LabError) as caught:
        parameter.check(value)
    sentence = str(caught.value)
    assert parameter.label in sentence and "\n" not in sentence
    remedy = re.search(r": try '?([^' ]+)'?", sentence)
    assert remedy, sentence
    advised: Any = remedy[1]
    if isinstance(parameter.rule, Range):
        advised = float(advised)
    elif isinstance(parameter.rule, Switch):
        advised = advised == "True"
    parameter.check(advised)


@pytest.mark.parametrize("parameter", RANGES, ids=str)
def test_a_slider_stops_at_declared_values_in_order_with_both_ends(parameter: Parameter) -> None:
    rule = parameter.rule
    assert isinstance(rule, Range)
    stops = rule.positions(parameter.kind)
    assert stops == sorted(set(stops)) and (stops[0], stops[-1]) == (rule.low, rule.high)
    assert all(parameter.check(stop) == stop for stop in stops)


def test_a_logarithmic_slider_stops_at_powers_of_two() -> None:
    stops = Range(0.125, 64, log=True).positions(float)
    assert {0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64} <= set(stops)
    assert Range(1, 64, log=True).positions(int) == [1, 2, 4, 8, 16, 32, 64]


def test_a_whole_number_may_come_as_a_float_but_not_with_a_fraction() -> None:
    assert Range(1, 8).check("k", 4.0, int) == 4
    with pytest.raises(LabError, match=r"k = 4\.5 is not a whole number: try 4"):
        Range(1, 8).check("k", 4.5, int)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_is_outside(value: float) -> None:
    with pytest.raises(LabError, match="outside"):
        Range(1, 8).check("k", value, int)


def test_a_misspelt_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(LabError, match="no control 'row' here, only rows, columns, kind, twice: try rows"):
        checked(parameters(product), {"row": 3})


def test_the_first_refused_value_refuses_all() -> None:
    with pytest.raises(LabError, match="columns = 65"):
        checked(parameters(product), {"rows": 2, "columns": 65})


def test_a_function_without_declarations_has_no_parameters() -> None:
    def bare(x: Annotated[int, "words"] = 3, y: int = 4) -> None: ...

    assert parameters(bare) == {}


def test_choices_and_switches_are_words_of_their_own() -> None:
    assert Choice(("a", "b")).check("x", "b", str) == "b"
    assert Switch().check("x", False, bool) is False
