"""The throughput lab as a browser shows it: predict, step, stop, a decision, and an exercise with its score."""

from __future__ import annotations

from tests.lab_in_browser import Opened, accessible, pixels, step, until, words

CELL = "import labkit\nlab = labkit.labs.throughput()\nlab"
STEP = """from labkit import check
from labkit.throughput.exercises import plain_step
check.train_step(plain_step)"""


def test_a_sweep_is_stopped_and_run_a_pair_decided_and_a_step_scored(opened: Opened) -> None:
    page = opened(CELL, STEP)
    page.get_by_label("At b = 1: what per cent of the step is launch overhead, K · a?").fill("50")
    step(page)
    until(lambda: "sizes seen" in words(page, "headline"))
    page.get_by_role("button", name="Stop", exact=True).click()
    until(lambda: page.get_by_role("button", name="Stop", exact=True).count() == 0)
    assert "sizes seen" in words(page, "headline")
    step(page)
    until(lambda: "times the valid tokens/s of b = 1" in words(page, "headline"))
    until(lambda: "You predicted 50 %, it is" in words(page, "score"))
    sweep = pixels(page)
    page.get_by_label("Is it really faster?").click()
    until(lambda: "hidden" in words(page, "sentence"))
    step(page)
    until(lambda: "margin 3 %, 3 runs each" in words(page, "headline"))
    assert "90 % interval" in words(page, "sentence")
    until(lambda: pixels(page) != sweep)
    accessible(page)
    said = page.locator(".jp-OutputArea-output").last
    until(lambda: "Right. Score: " in " ".join(said.inner_text().split()))
