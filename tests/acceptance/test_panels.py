"""The acceptance test's lab: what it draws is what the record says, at every extreme of every control."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

import labkit
from labkit.acceptance.candidates import IDEAS
from labkit.audit.panels.acceptance import FLOOR, short
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.labs import Lab

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


def stepped(name: str, **values: Any) -> Lab:
    lab = labkit.labs.audit(name, **values)
    lab.step()
    return lab


def marks(lab: Lab) -> list[str]:
    """What stands before each gate."""
    shown, found = lab.experiment, {}
    for word, line in (("dot", shown.right), ("cross", shown.wrong)):
        found |= dict.fromkeys(line.get_ydata(), word)
    return [found.get(at) or sign.get_text() for at, sign in enumerate(shown.signs)]


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        ("twice the microbatch", ["dot", "dot", "dot", "dot"]),
        ("float32 model", ["dot", "?", "?", "dot"]),
        ("new trainer", ["dot", "dot", "cross", "–"]),
        ("dropped tail", ["cross", "–", "–", "–"]),
    ],
)
def test_each_gate_has_its_mark_its_name_and_its_numbers(candidate: str, expected: list[str]) -> None:
    lab = stepped("acceptance", candidate=candidate)
    shown = lab.experiment
    assert marks(lab) == expected
    assert [words.get_text() for words in shown.names] == [gate.name for gate in lab.result.gates]
    assert [words.get_text() for words in shown.words] == short(lab.result)
    assert lab.experiment.answer(lab.result) == expected.count("dot")


def test_the_runs_and_what_the_margin_asks_for_are_drawn() -> None:
    lab = stepped("acceptance", runs=4, margin=0.1, noise=0.05)
    shown, record = lab.experiment, lab.result
    for line, middle, side in zip(shown.runs, shown.medians, (record.candidate, record.base), strict=True):
        assert tuple(line.get_xdata()) == side.throughputs
        assert middle.get_xdata()[0] == pytest.approx(statistics.median(side.throughputs))
    wanted = 1.1 * statistics.median(record.base.throughputs)
    assert shown.asked.get_xdata()[0] == pytest.approx(wanted)
    low, high = shown.speed.get_xlim()
    assert all(low < each < high for each in (*record.base.throughputs, *record.candidate.throughputs, wanted))
    untimed = stepped("acceptance", candidate="mean of means").experiment
    assert untimed.none.get_text() == "not timed" and not len(untimed.runs[0].get_xdata())


def test_the_figures_of_the_notebook_are_on_the_page() -> None:
    lab = labkit.labs.audit("acceptance")
    lab.predict(4)
    lab.step()
    assert lab.score == 0 and lab.page["headline"] == "Adopt: four gates passed"
    assert "1.23 times the throughput, 90 % interval 1.22 … 1.26" in lab.text
    assert "60 valid tokens" in lab.text and "Not proved: That training converges" in lab.text
    assert stepped("acceptance", candidate="mean of means").page["headline"] == "Reject: it fails at equality"
    tail = stepped("acceptance", candidate="dropped tail")
    assert "holds 51 valid tokens, the base's 60" in tail.text
    kernel = stepped("acceptance", candidate="fused kernel")
    assert kernel.page["headline"] == "Reject: it fails at throughput" and "not faster: 0.997" in kernel.text
    large = stepped("acceptance", candidate="larger batch", invariant="large-batch")
    assert large.page["headline"] == "Cannot tell: open at invariant, equality and traces"
    assert "60 valid tokens an update become 103" in large.text and "1.06 times" in large.text
    noisy = stepped("acceptance", noise=0.2)
    assert noisy.page["headline"] == "Cannot tell: open at throughput"


def test_before_the_answer_nothing_is_shown() -> None:
    lab = labkit.labs.audit("acceptance", candidate="mean of means")
    shown = lab.experiment
    assert lab.figure.axes[1].get_xlim() == (0, 1), "no throughput of another candidate is left"
    hidden = (shown.right, shown.wrong, *shown.names, *shown.words, *shown.signs, *shown.runs, shown.asked)
    assert not any(each.get_visible() for each in hidden)
    assert not any(word in str(lab.page) for word in ("mean-of-means", "reject:", "gates passed"))


def test_the_loops_can_be_read_and_do_not_tell() -> None:
    source = labkit.labs.audit("acceptance").spec["source"]
    for words in ("def token_mean(", "def mean_of_means(", "def half_sum(", "def new_trainer(", "def acceptance("):
        assert words in source
    assert "def traces(" in labkit.labs.audit("traces").spec["source"]


def test_tables_hold_gates_both_sides_and_all_numbers() -> None:
    lab = stepped("acceptance")
    gates, sides, unproved, numbers = lab.page["tables"]
    assert [row[0] for row in unproved["rows"]] == list(lab.result.not_proved)
    assert [row[1] for row in gates["rows"]] == ["passed"] * 4
    assert ["accumulation", "3", "2", ""] in sides["rows"] and ["dtype", "float64", "float64", ""] in sides["rows"]
    names = [row[0] for row in numbers["rows"]]
    assert "margin" in names and "gradient tolerance" in names and "verdict" in names


@pytest.mark.parametrize("candidate", IDEAS)
def test_traces_are_drawn_as_they_are(candidate: str) -> None:
    lab = stepped("traces", candidate=candidate, updates=5)
    shown, found = lab.experiment, lab.result
    drawn: dict[str, dict[int, float]] = {}
    for axes, values in ((shown.loss, found.candidate), (shown.difference, [max(d, FLOOR) for d in found.difference])):
        places: dict[int, float] = {}
        for role in ("right", "wrong"):
            line = shown.marks[axes, role]
            drawn[role] = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
            places |= drawn[role]
            for at in drawn[role]:
                assert (found.difference[at] > found.band[at]) is (role == "wrong")
        assert [places[at] for at in range(6)] == list(values)
        low, high = axes.get_ylim()
        assert all(low < each < high for each in values)
    assert tuple(shown.base.get_ydata()) == found.base and tuple(shown.band.get_ydata()) == found.band
    assert lab.experiment.answer(found) == found.outside == len(drawn["wrong"])


def test_headlines_of_the_traces() -> None:
    assert stepped("traces").page["headline"] == "Outside after 7 of 8 updates"
    assert "The first time is after update 2" in stepped("traces").text
    inside = stepped("traces", candidate="twice the microbatch")
    assert inside.page["headline"] == "Inside after every update, 8 in all" and "first time" not in inside.text
    wild = stepped("traces", candidate="twice the microbatch", precision="float32", learning_rate=10, updates=16)
    assert wild.page["headline"].startswith("No test: rounding grows to") and "nothing is told" in wild.text
    assert stepped("traces", candidate="float32 model").result.outside == 8
    assert stepped("traces", candidate="float32 model", precision="float32").result.outside == 0


def test_a_difference_of_nothing_stands_on_the_axis() -> None:
    shown = stepped("traces", candidate="fused kernel").experiment
    assert set(shown.marks[shown.difference, "right"].get_ydata()) == {FLOOR}
    labels = [label.get_text() for label in shown.difference.get_yticklabels()]
    assert labels[0] == "0" and math.isclose(shown.difference.get_yticks()[0], FLOOR)


def test_the_sides_have_no_frame() -> None:
    axes = labkit.labs.audit("acceptance").figure.axes[0]
    assert not any(spine.get_visible() for spine in axes.spines.values())
