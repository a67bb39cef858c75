"""The audit lab: what it draws is what the audit found, at every extreme of every control."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import labkit
from labkit.audit import bug_hunt
from labkit.audit.bug_hunt import suspects
from labkit.audit.bug_hunt.hidden import WORDS
from labkit.audit.panels import EXPERIMENTS
from labkit.audit.panels.report import WeightPlot, title, weight
from labkit.frame import cell_panels
from labkit.frame.canvas import Canvas
from labkit.frame.style import DARK, LIGHT, Page
from labkit.labs import Lab

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


def stepped(name: str, **values: Any) -> Lab:
    lab = labkit.labs.audit(name, **values)
    lab.step()
    return lab


def drawn(weighed: Any) -> dict[int, tuple[str, float]]:
    """Role and height of every microbatch's mark."""
    found = {}
    for role in ("right", "wrong"):
        for x, y in zip(*getattr(weighed, role).get_data(), strict=True):
            found[int(x)] = (role, float(y))
    return found


@pytest.mark.parametrize("loop", "ABCD")
@pytest.mark.parametrize("K", [2, 5, 8])
def test_marks_are_the_fitted_weights_and_their_shape_says_whether_they_are_right(loop: str, K: int) -> None:
    lab = stepped("loops", loop=loop, accumulation_steps=K)
    shown, weights = lab.experiment.plot, lab.result.token_weights
    marks = drawn(shown)
    assert set(marks) == set(range(1, K + 1))
    for at, value in enumerate(weights, 1):
        role = "right" if abs(value - 1) < 1e-6 else "wrong"
        assert marks[at] == (role, pytest.approx(value))
    low, high = shown.axes.get_ylim()
    assert all(low < value < high for value in (*weights, 1.0))
    assert [words.get_text() for words in shown.counts[:K]] == list(map(str, lab.result.counts))
    sides = [words.get_va() for words in shown.words[:K]]
    assert sides == ["bottom" if value > 1 - 1e-6 else "top" for value in weights], "no number stands on the line"
    digits = 3 if K <= 5 else 2
    assert [float(words.get_text()) for words in shown.words[:K]] == [float(f"{w:.{digits}g}") for w in weights]


def test_what_was_counted_stands_beside_it_and_what_is_wrong_is_crossed() -> None:
    shown = stepped("loops", loop="B").experiment.plot
    texts = [[words.get_text() for words in column] for column in shown.side]
    assert texts[0] == ["passes 4", "steps 1", "", "clips 1", "skipped 0"]
    assert texts[1] == ["", "", "× schedule 4", "", ""]
    shown = stepped("loops", loop="D").experiment.plot
    assert [words.get_text() for words in shown.side[1]] == ["", "", "", "× clips 4", ""]


def test_the_figures_of_the_notebook_are_on_the_page() -> None:
    lab = labkit.labs.audit("loops")
    lab.predict(141 / 76)
    lab.step()
    assert lab.score == pytest.approx(0, abs=1e-9) and lab.page["headline"] == "mean-of-means"
    assert "0.653, 1.18, 1.86, 0.928 times their right weight" in lab.text
    assert stepped("loops", loop="B").page["headline"] == "schedule-per-microbatch"
    assert stepped("loops", loop="C").page["headline"] == "right: token-mean"
    both = stepped("loops", loop="D")
    assert both.page["headline"] == "unshifted-count and clip-per-microbatch" and "0.946 times" in both.text
    equal = stepped("loops", shortest=32)
    assert equal.page["headline"] == "right: token-mean" and "mean-of-means" in equal.text


def test_before_the_answer_only_the_counts_are_shown() -> None:
    lab = labkit.labs.audit("loops", loop="A", accumulation_steps=3)
    shown = lab.experiment.plot
    visible = [words.get_text() for words in shown.counts if words.get_visible() and words.get_text()]
    window = suspects.window(3, 4, 0)
    assert visible == [str(int((labels[:, 1:] != -100).sum())) for _, labels in window]
    assert not any(each.get_visible() for each in (shown.one, shown.right, shown.wrong, *shown.words, *shown.side[0]))
    assert "mean-of-means" not in str(lab.page)


def test_the_loops_can_be_read_on_the_page() -> None:
    source = Lab([EXPERIMENTS[0]()]).spec["source"]
    assert all(f"def loop_{letter}(" in source for letter in "abcd") and "def loops(" in source
    assert not any(word in source.replace("schedule-per-microbatch", "", 1) for word in WORDS)


def test_the_tables_hold_weights_counts_and_faults() -> None:
    lab = stepped("loops", loop="D")
    weights, counted, faults = lab.page["tables"]
    assert [row[1] for row in weights["rows"]] == list(map(str, lab.result.counts))
    assert ["clips", "4"] in counted["rows"] and [row[0] for row in faults["rows"]] == list(lab.result.faults)
    assert len(stepped("loops", loop="C").page["tables"]) == 2


# A report as a picture.


def report(weights: tuple[float, ...]) -> labkit.audit.Report:
    found = suspects.loops(accumulation_steps=len(weights))
    return dataclasses.replace(found, token_weights=weights)


