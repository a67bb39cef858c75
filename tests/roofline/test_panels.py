"""The roofline lab: its figures, and every extreme of every control of every experiment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import labkit
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.labs import Lab
from labkit.roofline.panels import Ceiling
from tests.strategies import settings_of


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


@pytest.mark.parametrize(
    ("intensity", "bandwidth", "rate"), [(2, 80, 160), (8, 80, 640), (12.5, 80, 1000), (50, 80, 1000)]
)
def test_the_figures_of_the_ceiling(intensity: float, bandwidth: float, rate: float) -> None:
    lab = labkit.labs.roofline()
    lab.reset()
    lab.set(intensity=intensity, bandwidth=bandwidth)
    lab.predict(rate)
    assert lab.result is None
    lab.step()
    assert (lab.result.attainable, lab.score) == (rate, 0.0)
    assert f"{rate} of 1000 GFLOP/s" in lab.page["headline"]
    lab.reset()
    assert lab.result is None and lab.score is None


def test_it_says_what_it_is_not() -> None:
    note = labkit.labs.roofline().spec["note"]
    for word in ("odelled", "microbatch", "accumulation", "mask", "bubble", "optimizer"):
        assert word in note


def test_the_source_on_the_page_is_the_function_that_runs() -> None:
    source = labkit.labs.roofline("ceiling").spec["source"]
    assert "def attainable(" in source and "return min(" in source and "def ceiling(" in source


def test_a_remedy_of_the_sparse_trap_is_true() -> None:
    lab = labkit.labs.roofline("sparse", accelerator="L4 24 GB", achieved=400)
    with pytest.raises(labkit.LabError, match="try 121"):
        lab.step()
    lab.set(achieved=121)
    lab.step()
    assert lab.result.of_dense == 1


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(settings_of(Ceiling.run), max_size=4))
def test_what_is_drawn_is_the_lower_of_two_limits(moves: list[dict[str, Any]]) -> None:
    lab = Lab([Ceiling()])
    lab.mode = "live"
    for values in moves:
        lab.set(**values)
    experiment, now = lab.experiment, lab.values
    (x,), (y,) = experiment.dot.get_data()
    assert (x, y) == (now["intensity"], min(now["intensity"] * now["bandwidth"], now["ceiling"]))
    low, high = experiment.axes.get_ylim()
    assert low < now["ceiling"] < high
