"""The accumulation lab: what it draws is the gradient that ran, at every extreme of every control."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import labkit
from labkit import accumulation, rules
from labkit.accumulation.panels import Weights
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.frame.weight_map import FOURFOLD
from labkit.labs import Lab


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


def map_of(lab: Lab) -> np.ndarray:
    """The weights that the picture shows, NaN where it is blank."""
    return 2.0 ** np.ma.filled(lab.experiment.map.mesh.get_array().astype(float), np.nan)


@pytest.mark.parametrize("word", accumulation.WINDOW)
def test_the_map_shows_for_every_rule_what_algebra_says_of_its_counts(word: str) -> None:
    lab = labkit.labs.accumulation("weights", rule=word)
    lab.step()
    result = lab.result
    drawn = map_of(lab)[: len(result.counts)]
    crosses = {(int(y), int(x)) for x, y in zip(*lab.experiment.map.crosses.get_data(), strict=True)}
    for row, (count, predicted) in enumerate(zip(result.counts.tolist(), result.predicted.tolist(), strict=True)):
        targets = {x for x in range(32) if np.isfinite(drawn[row, x])} | {x for y, x in crosses if y == row}
        assert len(targets) == count
        values = drawn[row][np.isfinite(drawn[row])]
        assert (predicted == 0) == (len(values) == 0 and count > 0)
        assert values == pytest.approx(predicted, rel=1e-9)


def test_replacing_a_loop_behind_the_librarys_back_changes_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = labkit.labs.accumulation("weights", rule="token-mean")
    lab.step()
    assert np.nanmax(np.abs(map_of(lab) - 1)) < 1e-9
    other = dataclasses.replace(rules.rule("token-mean"), loop=rules.rule("sum-of-means").loop)
    monkeypatch.setitem(rules.TABLE, "token-mean", other)
    lab.step()
    assert np.nanmax(map_of(lab)) > 2
    assert lab.experiment.predicted.get_xdata() == pytest.approx([1] * 8), (
        "the prediction is the table's, not the loop's"
    )


def test_three_gradients_by_hand() -> None:
    lab = labkit.labs.accumulation("by_hand", gradient_1=1, gradient_2=2, gradient_3=6, weight=1, learning_rate=0.1)
    lab.predict(0.7)
    lab.step()
    assert lab.score == pytest.approx(0, abs=1e-12) and lab.result.undivided == pytest.approx(0.1)


def test_a_projection_of_one_hides_an_error_of_27_per_cent() -> None:
    lab = labkit.labs.accumulation("layers")
    lab.step()
    assert "Projection 1.00, and yet 26.5 % off" in lab.page["headline"]
    assert len(lab.page["tables"][0]["rows"]) == len(lab.result.per_layer) == 6
    lab.set(rule="token-mean")
    lab.step()
    assert "token-mean: equal to the full batch" in lab.page["headline"]
    assert lab.experiment.words[0].get_text() == "embedding: equal"


@pytest.mark.parametrize("width", [340, 440, 680])
@pytest.mark.parametrize("rule", ["mean-of-means", "token-mean", "token-sum", "double-division"])
def test_words_fit_on_a_projector(width: int, rule: str) -> None:
    cell_panels.page = Page(width=width)
    layers, weights = (labkit.labs.accumulation(name, rule=rule) for name in ("layers", "weights"))
    for lab in (layers, weights):
        lab.step()
    words = [text.get_window_extent() for text in layers.experiment.words if text.get_text()]
    assert len(words) == 6 and all(box.x1 < layers.figure.bbox.x1 for box in words)
    axes = layers.experiment.axes
    ticks = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(ticks) > 1 and all(one.x1 + 3 < other.x0 for one, other in itertools.pairwise(ticks))
    experiment = weights.experiment
    edge = experiment.side.get_window_extent().x0
    assert all(text.get_window_extent().x1 < edge for text in experiment.map.words if text.get_text())
    left, right = (axes.xaxis.label.get_window_extent() for axes in (experiment.axes, experiment.side))
    assert left.x1 + 6 < right.x0


def test_a_weight_of_nothing_is_written_as_0() -> None:
    lab = labkit.labs.accumulation("weights", rule="last-microbatch-only")
    lab.step()
    experiment = lab.experiment
    assert [words.get_text() for words in experiment.map.words[:8]] == ["0×"] * 6 + ["1×"] * 2
    assert experiment.side.get_xlim()[0] > 0.1


def test_two_trainings_are_drawn_while_they_run() -> None:
    lab = labkit.labs.accumulation("trainings", updates=10, rule="sum-of-means", learning_rate=3)
    lab.predict(1)
    lab.step()
    thick = lab.experiment.thick
    assert all(len(line.get_xdata()) == len(lab.result.updates) for line in thick)
    assert lab.page["headline"] == "A training diverges" and lab.result.diverged
    assert lab.experiment.answer(lab.result) == pytest.approx(float(lab.result.gaps.mean()))


def test_the_colours_of_the_map_are_centred_at_the_right_weight() -> None:
    assert FOURFOLD(0.0) == 0.5


def test_weights_of_zero_and_nan_are_no_colour() -> None:
    lab = labkit.labs.accumulation("weights", rule="last-microbatch-only")
    lab.step()
    assert len(lab.experiment.map.crosses.get_xdata()) > 0
    shown: Any = lab.experiment.map
    shown.draw(torch.full((2, 4), torch.nan), [torch.nan, torch.nan])
    assert np.isnan(map_of(lab)).all() and shown.words[0].get_text() == "?"


def test_the_source_on_the_page_holds_the_loops() -> None:
    source = Lab([Weights()]).spec["source"]
    assert "def mean_of_means(" in source and "(loss / len(microbatches)).backward()" in source