@pytest.mark.parametrize(
    "weights", [(0.0, 0.0, 1.0), (-1.0, 1.0), (math.nan, math.nan), (512.0, 512.0), (1e-9, 4e-3, 3e5)]
)
def test_any_weights_can_be_drawn(weights: tuple[float, ...]) -> None:
    canvas = Canvas(LIGHT)
    weighed = WeightPlot(canvas)
    weighed.draw(canvas, report(weights))
    canvas.draw()
    low, high = weighed.axes.get_ylim()
    assert 0 < low < high and all(low < y < high for _, y in drawn(weighed).values())
    assert [words.get_text() for words in weighed.words[: len(weights)]] == [weight(w) for w in weights]
    assert all(role == "wrong" for at, (role, _) in drawn(weighed).items() if weights[at - 1] != 1)


def test_weights_in_words() -> None:
    assert [weight(w) for w in (-0.5, 0.0, 1.0, 512.4)] == ["-0.5", "0", "1", "512"]


def test_a_report_stands_by_itself_in_both_themes() -> None:
    cell_panels.page = Page(width=500, ratio=2)
    found = suspects.loops(loop="D")
    bundle = labkit.labs.shown(found)._repr_mimebundle_()
    assert bundle["text/plain"] == repr(found) and f"<strong>{title(found)}</strong>" in bundle["text/html"]
    assert "labels[:, 1:]" in bundle["text/html"] and bundle["text/html"].count('alt="The step is no token-mean') == 2
    for page, rest in zip((LIGHT, DARK), bundle["text/html"].split("base64,")[1:], strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(rest.split('"')[0]))).convert("RGB"))
        assert (pixels[0, 0] == [int(page.background[at : at + 2], 16) for at in (1, 3, 5)]).all()
        assert pixels.shape[1] == 1000 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 10


def test_findings_are_a_table() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1))
    table = labkit.labs.shown(labkit.audit.inspect(model))
    assert table._repr_html_().count("<tr>") == 4 and "<td" in table._repr_html_()
    assert "keeps state" in table._repr_html_() and repr(table).splitlines()[2].startswith("1 Dropout draws random")
    nothing = labkit.labs.shown(labkit.audit.inspect(model.eval()))
    assert "No layer looks at the batch" in nothing._repr_html_() and repr(nothing).startswith("No layer")


# The hunt.


def rows(lab: Lab) -> dict[str, str]:
    shown = lab.experiment
    pairs = zip(shown.rows, shown.values, shown.unknown, strict=True)
    return {name.get_text(): found.get_text() or unknown.get_text() for name, found, unknown in pairs}


def test_only_measured_rows_have_a_number() -> None:
    lab = stepped("hunt", case_number=2, weights=True, clips=True)
    found = rows(lab)
    assert list(found) == list(bug_hunt.NAMES)
    assert [name for name, text in found.items() if text != "?"] == ["weights × N", "clips"]
    result = {each.name: each for each in lab.result.measurements}
    assert [float(each) for each in found["weights × N"].split(", ")] == [
        float(f"{w:.3g}") for w in result["weights × N"].values
    ]
    shown = lab.experiment
    assert list(shown.wrong.get_ydata()) == [2.5] and list(shown.right.get_ydata()) == [7.5]
    given = [words.get_text() for words in shown.window_lines]
    assert given[0].startswith(f"valid tokens: {', '.join(map(str, lab.result.counts))} (N = ")
    assert str(lab.result.positions) in given[1] and str(lab.result.labelled) in given[1]


def test_nothing_on_the_page_says_the_word_before_the_guess() -> None:
    for number in range(12):
        lab = stepped("hunt", case_number=number, **dict.fromkeys(list(lab_switches()), True))
        words = [word for word in WORDS if word in str(lab.page)]
        assert words == [] and lab.page["headline"] == "Not guessed yet: 2 points to win"


def lab_switches() -> list[str]:
    declared = labkit.declare.parameters(bug_hunt.hunt)
    return [name for name, p in declared.items() if p.kind is bool]


def test_a_guess_reveals_the_verdict_and_the_points() -> None:
    lab = labkit.labs.audit("hunt", weights=True, one_forward=True)
    lab.mode = "live"
    assert lab.page["headline"] == "Not guessed yet: 8 points to win"
    lab.set(guess="token-mean")
    assert lab.page["headline"] == "Wrong: you said token-mean, it is batch-dependent-layer"
    assert lab.experiment.answer(lab.result) == 0
    lab.set(guess="batch-dependent-layer")
    assert lab.page["headline"] == "Right, batch-dependent-layer: 8 points"
    assert "In one forward the same examples give a gradient" in lab.text


def test_the_sides_have_no_frame() -> None:
    for name in ("loops", "hunt"):
        axes = labkit.labs.audit(name).figure.axes[-1]
        assert not any(spine.get_visible() for spine in axes.spines.values())


def test_points_are_predicted() -> None:
    lab = labkit.labs.audit("hunt", weights=True)
    lab.predict(9)
    lab.step()
    assert lab.score == 0
