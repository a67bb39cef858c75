"""The BatchNorm lab: its figures, and every extreme of every control."""

from __future__ import annotations

import math

import numpy as np
import pytest

import labkit
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.normalization import effective_momentum


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


@pytest.mark.parametrize("norm", ["batch", "group", "layer", "frozen"])
def test_only_batch_norm_is_off(norm: str) -> None:
    lab = labkit.labs.normalization("statistics", norm=norm)
    lab.step()
    assert lab.result.equal == (norm != "batch")
    assert ("within rounding" in lab.page["headline"]) == (norm != "batch")
    assert (lab.experiment.answer(lab.result) > 1) == (norm == "batch")


def test_the_sheet_shows_every_image_in_the_row_of_its_microbatch() -> None:
    lab = labkit.labs.normalization("statistics", images=10, accumulation_steps=4)
    lab.step()
    sheet = lab.experiment.sheet.get_array()
    assert sheet.shape == (4 * 18, 3 * 18)
    for row in range(4):
        images = lab.result.images[lab.result.microbatch == row].numpy()
        for column in range(3):
            cell = np.ma.filled(sheet[row * 18 + 1 : row * 18 + 17, column * 18 + 1 : column * 18 + 17], np.nan)
            assert np.array_equal(cell, images[column]) if column < len(images) else np.isnan(cell).all()


def test_the_dots_are_the_channel_that_differs_most() -> None:
    lab = labkit.labs.normalization("statistics", composition="sorted")
    lab.step()
    result, drawn = lab.result, lab.experiment.wrong.dots.get_xdata()
    worst = (result.means - result.mean).abs().amax(0).argmax()
    assert drawn == pytest.approx(result.means[:, worst].tolist())


def test_momentum_a_tenth_acts_as_57_per_cent() -> None:
    lab = labkit.labs.normalization("running", momentum=0.1, accumulation_steps=8)
    lab.predict(100 * effective_momentum(0.1, 8))
    lab.step()
    assert lab.score == pytest.approx(0, abs=1e-9)
    assert lab.page["headline"] == "Momentum 0.1 acts as 0.57"


def test_the_remedies_are_drawn_by_what_they_measured() -> None:
    lab = labkit.labs.normalization("remedies")
    lab.step()
    experiment = lab.experiment
    assert list(experiment.right.get_ydata()) == [2, 3, 4, 5] and list(experiment.wrong.get_ydata()) == [0, 1]
    drawn = {text.get_text(): text.get_position()[1] for text in experiment.axes.texts}
    heights = [drawn[row.name] for row in lab.result.rows]
    assert heights == sorted(heights, reverse=True)


def test_aligned_masks_have_no_cross() -> None:
    for aligned in (False, True):
        lab = labkit.labs.normalization("randomness", aligned=aligned)
        lab.step()
        assert (len(lab.experiment.other.get_xdata()) == 0) == aligned == lab.result.equal
        assert len(lab.experiment.same.get_xdata()) > 0


@pytest.mark.parametrize(("source", "said"), [("dropout", "vanishes on average"), ("batch norm", "A bias is left")])
def test_what_is_equal_on_average(source: str, said: str) -> None:
    lab = labkit.labs.normalization("targets", source=source, draws=64)
    lab.step()
    assert said in lab.page["headline"] and lab.result.progress == 1
    assert len(lab.experiment.dots.get_xdata()) == len(lab.result.draws)
    assert math.isfinite(lab.experiment.answer(lab.result))
