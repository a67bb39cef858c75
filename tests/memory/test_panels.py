"""The memory lab: what it draws is what was counted, at every extreme of every control."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import labkit
from labkit import rules
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.labs import Lab
from labkit.memory import Peak, graphs
from labkit.memory.panels.graphs import amount, apart
from tests.frame.driven import draw, drawn_while_running


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


def stepped(name: str, **values: Any) -> Lab:
    lab = labkit.labs.memory(name, **values)
    lab.step()
    return lab


def drawn(line: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]


def test_dots_rings_and_line_are_what_was_counted() -> None:
    lab = stepped("kept")
    shown, result = lab.experiment, lab.result
    assert drawn(shown.dots) == [(row.microbatch, row.window / 1e6) for row in result.rows]
    assert drawn(shown.rings) == [(row.microbatch, row.alone / 1e6) for row in result.rows]
    (x0, y0), (x1, y1) = drawn(shown.line)
    assert (y1 - y0) / (x1 - x0) == pytest.approx(result.slope / 1e6) and y0 == pytest.approx(result.intercept / 1e6)
    assert [words.get_text() for words in shown.words] == ["K = 4", "K = 2", "K = 1"]
    lab.set(sequences=2)
    lab.step()
    assert [words.get_text() for words in shown.words] == ["K = 2", "K = 1", ""]


def test_the_figures_of_the_curriculum_stand_on_the_page() -> None:
    lab = labkit.labs.memory("kept")
    lab.predict(16)
    lab.step()
    assert lab.score < 0.01
    assert lab.page["headline"] == "290 kB for each sequence of a microbatch, whatever K"
    assert "b = 1 (K = 16): 290 kB" in lab.text and "b = 16 (K = 1): 4.64 MB" in lab.text
    assert "290 kB for each sequence and -99 B at b = 0" in lab.text and "differ by at most 0 %" in lab.text


def test_where_k_matters_the_headline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "token_mean", graphs.summed_loss)
    lab = stepped("kept", sequences=4)
    assert lab.page["headline"].endswith("and K matters, by 300 %")
    assert drawn(lab.experiment.rings) == [(row.microbatch, row.alone / 1e6) for row in lab.result.rows]
    assert drawn(lab.experiment.rings)[0] != drawn(lab.experiment.dots)[0]


def test_a_sweep_is_drawn_while_it_runs() -> None:
    lab = labkit.labs.memory("kept", sequences=8)
    shown = lab.experiment
    results = []
    for result in drawn_while_running(lab):
        assert len(drawn(shown.dots)) == len(result.rows)
        results.append(result)
    first = draw(lab, results[0])
    assert drawn(shown.line) == [] and shown.headline(first) == "b = 1 keeps 290 kB" and shown.answer(first) == 1


def test_every_part_stands_on_the_one_before() -> None:
    lab = stepped("parts")
    shown, result = lab.experiment, lab.result
    for bars, each in ((shown.full, result.full), (shown.cut, result.cut)):
        spans = [drawn(bar) for bar in bars]
        assert spans[0][0][0] == 0 and spans[-1][1][0] == pytest.approx(each.total / 1e6)
        sizes = [1e6 * (high[0] - low[0]) for low, high in spans]
        assert sizes == pytest.approx([each.parameters, each.gradients, each.state, each.kept])
        assert [low[0] for low, _ in spans[1:]] == pytest.approx([high[0] for _, high in spans[:-1]])
    said = ["434 kB", "434 kB", "868 kB", "1.16 MB, K = 4", "4.63 MB, K = 1"]
    assert [words.get_text() for words in shown.words] == said
    assert lab.page["headline"] == "The same gradient in 45.4 % of the bytes"
    assert shown.answer(result) == pytest.approx(45.4, abs=0.05)
    assert lab.page["tables"][0]["rows"][-1] == ["total", str(result.full.total), str(result.cut.total)]


@pytest.mark.parametrize("name", ["parts", "classic"])
def test_gradients_that_differ_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "token_mean", rules.rule("sum-of-means").loop)
    assert stepped(name).page["headline"].startswith("The gradients are ")


def test_the_timelines_are_drawn_as_they_were_counted() -> None:
    lab = stepped("classic", accumulation_steps=3)
    shown, result = lab.experiment, lab.result
    assert lab.page["headline"] == "summed loss: 3 times the peak, for the same gradient"
    for line, marks, run in zip(
        shown.lines, shown.marks, (result.right, result.other, result.checkpointed), strict=True
    ):
        assert drawn(marks) == [(at + 0.5, each / 1e6) for at, each in enumerate(run.highest)]
        saw = drawn(line)
        assert saw[0] == (0, 0) and saw[1::2] == drawn(marks)
        assert saw[2::2] == [(at + 1, each / 1e6) for at, each in enumerate(run.left)]
    assert {y for _, y in drawn(shown.full)} == {result.full / 1e6}
    assert shown.answer(result) == 3 and len(lab.page["tables"][0]["rows"]) == 3
    assert "27.1 % of the loop's" in lab.text


@pytest.mark.parametrize(("loop", "headline"), [
    ("all forwards first", "all forwards first: 4 times the peak, for the same gradient"),
    ("retained graph", "retained graph: 2 times the peak, for the same gradient"),
    ("logged forward", "logged forward: 4 times the peak, for the same gradient"),
    ("logged loss", "logged loss: no more than backward in the loop"),
])  # fmt: skip
def test_what_looks_like_the_mistake(loop: str, headline: str) -> None:
    assert stepped("classic", loop=loop).page["headline"] == headline


def test_a_loop_that_does_no_harm_is_no_vermilion_line() -> None:
    lab = stepped("classic", loop="logged loss")
    shown = lab.experiment
    assert drawn(shown.lines[1]) == drawn(shown.marks[1]) == []
    assert drawn(shown.same) == drawn(shown.lines[0]) != []
    lab.set(loop="summed loss")
    lab.step()
    assert drawn(shown.same) == [] and drawn(shown.lines[1]) != []


def test_words_stay_above_the_axis_and_near_dots_get_none() -> None:
    lab = stepped("classic", accumulation_steps=16, length=8)
    low, high = lab.figure.axes[0].get_ylim()
    assert all(words.get_position()[1] > low + 0.04 * (high - low) for words in lab.experiment.words)
    lab = stepped("kept", sequences=17, length=8)
    assert [words.get_text() for words in lab.experiment.words] == ["K = 5", "K = 3", "K = 1"]


def test_the_source_on_the_page_holds_the_loops() -> None:
    source = labkit.labs.memory("classic").spec["source"]
    for part in ("def token_mean(", "def summed_loss(", "def logged_loss(", "def watch(", "def classic("):
        assert part in source


def test_without_a_gpu_it_says_so_and_shows_what_is_kept() -> None:
    lab = stepped("peak")
    if not lab.result.allocator:
        assert lab.page["headline"] == "No GPU here to ask: what autograd keeps, on the CPU"
        assert "4 microbatches: kept 580 kB" in lab.text and "allocated" not in lab.text
        assert drawn(lab.experiment.bars[0])[1] == (lab.result.kept[0] / 1e6, 1)


def test_with_a_gpu_it_shows_the_allocators_count() -> None:
    lab = labkit.labs.memory("peak")
    shown = lab.experiment
    made = Peak("a GPU", True, ("full batch", "4 microbatches"), (2_000_000, 500_000), (3_000_000.0, 1_500_000.0))
    draw(lab, made)
    assert drawn(shown.strokes) == [(3, 1), (1.5, 0)] and shown.answer(made) == 50
    assert shown.headline(made) == "4 microbatches: 50 % of the full batch's peak on the GPU"
    assert "Full batch: kept 2 MB, allocated 3 MB" in shown.describe(made)
    assert [words.get_text() for words in shown.words] == [
        "full batch: kept 2 MB, allocated 3 MB",
        "4 microbatches: kept 500 kB, allocated 1.5 MB",
    ]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=4), st.floats(0.1, 20))
def test_words_are_kept_apart_and_none_below_its_place(heights: list[float], gap: float) -> None:
    places = apart(heights, gap)
    assert all(place >= height for place, height in zip(places, heights, strict=True))
    assert np.diff(sorted(places)).min(initial=gap) >= gap * (1 - 1e-9)
    assert min(places) == min(heights)


def test_bytes_as_they_are_said() -> None:
    assert [amount(each) for each in (0, 999, 1000, 999_000, 1_000_000, 74_252_040)] == [
        *("0 B", "999 B", "1 kB", "999 kB", "1 MB", "74.3 MB")
    ]
