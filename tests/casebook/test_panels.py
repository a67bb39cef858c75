"""The casebook's lab: what it draws is what the loops gave, for every case, and no words collide."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

import labkit
from labkit import casebook, workers
from labkit.casebook import Number, Ran
from labkit.casebook.panels import body
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.labs import Lab
from tests.frame.driven import draw

torch.set_num_threads(1)
TITLES = sorted(casebook.titles(), key=lambda title: (title.startswith("B09"), title))


@pytest.fixture(autouse=True)
def usual_page() -> Any:
    cell_panels.page = Page(width=520)
    yield
    cell_panels.page = Page(width=320)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Any:
    yield
    workers.close()


def stepped(name: str, **values: Any) -> Lab:
    lab = labkit.labs.casebook(name, **values)
    lab.step()
    return lab


def shown(lab: Lab) -> Any:
    return lab.experiment


def boxes(lab: Lab) -> dict[str, Any]:
    """The rectangle of every text of the picture that is there."""
    lab.figure.canvas.draw()
    one = shown(lab)
    texts = [*one.words.above, one.words.code, *one.words.below, one.subject, *one.values.values()]
    renderer = lab.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    return {text.get_text(): text.get_window_extent(renderer) for text in texts if text.get_text()}


@pytest.mark.parametrize("title", TITLES)
def test_every_case_is_drawn_as_it_ran_and_nothing_collides(title: str) -> None:
    for width in (520, 680):
        cell_panels.page = Page(width=width)
        lab = labkit.labs.casebook("case", case=title)
        before = boxes(lab)
        lab.step()
        case, number, one = casebook.find(title), lab.result.compared, shown(lab)
        assert one.bars["wrong"].get_xdata()[1] == number.wrong and one.bars["right"].get_xdata()[1] == number.right
        assert list(one.ends["wrong"].get_xdata()) == [number.wrong] and list(one.ends["wrong"].get_ydata()) == [0]
        assert one.words.code.get_text() == body(case.wrong)
        low, high = one.axes.get_xlim()
        assert low < min(number.wrong, number.right, 0) or low == 0
        assert high > max(number.wrong, number.right) and len(one.axes.get_xticks()) <= 3
        for found in (before, boxes(lab)):
            whole = lab.figure.bbox
            for words, box in found.items():
                inside = box.x0 >= -1 and box.x1 <= whole.width + 1 and box.y0 >= -1 and box.y1 <= whole.height + 1
                assert inside, (title, width, words)
            placed = list(found.items())
            for at, (one_text, box) in enumerate(placed):
                for other_text, other in placed[at + 1 :]:
                    assert not box.overlaps(other), (title, width, one_text, other_text)


@pytest.mark.parametrize("page", [Page(width=340), Page(width=520, font=22)])
@pytest.mark.parametrize("title", ["B22 decay K times", "B02 nobody divides by K"])
def test_words_shrink_where_there_is_little_room(page: Page, title: str) -> None:
    cell_panels.page = page
    lab = stepped("case", case=title)
    found = boxes(lab)
    asked = found.pop(shown(lab).subject.get_text())
    bottom = min(box.y0 for words, box in found.items() if not words.startswith(("wrong", "right")))
    assert bottom >= asked.y1


def test_before_the_answer_only_what_is_given_is_shown() -> None:
    lab = labkit.labs.casebook("case", case="B07 mean of rank means")
    texts = boxes(lab)
    assert any(words.startswith("Seen: Training on several GPUs") for words in texts)
    assert any(words.startswith("Given: W = 2") for words in texts) and "gradient of rank 0" in texts
    assert not any("right" in words or "2.5" in words for words in texts)
    one = shown(lab)
    assert not any(line.get_visible() for line in (*one.bars.values(), *one.ends.values(), one.zero))
    assert one.words.below[0].get_text() == ""
    assert "2.5" not in str(lab.page) and casebook.find("B07").fault not in str(lab.page)


def test_the_figures_of_the_notebook_are_on_the_page() -> None:
    lab = labkit.labs.casebook("case")
    lab.predict(5)
    lab.step()
    assert lab.score == 0 and lab.page["headline"] == "Gradient: 5 in place of 3.5"
    assert "1.43 times the right number, 42.9 % off" in lab.text and "The audit says mean-of-means." in lab.text
    assert "How to recognise it: Equal counts hide it." in lab.text and "huggingface/transformers#34191" in lab.text
    numbers, told, verdicts = lab.page["tables"]
    assert numbers["rows"][0] == ["gradient", "5", "3.5", "1.43"]
    assert ["thread", "https://github.com/huggingface/transformers/issues/34191"] in told["rows"]
    assert verdicts["rows"] == [["wrong", "mean-of-means"], ["right", "token-mean"]]
    assert stepped("case", case="B27 pipeline scales again").page["headline"] == "Gradient: 1.312 in place of 3"
    assert "change of the weights: -0.8, right -0.2" in " ".join(
        boxes(stepped("case", case="B02 nobody divides by K"))
    ).replace("\n", " ")


def test_while_the_right_loop_runs_the_wrong_one_stands_there() -> None:
    lab = labkit.labs.casebook("case")
    one = shown(lab)
    half = Ran("B01 mean of means", (Number("gradient", 5.0, math.nan),), (), 0.3)
    draw(lab, half)
    assert one.bars["right"].get_xdata() == [0] and list(one.ends["right"].get_xdata()) == []
    assert one.headline(half) == "Gradient: 5, and the right loop runs" and "Seen:" in one.describe(half)


def test_negative_numbers_have_bars_to_the_left() -> None:
    one = shown(stepped("case", case="B24 BatchNorm by pieces"))
    assert one.bars["right"].get_xdata()[1] == pytest.approx(-0.5345, abs=1e-4) and one.axes.get_xlim()[0] < -0.6
    assert one.values["right"].get_position()[0] > 0, "words stand at the free side"


def test_both_loops_of_every_case_can_be_read_on_the_page() -> None:
    source = labkit.labs.casebook("case").spec["source"]
    for case in casebook.all():
        assert f"# {case.id}, wrong\ndef {case.wrong.__name__}(" in source
        assert f"# {case.id}, right\ndef {case.right.__name__}(" in source


def test_bodies_have_neither_signature_nor_docstring_nor_comment() -> None:
    for case in casebook.all():
        for loop in (case.wrong, case.right):
            words = body(loop)
            assert '"""' not in words and "#" not in words and not words.startswith(" ") and words
            source = inspect.getsource(loop)
            assert all(line.strip() in source for line in words.splitlines())
            assert words.splitlines()[-1].strip() in source.splitlines()[-1]


