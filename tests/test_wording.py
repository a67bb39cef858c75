"""Numbers in sentences: rounded as said, and in the singular for one."""

from __future__ import annotations

import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.declare import Range, parameters
from labkit.folders import topics
from labkit.wording import SINGULAR, show, with_unit

SAME_FOR_ONE = {"times", "ms", "s", "thousand voters", "trillion tokens", "× 1024 tokens"}


@given(st.floats(-1e300, 1e300))
def test_numbers_are_shown_within_their_rounding(number: float) -> None:
    assert float(show(number)) == pytest.approx(number, rel=5.1e-4)


def test_every_unit_of_a_page_that_ends_in_s_has_a_singular_or_is_known_to_have_none() -> None:
    experiments = [
        each for topic in topics("panels") for each in importlib.import_module(f"labkit.{topic}.panels").EXPERIMENTS
    ]
    rules = [each.rule for kind in experiments for each in parameters(kind.run).values()]
    units = {kind.unit for kind in experiments} | {rule.unit for rule in rules if isinstance(rule, Range)}
    assert len(units) > 20
    assert {unit for unit in units if unit.endswith("s") and "/" not in unit} <= SINGULAR.keys() | SAME_FOR_ONE


@pytest.mark.parametrize(
    ("number", "unit", "words"),
    [
        (1, "all-reduces", "1 all-reduce"),
        (1.0, "microbatches", "1 microbatch"),
        (1, "optimizer steps", "1 optimizer step"),
        (1, "cases", "1 case"),
        (1, "times", "1 times"),
        (1, "thousand voters", "1 thousand voters"),
        (1, "s", "1 s"),
        (0, "rows", "0 rows"),
        (1.5, "rows", "1.5 rows"),
        (1, "", "1"),
    ],
)
def test_one_of_a_thing_that_can_be_counted_is_singular(number: float, unit: str, words: str) -> None:
    assert with_unit(number, unit) == words
