"""The packing lab: what it draws is what was measured, at every extreme of every control."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import labkit
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.labs import Lab
from labkit.packing import rows
from labkit.packing.panels import EXPERIMENTS
from labkit.wording import percent, three

NAMES = [kind.name for kind in EXPERIMENTS]


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


def stepped(name: str, **values: Any) -> Lab:
    lab = labkit.labs.packing(name, **values)
    lab.step()
    return lab


def drawn(line: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]


def spans(bars: Any) -> list[tuple[float, float, float]]:
    """Row, left and right end of each rectangle."""
    found = [path.get_extents() for path in bars.get_paths()]
    return [(math.floor(each.y0), float(each.x0), float(each.x1)) for each in found]


@pytest.mark.parametrize("values", [{}, {"order": "sorted by length", "heuristic": "next-fit", "documents": 20}])
def test_bars_are_the_documents_and_their_padding(values: dict[str, Any]) -> None:
    lab = stepped("waste", **values)
    (padded, packed), result = lab.experiment.bars, lab.result
    first, second, padding = (spans(bars) for bars in padded)
    assert second == [] and first == [(at, 0, n) for at, n in enumerate(result.lengths)]
    assert padding == [(at, n, w) for at, (n, w) in enumerate(zip(result.lengths, result.widths, strict=True))]
    first, second, padding = (spans(bars) for bars in packed)
    for row, members in enumerate(result.rows):
        ends = np.cumsum([0, *(result.lengths[at] for at in members)]).tolist()
        there = sorted(each[1:] for each in (*first, *second) if each[0] == row)
        assert there == [(ends[at], ends[at + 1]) for at in range(len(members))]
        assert [each[1:] for each in second if each[0] == row] == there[1::2]
        assert [each[1:] for each in padding if each[0] == row] == [(ends[-1], result.length)]


def test_the_figures_of_the_curriculum_stand_on_the_page() -> None:
    lab = labkit.labs.packing("waste")
    lab.predict(50)
    lab.step()
    found, R = lab.result, len(lab.result.rows)
    assert lab.score == pytest.approx(abs(0.50 - found.to_longest))
    said = f"Padding: {percent(found.to_longest)} in batches, {percent(found.in_rows)} in packed rows"
    assert lab.page["headline"] == said and found.to_longest > 0.3 > 0.1 > found.in_rows
    assert f"Each padded to 256: {percent(found.to_length)} is padding" in lab.text
    assert f"Packed into {R} rows of 256" in lab.text and f"fewer than {found.fewest} rows" in lab.text


@pytest.mark.parametrize(("mask", "headline", "leaks"), [
    ("plain causal", "The loss leaks into other documents: {} of its own", True),
    ("block causal", "Nothing leaks: 0 to the last bit", False),
    ("block, both ways", "No leak between documents, but tokens see their own targets", False),
    ("block, off by one", "The loss leaks into other documents: {} of its own", True),
])  # fmt: skip
def test_the_map_shows_what_leaks_and_nothing_else(mask: str, headline: str, leaks: bool) -> None:
    lab = stepped("leak", mask=mask)
    shown, result = lab.experiment, lab.result
    assert lab.page["headline"] == headline.format(percent(result.leaked))
    assert shown.answer(result) == 100 * result.leaked and (result.leaked > 0.1) == leaks
    assert ("a token looks at what it shall predict" in lab.text) == (mask == "block, both ways")
    own, leaked = (np.ma.filled(image.get_array(), np.nan) for image in (shown.own, shown.leaked))
    past = rows.block_causal(result.lengths).numpy()
    assert np.isnan(own[~past]).all() and np.isnan(leaked[past]).all()
    sizes = np.nan_to_num(result.map.numpy())
    assert np.nan_to_num(10 ** np.where(past, own, leaked)) == pytest.approx(sizes, rel=1e-12)
    assert np.isnan(leaked).all() != (mask != "block causal")
    rows_shown = [row[1:] for row in lab.page["tables"][0]["rows"]]
    assert rows_shown == [[three(size) for size in row] for row in result.between.tolist()]


def test_boxes_stand_around_the_documents_and_ticks_where_they_begin() -> None:
    lab = stepped("leak", documents=5, longest=24, seed=3)
    shown, lengths = lab.experiment, lab.result.lengths
    a, b, *_ = lengths
    assert drawn(shown.boxes)[:5] == [(0, 0), (a, 0), (a, a), (0, a), (0, 0)]
    assert drawn(shown.boxes)[6:8] == [(a, a), (a + b, a)]
    starts = [sum(lengths[:at]) for at in range(5)]
    wide = [start for start, n in zip(starts, (99, *lengths), strict=False) if n > sum(lengths) / 12]
    assert list(shown.axes.xaxis.get_majorticklocs()) == list(shown.axes.yaxis.get_majorticklocs()) == wide


def test_every_way_to_label_is_a_bar_and_the_right_one_a_dot() -> None:
    lab = stepped("boundary")
    shown, result = lab.experiment, lab.result
    assert drawn(shown.right) == [(100 * result.ways[0].relative_error, 3)] and drawn(shown.bars[0]) == []
    for at, way in enumerate(result.ways[1:], 1):
        assert drawn(shown.bars[at]) == [(0, 3 - at), (100 * way.relative_error, 3 - at)]
    assert shown.words[0].get_text() == "first ignored: equal within rounding"
    for words, (across, lost), way in zip(shown.words[1:], ((3, 0), (3, 4), (0, 4)), result.ways[1:], strict=True):
        said = f"{way.name}: {percent(way.relative_error)}, {across} across, {lost} lost"
        assert words.get_text() == said
    off = percent(result.ways[1].relative_error)
    assert lab.page["headline"] == f"Wrong targets: 3 of {result.ways[1].targets}. The gradient is {off} off"
    assert shown.answer(result) == 100 * result.ways[1].relative_error
    assert f"One by one: {result.ways[0].targets} targets, loss {result.loss:.3f}" in lab.text


def test_learned_positions_get_a_cross_and_rotary_ones_a_dot() -> None:
    lab = stepped("positions")
    shown, kinds = lab.experiment, lab.result.kinds
    assert drawn(shown.wrong) == [(kinds[1].relative_error, 2)]
    assert drawn(shown.right) == [(kinds[at].relative_error, 3 - at) for at in (0, 2, 3)]
    assert {x for x, _ in drawn(shown.bound)} == {max(kind.tolerance.value for kind in kinds)}
    off = percent(kinds[1].relative_error)
    said = ["learned, restart: equal", f"learned, run on: {off}", "rotary, restart: equal", "rotary, run on: equal"]
    assert [words.get_text() for words in shown.words] == said
    assert lab.page["headline"] == f"Running on: learned is {off} off, rotary equal"
    assert shown.answer(lab.result) == 100 * kinds[1].relative_error


def test_the_curves_go_through_dots_and_crosses() -> None:
    lab = stepped("mixture", share=0.5)
    shown, result = lab.experiment, lab.result
    for curve, cosines in zip(shown.curves, result.cosines, strict=True):
        assert drawn(curve) == list(zip((100 * result.shares).tolist(), cosines.tolist(), strict=True))
    for marks, way in zip((shown.right, shown.wrong), result.ways, strict=True):
        assert drawn(marks) == [(100 * way.share, cosine) for cosine in way.cosines]
        for curve, cosine in zip(shown.curves, way.cosines, strict=True):
            assert np.interp(100 * way.share, *curve.get_data()) == pytest.approx(cosine, abs=1e-3)
    way = result.ways[1]
    assert lab.page["headline"] == f"50 % docstrings by documents is {percent(way.share)} of the gradient"
    assert shown.answer(result) == 100 * way.share and f"{percent(way.relative_error)} off the gradient" in lab.text
    assert [words.get_text() for words in shown.names] == ["docstrings", "help"]


def test_the_weights_are_drawn_step_by_step() -> None:
    lab = stepped("order")
    shown, result = lab.experiment, lab.result
    assert drawn(shown.dots) == drawn(shown.line) == [(at, 100 * each) for at, each in enumerate(result.apart.tolist())]
    assert shown.answer(result) == 100 * result.end and shown.end.get_text() == percent(result.end)
    assert lab.page["headline"] == f"The same examples, another order: weights {percent(result.end)} apart"
    assert f"{result.first[0]} and {result.first[1]} targets. Their gradients differ by" in lab.text
    assert "every document once" in lab.text
    assert f"differ by {percent(result.step_error)}, cosine {three(result.step_cosine)}" in lab.text


def test_a_single_batch_is_drawn_flat() -> None:
    lab = stepped("order", examples=8, batch=8)
    assert lab.page["headline"] == "One batch holds all examples, and knows no order"
    low, high = lab.figure.axes[0].get_ylim()
    assert 100 * lab.result.end < (high - low) / 100


@pytest.mark.parametrize(("name", "parts"), [
    ("waste", ("def packed(", "def tightest(", "def waste(")),
    ("leak", ("def block_causal(", "def block_off_by_one(", "def forward(", "def leak(")),
    ("boundary", ("def apart(", "def wrong_end(", "def summed_loss(", "def boundary(")),
    ("positions", ("def rotate(", "def positions_of(", "def positions(")),
    ("mixture", ("def by_documents(", "def by_tokens(", "def mixture(")),
    ("order", ("def fixed_mean(", "def epoch(", "def order(")),
])  # fmt: skip
def test_the_source_on_the_page_holds_what_ran(name: str, parts: tuple[str, ...]) -> None:
    source = labkit.labs.packing(name).spec["source"]
    assert all(part in source for part in parts)


@pytest.mark.parametrize("name", NAMES)
def test_before_the_answer_a_question_mark_stands_inside_the_picture(name: str) -> None:
    lab = labkit.labs.packing(name)
    ((axes, mark),) = ((axes, text) for axes in lab.figure.axes for text in axes.texts if text.get_text() == "?")
    (x, y), (left, right), (low, high) = mark.get_position(), sorted(axes.get_xlim()), sorted(axes.get_ylim())
    assert mark.get_visible() and left < x < right and low < y < high
