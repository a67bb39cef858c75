"""The noise lab as a browser shows it: predict, step, another setting, a race that is stopped, and an exercise."""

from __future__ import annotations

from tests.lab_in_browser import Opened, accessible, pixels, step, until, words

CELL = "import labkit\nlab = labkit.labs.noise()\nlab"
SCALE = """from labkit import check
check.noise_scale(lambda small_norm2, small, big_norm2, big: small_norm2 / big_norm2)"""


def test_voters_are_predicted_the_noise_scale_seen_a_race_stopped_and_a_formula_judged(opened: Opened) -> None:
    page = opened(CELL, SCALE)
    page.get_by_label("How many times smaller is the spread of the large poll?").fill("316")
    step(page)
    until(lambda: "You predicted 316 times, it is" in words(page, "score"))
    polls = pixels(page)
    page.get_by_label("The noise scale from two batch sizes").click()
    until(lambda: "hidden" in words(page, "sentence"))
    step(page)
    until(lambda: words(page, "headline") == "Noise scale 20.3 examples, 95 % between 18.7 and 22.1")
    until(lambda: pixels(page) != polls)
    page.get_by_label("Steps and samples to a target").click()
    until(lambda: "hidden" in words(page, "sentence"))
    step(page)
    page.get_by_role("button", name="Stop", exact=True).click()
    until(lambda: "of 10 batch sizes" in words(page, "headline"))
    step(page)
    until(lambda: "times fewer steps" in words(page, "headline"))
    accessible(page)
    said = page.locator(".jp-OutputArea-output").last
    until(lambda: "that is the ratio of the norms" in " ".join(said.inner_text().split()))
