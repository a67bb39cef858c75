"""The pictures of a gradient on a panel: chosen, hidden until Step, true to the numbers, legible."""

from __future__ import annotations

import itertools
import math

import pytest

import labkit
from labkit import LabError
from labkit.frame import cell_panels
from labkit.frame.style import DARK, Page

WITH_GRADIENTS = [
    pytest.param(topic, kind.name, id=f"{topic}-{kind.name}")
    for topic in labkit.labs.all()
    for kind in labkit.labs.experiments(topic)
    if "direction" in kind.pictures
]


@pytest.mark.parametrize(("topic", "name"), WITH_GRADIENTS)
def test_every_picture_is_hidden_until_step_and_drawn_after_it(topic: str, name: str) -> None:
    lab = labkit.labs.all()[topic](name)
    for picture in lab.pictures:
        lab.picture = picture
        assert lab.picture == lab.spec["picture"] == picture
        assert "?" in [text.get_text() for axes in lab.figure.axes for text in axes.texts if text.get_visible()]
    lab.step()
    for picture in lab.pictures:
        lab.picture = picture
        words = [text.get_text() for axes in lab.figure.axes for text in axes.texts if text.get_visible()]
        assert "?" not in words and (any(words) or picture not in ("direction", "entries"))


@pytest.mark.parametrize("page", [Page(width=860), Page(width=440), Page(width=340, font=21), DARK])
@pytest.mark.parametrize("rule", labkit.accumulation.WINDOW)
def test_words_of_the_direction_stay_inside_and_apart(rule: str, page: Page) -> None:
    cell_panels.page = page
    lab = labkit.labs.accumulation("weights", rule=rule)
    lab.picture = "direction"
    lab.step()
    boxes = [t.get_window_extent() for t in lab.figure.axes[0].texts if t.get_visible() and t.get_text()]
    width, height = lab.figure.bbox.width, lab.figure.bbox.height
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for box in boxes)
    names = boxes[:3]
    for one, other in itertools.combinations(names, 2):
        wide, high = min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
        assert wide <= 2 or high <= 2, "arrows' names lie over each other"


def test_arrows_have_one_scale_and_the_angle_that_is_said() -> None:
    lab = labkit.labs.accumulation("weights")
    lab.picture = "direction"
    lab.step()
    axes = lab.figure.axes[0]
    (x, y) = next(line.get_data() for line in axes.lines if len(line.get_xdata()) == 2 and line.get_ydata()[1] != 0)
    start, tip = axes.transData.transform([(x[0], y[0]), (x[1], y[1])])
    seen = math.degrees(math.atan2(tip[1] - start[1], tip[0] - start[0]))
    assert seen == pytest.approx(lab.result.gradients.plane.angle, abs=0.01)


def test_a_picture_that_is_none_is_refused_and_the_last_one_stays() -> None:
    lab = labkit.labs.accumulation("weights")
    with pytest.raises(LabError, match="none of weights, direction, entries: try 'weights'"):
        lab.picture = "directions"
    assert lab.picture == "weights"
    lab.choose("weights")
    lab.picture = "entries"
    lab.step()
    assert lab.picture == "entries" and lab.result is not None, "an answer survives a step"