# All of them.


def test_the_overview_draws_every_ratio_the_smallest_first() -> None:
    lab = stepped("overview")
    many, result = shown(lab), lab.result
    assert list(many.wrong.get_xdata()) == sorted(result.ratios) and len(result.ratios) == len(casebook.all())
    names = [words.get_text() for words in many.names]
    assert sorted(names) == sorted(casebook.titles()) and names[0] == "B40 DDP bypassed"
    assert [words.get_text() for words in many.values][:2] == ["0.182", "0.25"]
    assert {edge for edge in many.band.get_xdata() if not math.isnan(edge)} == {0.5, 2}
    low, high = many.axes.get_xlim()
    assert low < min(result.ratios) and high > max(result.ratios)
    assert (
        lab.page["headline"] == "8 of 27 are off by less than a factor 2" and len(lab.page["tables"][0]["rows"]) == 27
    )
    assert "B22 decay K times 0.98" in lab.text


def test_a_family_fills_the_picture_and_the_rest_is_empty() -> None:
    lab = stepped("overview", family="cadence", within=1.05)
    many = shown(lab)
    assert [words.get_text() for words in many.names if words.get_text()] == [
        "B23 Adam counts microbatches",
        "B22 decay K times",
        "B20 schedule K times",
    ]
    assert lab.page["headline"] == "1 of 3 is off by less than a factor 1.05" and many.axes.get_ylim() == (5.7, -0.7)


def test_before_the_answer_no_ratio_is_shown() -> None:
    lab = labkit.labs.casebook("overview")
    many = shown(lab)
    assert not any(each.get_visible() for each in (*many.names, *many.values, many.wrong, many.right, many.one))
