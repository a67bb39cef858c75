"""The pipeline lab: what it draws is what was run, at the extremes of every control."""

from __future__ import annotations

import math
from typing import Any

import pytest

import labkit
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.labs import Lab
from labkit.pipeline.panels import EXPERIMENTS
from tests.frame.driven import drawn_while_running


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


def stepped(name: str, **values: object) -> Lab:
    lab = labkit.labs.pipeline(name, **values)
    lab.step()
    return lab


def shown(lab: Lab) -> Any:
    return lab.experiment


def test_the_weights_of_a_mean_of_means() -> None:
    lab = labkit.labs.pipeline("losses")
    lab.predict(72)
    lab.step()
    seen, result = shown(lab), lab.result
    assert lab.page["headline"] == "mean, scale_grads=True: 71.8 % off" and lab.score == pytest.approx(0.003, abs=1e-3)
    assert "1, 12, 3, 7. Their fitted weights × N: 5.75, 0.479, 1.92, 0.821" in lab.text
    right, wrong = seen.marks
    assert list(wrong.get_xdata()) == result.weights.tolist() and list(right.get_xdata()) == []
    assert list(seen.predicted.get_xdata()) == result.predicted.tolist()
    assert seen.words[0].get_text() == "5.75×, n = 1" and seen.words[4].get_text() == ""


def test_the_right_way_is_blue_and_its_answer_is_zero() -> None:
    lab = stepped("losses", loss="sum / N", scale_grads=False)
    right, wrong = shown(lab).marks
    assert list(right.get_ydata()) == [1, 2, 3, 4] and list(wrong.get_xdata()) == []
    assert lab.page["headline"] == "sum / N, scale_grads=False: the full batch’s gradient"
    assert shown(lab).answer(lab.result) == 0
    twice = stepped("losses", loss="sum / N")
    assert shown(twice).answer(twice.result) == pytest.approx(75) and "0.25, 0.25, 0.25, 0.25" in twice.text


def test_six_ways_and_one_is_right() -> None:
    lab = labkit.labs.pipeline("ways")
    lab.predict(1)
    lab.step()
    right, wrong = shown(lab).marks
    assert lab.score == 0 and lab.page["headline"] == "1 of 6 right: sum / N, scale_grads=False"
    assert list(right.get_ydata()) == [5] and list(wrong.get_ydata()) == [0, 1, 2, 3, 4]
    assert list(wrong.get_xdata()) == [way.error for way in lab.result.ways[:5]]
    assert list(shown(lab).predicted.get_xdata()) == [way.predicted for way in lab.result.ways[:5]]
    assert "mean, scale_grads=True: 0.718; mean, scale_grads=False: 3.59; sum, scale_grads=True: 4.75" in lab.text
    equal = stepped("ways", equal=True)
    assert equal.page["headline"] == "2 of 6 right: mean, scale_grads=True; sum / N, scale_grads=False"


def test_a_batch_that_does_not_divide_as_it_is_refused_and_padded() -> None:
    lab = labkit.labs.pipeline("indivisible")
    lab.predict(1)
    lab.step()
    seen = shown(lab)
    assert lab.score == 0 and lab.page["headline"] == "The library stopped"
    assert "7 rows in 4 microbatches: 2, 2, 2, 1. What stopped it: rank 1: ValueError" in lab.text
    assert list(seen.missing.get_xdata()) == [4] and list(seen.missing.get_ydata()) == [2]
    assert len(seen.rows.get_xdata()) == 7 and len(seen.ignored.get_xdata()) == 0
    lab.set(treatment="padded")
    lab.step()
    assert lab.page["headline"] == "1 ignored row added: the full batch’s gradient"
    assert (list(seen.ignored.get_xdata()), list(seen.ignored.get_ydata())) == ([4], [2])
    assert len(seen.rows.get_xdata()) == 7 and len(seen.missing.get_xdata()) == 0
    lab.set(treatment="refused")
    with pytest.raises(labkit.LabError, match="add 1 ignored, as padded does, or try 4"):
        lab.step()


def test_a_tail_stands_after_a_gap() -> None:
    lab = stepped("indivisible", rows=8, tail=3, treatment="padded")
    seen = shown(lab)
    places = sorted(zip(seen.rows.get_xdata(), seen.rows.get_ydata(), strict=True))
    assert len(places) == 11 and places[-3:] == [(6, 1), (6, 2), (7, 1)] and max(seen.ignored.get_xdata()) == 9
    assert "Then 8 rows: 2, 2, 2, 2. Of them 5 ignored rows. Relative error" in lab.text


