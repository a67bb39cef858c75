"""The throughput lab: what it draws is what was measured, at every extreme of every control."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import labkit
from labkit import throughput
from labkit.device import Spread
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.frame.ticks import linear
from labkit.labs import Lab
from labkit.throughput import compared, loader
from labkit.throughput.panels import EXPERIMENTS
from tests.frame.driven import drawn_while_running, ticks
from tests.virtual import Clock, set_clock

A, C, STEP = 2.0**-10, 2.0**-13, 2.0**-11
NAMES = ("sweep", "pair", "tokens", "decision", "loader")


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(compared, "STEPS", 1)
    return set_clock(monkeypatch, A, C, STEP)


def stepped(name: str, **values: object) -> Lab:
    lab = labkit.labs.throughput(name, **values)
    lab.step()
    return lab


def shown(lab: Lab) -> Any:
    return lab.experiment


def test_the_sweep_draws_dots_the_line_and_its_launches(clock: Clock) -> None:
    lab = labkit.labs.throughput("sweep")
    lab.predict(87.2)
    lab.step()
    seen, result = shown(lab), lab.result
    share = 64 * A / (64 * (A + C) + STEP)
    assert shown(lab).answer(result) == pytest.approx(100 * share) and lab.score == pytest.approx(0, abs=0.02)
    b = [2**k for k in range(7)]
    assert list(seen.measured.dots.get_xdata()) == b == list(seen.line.get_xdata())
    assert list(seen.measured.dots.get_ydata()) == pytest.approx([1e3 * (64 / s * A + 64 * C + STEP) for s in b])
    assert list(seen.line.get_ydata()) == pytest.approx(list(seen.measured.dots.get_ydata()))
    assert list(seen.launches.get_ydata()) == pytest.approx([1e3 * 64 / s * A for s in b])
    (left, right), (low, high) = seen.axes.get_xlim(), seen.axes.get_ylim()
    x, y = seen.words.get_position()
    assert left < x < right and low < y < high and seen.words.get_text() == "K · a"
    ratio = (64 * (A + C) + STEP) / (A + 64 * C + STEP)
    assert lab.page["headline"] == f"b = 64: {ratio:.3g} times the valid tokens/s of b = 1"
    assert "a = 0.977 ms a microbatch, c = 0.122 ms a sequence, optimizer 0.488 ms" in lab.text
    assert "no dot is more than 0 % off" in lab.text
    assert f"At b = 1 the part K · a is {100 * share:.3g} %." in lab.text
    assert "28,000 and 214,000 valid tokens/s, 904 and 6,900 sequences/s. Median and quartiles of 5." in lab.text


def test_a_large_residual_is_said() -> None:
    rows = tuple(
        throughput.row(b, 64, 64, [throughput.Times(t, t, 0.0)] * 3) for b, t in ((1, 1.0), (8, 0.5), (64, 0.1))
    )
    result = throughput.Sweep("made", 64, 64, rows, 1 / 128, 1 / 256, 0.0, 1.0)
    said = EXPERIMENTS[0]().describe(result)
    assert f"no dot is more than {100 * result.residual:.3g} % off" in said and result.residual > 0.3


@pytest.mark.parametrize("launch", [0.0, 1e-9])
def test_no_launches_at_all_can_be_drawn(monkeypatch: pytest.MonkeyPatch, launch: float) -> None:
    set_clock(monkeypatch, launch, C, STEP)
    lab = stepped("sweep", sequences=8)
    assert lab.text and ticks(lab) <= 5 and shown(lab).answer(lab.result) < 0.1
    low, high = shown(lab).axes.get_ylim()
    assert 0 < low < high < 1e3


def test_the_pair_shows_both_ratios(clock: Clock) -> None:
    lab = stepped("pair")
    seen, result = shown(lab), lab.result
    micro, step = (A + 16 * C) / (A + 2 * C), (4 * A + 64 * C + STEP) / (32 * A + 64 * C + STEP)
    assert shown(lab).answer(result) == pytest.approx(step)
    assert lab.page["headline"] == f"The large microbatch takes {micro:.3g} times as long, its step {step:.3g} times"
    for dots, row in zip(seen.dots, result.rows, strict=True):
        assert list(dots.dots.get_xdata()) == pytest.approx([1e3 * row.microbatches.median, 1e3 * row.steps.median])
    assert [words.get_text() for words in seen.words[0]] == ["b = 2: 1.22", "b = 2: 39.6"]
    assert "b = 16: a microbatch takes 2.93 ms (2.93 … 2.93), and a step of K = 4 of them 12.2 ms" in lab.text


def test_a_loss_of_valid_tokens_is_a_cross_and_a_gain_a_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, A, 0.0, STEP, per_position=2.0**-18)
    lab = stepped("tokens")
    seen, result = shown(lab), lab.result
    gains = [result.gain(counts).median for counts in ((1, 1), result.positions, result.valid)]
    assert gains[0] > 1 > gains[2] and shown(lab).answer(result) == pytest.approx(gains[2])
    assert list(seen.measured.dots.get_xdata()) == pytest.approx(gains[:2])
    assert list(seen.bad.dots.get_xdata()) == pytest.approx(gains[2:]) and not len(seen.good.dots.get_xdata())
    assert lab.page["headline"] == f"{gains[0]:.3g} times the steps/s, {gains[2]:.3g} times the valid tokens/s"
    assert f"a step computes 256 positions and not {result.positions[0]:,}" in lab.text
    assert "Every row 8 tokens long" in lab.text and f"valid tokens/s {gains[2]:.3g} (" in lab.text
    lab.set(change="sorted")
    lab.step()
    assert len(seen.good.dots.get_xdata()) == 1 and not len(seen.bad.dots.get_xdata())
    assert lab.text.startswith("Rows sorted by length")


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((100.0, 101.0, 99.0), (110.0, 111.0, 109.0), "faster"),
        ((100.0, 101.0, 99.0), (99.0, 100.0, 98.0), "not faster"),
        ((100.0, 120.0, 80.0), (110.0, 90.0, 130.0), "cannot tell"),
    ],
)
def test_every_verdict_is_drawn_with_its_interval(
    monkeypatch: pytest.MonkeyPatch, before: Any, after: Any, verdict: str
) -> None:
    made = compared.Runs(False, (8, 16), 0.03, before, after, 1.0)
    monkeypatch.setattr(labkit.throughput.panels.compared.Decision, "run", staticmethod(lambda **_: made))
    lab = stepped("decision")
    seen, found = shown(lab), made.decision
    assert found and found.verdict == verdict
    for word, spread in seen.ratio.items():
        drawn = list(spread.bars.get_xdata())[:2]
        assert drawn == ([found.low, found.high] if word == verdict else [])
    assert list(seen.ratio[verdict].dots.get_xdata()) == [found.ratio] and seen.words[1].get_text() == verdict
    assert list(seen.bar.get_xdata()) == [1.03, 1.03] and seen.words[0].get_text() == "1.03"
    for line, side in zip(seen.runs, (before, after), strict=True):
        assert list(line.get_xdata()) == pytest.approx([each / 100 for each in side])
    low, high = seen.axes.get_xlim()
    assert low < min(found.low, 1) and max(found.high, 1.03) < high
    assert lab.page["headline"] == f"{verdict.capitalize()}: margin 3 %, 3 runs each"
    said = found.explain()
    assert f"{said[0].upper()}{said[1:]}" in lab.text and "b = 8 against b = 16: 100 valid tokens/s before" in lab.text
    assert any("verdict" in row for table in lab.page["tables"] for row in table["rows"])


def test_the_same_setting_twice_says_so(clock: Clock) -> None:
    lab = stepped("decision", same=True)
    assert lab.text.startswith("The very same setting twice: ") and lab.result.decision.verdict == "not faster"
    assert shown(lab).answer(lab.result) == 1 and lab.page["headline"] == "Not faster: margin 3 %, 3 runs each"


def ran(load: float, compute: float, plain: float, ahead: float, depth: int = 2, uneven: bool = False) -> Any:
    spreads = [Spread.of([each] * 3) for each in (compute, plain, ahead)]
    return loader.Loader(depth, uneven, load, *spreads, load + compute, max(load, compute), 1.0)


def test_loading_and_computing_stand_in_turn_or_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ran(0.010, 0.012, 0.0225, 0.0125)
    monkeypatch.setattr(labkit.throughput.panels.loader.Loader, "run", staticmethod(lambda **_: made))
    lab = stepped("loader")
    seen = shown(lab)
    assert [list(bar.get_xdata()) for bar in seen.loads] == [[0, 10], [0, 10]]
    assert [list(bar.get_xdata()) for bar in seen.computes] == [[10, 22], [0, 12]]
    assert [line.get_xdata()[0] for line in seen.models] == [22, 12]
    assert [float(dots.dots.get_xdata()[0]) for dots in seen.measured] == [22.5, 12.5]
    assert lab.page["headline"] == "1.8 times as fast with prefetch; the model says 1.83"
    assert (
        "In turn a step takes 22.5 ms (22.5 … 22.5), modelled 22; with up to 2 items loaded ahead 12.5 ms" in lab.text
    )
    assert "the longer" not in lab.text and shown(lab).answer(made) == pytest.approx(1.8)


def test_a_loader_that_is_the_longer_one_gets_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ran(0.030, 0.010, 0.041, 0.031, uneven=True)
    monkeypatch.setattr(labkit.throughput.panels.loader.Loader, "run", staticmethod(lambda **_: made))
    lab = stepped("loader")
    assert "Loading is the longer of the two: no prefetch gets below 30 ms, only a faster loader does." in lab.text
    assert "one in four all of it" in lab.text


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_under_way_says_so_and_can_be_drawn(clock: Clock, name: str) -> None:
    lab = labkit.labs.throughput(name)
    experiment = shown(lab)
    last = 0.0
    for result in drawn_while_running(lab):
        assert last < result.progress <= 1
        last = result.progress
        under_way = any(words in experiment.describe(result) for words in ("being timed", "under way"))
        assert under_way == (result.progress < 1)
    assert last == 1 and math.isfinite(experiment.answer(result))


@given(st.floats(-10, 100), st.floats(0.01, 50))
def test_round_ticks_are_few_and_inside(low: float, width: float) -> None:
    found = linear(low, low + width)
    assert 2 <= len(found) <= 5 and low - 1e-9 <= found[0] and found[-1] <= low + width + 1e-9


def test_the_source_on_the_page_holds_the_step_and_the_decision() -> None:
    assert [kind.name for kind in EXPERIMENTS] == list(NAMES)
    for name, parts in {
        "sweep": ("def step(", "optimizer.zero_grad()", "def fitted(", "def sweep("),
        "decision": ("def decide(", "def arrangements(", "def decision("),
        "loader": ("def items(", "waiting.get()", "def schedule("),
    }.items():
        source = Lab([kind() for kind in EXPERIMENTS if kind.name == name]).spec["source"]
        assert all(part in source for part in parts)
