"""In a browser: progress after a closed page, a pass on the map, the board of a class, and large type."""

from __future__ import annotations

import json
import pathlib
import time

import pytest
from playwright.sync_api import Page

from labkit.learner import record
from tests.lab_in_browser import (
    OUTSIDE,
    OVER,
    Opened,
    accessible,
    command,
    pixels,
    serious,
    step,
    still,
    until,
    words,
)

CEILING = "import labkit\nlab = labkit.labs.roofline('ceiling')\nlab"
MAP = "labkit.labs.map()"
SET = {"intensity": 2.0, "bandwidth": 80.0, "ceiling": 1000.0}


@pytest.fixture(autouse=True)
def _anew() -> None:
    """Kernels keep progress in the folder of the whole test run."""
    (record.folder() / "progress.json").unlink(missing_ok=True)


def on_the_map(page: Page, title: str) -> str:
    return page.get_by_role("row", name=title).last.inner_text()


def test_what_was_done_outlives_page_and_kernel(opened: Opened) -> None:
    wrong = "def token_mean(sums, counts):\n    return sum(sums) / len(counts)\nlabkit.check.token_mean(token_mean)"
    page = opened(CEILING, wrong, MAP)
    assert "0 of 1" in on_the_map(page, "00 Start here") and "0 of 6" in on_the_map(page, "02 Roofline")
    assert "checks For sums = " in " ".join(page.locator(".jp-OutputArea-output").nth(1).inner_text().split())
    page.get_by_label("What rate does the roof allow?").fill("150")
    step(page)
    until(lambda: "6.25 % off" in words(page, "score"))
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.goto("about:blank")
    again = opened(CEILING, "labkit.check.token_mean(lambda sums, counts: sum(sums) / sum(counts))", MAP)
    row = on_the_map(again, "02 Roofline")
    assert "1 of 6" in row and "closest 6.2 % off" in row and "✓ 1 of 1" in on_the_map(again, "00 Start here")
    assert serious(again, ".jp-RenderedHTMLCommon table") == []


def says(place: pathlib.Path, writer: int, number: float) -> None:
    said = {"experiment": "roofline.ceiling", "prediction": number, "values": SET, "at": time.time()}
    with open(place / f"{writer:032x}.jsonl", "a") as file:
        file.write(json.dumps(said) + "\n")


def test_a_class_is_shown_live_in_two_rounds_and_the_answer_when_asked(opened: Opened, tmp_path: pathlib.Path) -> None:
    learner = f"import os\nos.environ['LABKIT_CLASS'] = {str(tmp_path)!r}\n{CEILING}"
    page = opened(learner, "labkit.labs.class_board('roofline', 'ceiling')", fresh=True)
    board = page.get_by_role("group", name="the board of the class")
    until(lambda: "No prediction yet." in board.inner_text())
    page.get_by_label("What rate does the roof allow?").fill("150")
    page.keyboard.press("Enter")
    until(lambda: "1 prediction, median 150 GFLOP/s." in board.inner_text())
    assert "board of your class" in words(page, "notice")
    for writer in range(30):
        says(tmp_path, writer, 80)
    (tmp_path / f"{99:032x}.jsonl").write_text("<script>document.title = 'owned'</script>\n{\n")
    until(lambda: "31 predictions, median 80 GFLOP/s." in board.inner_text())
    board.get_by_role("button", name="Begin the second round").click()
    until(lambda: "After: no prediction yet." in board.inner_text())
    for writer in range(20):
        says(tmp_path, writer, 160)
    until(lambda: "After: 20 predictions" in board.inner_text())
    assert "answer" not in board.locator("table").inner_text() and page.title() != "owned" and serious(page) == []
    board.get_by_role("button", name="Reveal the answer").click()
    until(lambda: "It is 160 GFLOP/s." in board.inner_text())
    assert "160 ← the answer" in board.get_by_role("row", name="answer").inner_text()
    board.get_by_role("button", name="Large type").click()
    until(lambda: board.evaluate("e => e.classList.contains('lk-large')"))
    assert page.evaluate(OUTSIDE) == []
    command(page, "application:toggle-left-area")
    page.set_viewport_size({"width": 640, "height": 900})
    until(lambda: page.evaluate(OUTSIDE) == [])


def test_one_press_makes_all_panels_large_and_the_next_small_again(opened: Opened) -> None:
    page = opened(CEILING, "other = labkit.labs.packing('leak')\nother.step()\nother")
    size = "[...document.querySelectorAll('.lk')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    (small, _) = page.evaluate(size)
    picture = pixels(page)
    page.get_by_role("button", name="Large type").first.click()
    until(lambda: page.evaluate(size) == pytest.approx([1.5 * small, 1.5 * small]))
    until(lambda: pixels(page) != picture)
    sharp = "[...document.querySelectorAll('.lk-canvas')].map(c => c.width / c.clientWidth)"
    until(lambda: page.evaluate(sharp) == pytest.approx([1, 1], abs=0.01))
    still(page)
    assert page.get_by_role("button", name="Large type", pressed=True).count() == 2
    assert page.evaluate(OUTSIDE) == [] and page.evaluate(OVER) == []
    accessible(page)
    page.get_by_role("button", name="Large type").last.click()
    until(lambda: page.evaluate(size) == [small, small])
    until(lambda: pixels(page) == picture)
