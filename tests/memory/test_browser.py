"""The memory lab in a browser: a sweep that is predicted and drawn, the classic mistake, and what axe says of them."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.frame.test_browser import Opened, opened, pixels, served, until, words

__all__ = ["opened", "served"]  # fixtures
pytestmark = pytest.mark.browser

CELL = "import labkit\nlab = labkit.labs.memory()\nlab"


@pytest.mark.parametrize("dark", [False, True])
def test_a_sweep_is_predicted_and_the_classic_mistake_is_seen(opened: Opened, dark: bool) -> None:
    page = opened(CELL, dark=dark)
    page.get_by_label("The full batch: how many times the bytes of b = 1?").fill("16")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: "290 kB for each sequence of a microbatch, whatever K" in words(page, "headline"))
    until(lambda: words(page, "score").startswith("You predicted 16 times, it is 16.01 times"))
    page.get_by_label("The classic mistake").check()
    until(lambda: words(page, "headline") == "The classic mistake")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline") == "summed loss: 4 times the peak, for the same gradient")
    mistaken = pixels(page)
    page.get_by_label("loop", exact=True).select_option("logged loss")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline") == "logged loss: no more than backward in the loop")
    until(lambda: pixels(page) != mistaken)
    found = Axe().run(page, context=".lk").response["violations"]
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
