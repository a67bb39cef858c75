"""The noise lab as a browser shows it: predict, step, another setting, a race that is stopped, and an exercise."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.frame.test_browser import Opened, opened, pixels, served, until, words

__all__ = ["opened", "served"]  # fixtures
pytestmark = pytest.mark.browser

CELL = "import labkit\nlab = labkit.labs.noise()\nlab"
SCALE = """from labkit import check
check.noise_scale(lambda small_norm2, small, big_norm2, big: small_norm2 / big_norm2)"""


def test_voters_are_predicted_the_noise_scale_seen_a_race_stopped_and_a_formula_judged(opened: Opened) -> None:
    page = opened(CELL, SCALE)
    page.get_by_label("How many times smaller is the spread of the large poll?").fill("316")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: "You predicted 316 times, it is" in words(page, "score"))
    polls = pixels(page)
    page.get_by_label("The noise scale from two batch sizes").click()
    until(lambda: "hidden" in words(page, "sentence"))
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline") == "Noise scale 20.3 examples, 95 % between 18.7 and 22.1")
    until(lambda: pixels(page) != polls)
    page.get_by_label("Steps and samples to a target").click()
    until(lambda: "hidden" in words(page, "sentence"))
    page.get_by_role("button", name="Step", exact=True).click()
    page.get_by_role("button", name="Stop", exact=True).click()
    until(lambda: "of 10 batch sizes" in words(page, "headline"))
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: "times fewer steps" in words(page, "headline"))
    found = Axe().run(page, context=".lk").response["violations"]
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
    said = page.locator(".jp-OutputArea-output").last
    until(lambda: "that is the ratio of the norms" in " ".join(said.inner_text().split()))