def test_the_bars_of_a_timeline_are_its_works() -> None:
    lab = labkit.labs.pipeline("timeline", forward=5.0)
    lab.predict(20)
    lab.step()
    seen, result = shown(lab), lab.result
    assert lab.score == pytest.approx(0, abs=1e-9)
    assert lab.page["headline"] == "GPipe, 2 ranks, M = 4: 20 % bubble, keeps 4"
    ends = [x for x in seen.forward.get_xdata() if not math.isnan(x)]
    assert ends[::2][:8] == [work.begin for work in result.modelled if work.kind == "forward"]
    assert len(ends) == 2 * 16 and len(seen.bubbles.get_xdata()) == 3 * 4
    heights = {round(y, 6) for y in seen.backward.get_ydata() if not math.isnan(y)}
    assert heights == {0, 1, 3.4, 4.4}
    assert [words.get_text() for words in seen.names][:5] == ["rank 0", "rank 1", "rank 0", "rank 1", ""]
    assert [words.get_text() for words in seen.kept] == ["keeps 4", "keeps 4", "", ""]
    assert seen.blocks[0].get_text() == "modelled: 20 % bubble"
    assert "by the order of the work" in lab.text and f"{result.measured_total:.3g} ms" in lab.text


def test_bars_carry_their_microbatch_where_there_is_room() -> None:
    cell_panels.page = Page(width=900)
    roomy = shown(stepped("timeline", schedule="1F1B", forward=2.0))
    assert sorted(words.get_text() for words in roomy.numbers if words.get_text()) == sorted("1234" * 4)
    cell_panels.page = Page(width=320)
    narrow = shown(stepped("timeline", schedule="1F1B", forward=2.0, microbatches=8))
    assert not any(words.get_text() for words in narrow.numbers)


def test_the_bubble_falls_along_the_formula() -> None:
    lab = labkit.labs.pipeline("bubble", largest=4, forward=2.0)
    lab.predict(20)
    lab.step()
    seen, result = shown(lab), lab.result
    assert lab.score == pytest.approx(0, abs=1e-9) and lab.page["headline"] == "M from 1 to 4: bubble from 50 % to 20 %"
    assert list(seen.line.get_ydata()) == pytest.approx([50, 100 / 3, 20])
    assert list(seen.dots.dots.get_ydata()) == pytest.approx([100 * spread.median for spread in result.measured])
    assert "M = 2: 33.3 %, measured" in lab.text and "kept 1, 2, 4 inputs" in lab.text


def test_a_cut_batch_rings_the_lowest_point_of_its_line() -> None:
    lab = stepped("cut", batch=64, width=64)
    seen, result = shown(lab), lab.result
    assert list(seen.line.get_ydata()) == [each.modelled for each in result.slices]
    assert list(seen.dots.dots.get_ydata()) == [each.step.median for each in result.slices]
    assert list(seen.ring.get_xdata()) == [result.best.microbatches] == [shown(lab).answer(result)]
    assert min(seen.line.get_ydata()) == seen.ring.get_ydata()[0]
    assert f"by its parts fastest with M = {result.best.microbatches}" in lab.page["headline"]


@pytest.mark.parametrize("name", ["bubble", "cut"])
def test_a_sweep_that_is_under_way_says_how_far_it_is_and_can_be_drawn(name: str) -> None:
    small: dict[str, Any] = {"bubble": {"largest": 4, "forward": 2.0}, "cut": {"batch": 64, "width": 64}}[name]
    lab = labkit.labs.pipeline(name, **small)
    experiment = shown(lab)
    for result in drawn_while_running(lab):
        if result.progress < 1:
            assert experiment.describe(result) == "The steps are under way."
            assert "numbers of microbatches" in experiment.headline(result)


def test_the_source_on_the_page_holds_what_the_ranks_run() -> None:
    assert [kind.name for kind in EXPERIMENTS] == ["losses", "ways", "indivisible", "timeline", "bubble", "cut"]
    for name, words in (("losses", "pipelining.ScheduleGPipe"), ("timeline", "class Sleep"), ("cut", "dist.send")):
        source = Lab([kind() for kind in EXPERIMENTS if kind.name == name]).spec["source"]
        assert words in source and f"def {shown(labkit.labs.pipeline(name)).run.__name__}(" in source
