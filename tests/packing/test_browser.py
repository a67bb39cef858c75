"""The packing lab in a browser: a leak that is predicted, seen and mended, positions, and what axe says of them."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.frame.test_browser import Opened, opened, pixels, served, until, words

__all__ = ["opened", "served"]  # fixtures
pytestmark = pytest.mark.browser

CELL = "import labkit\nlab = labkit.labs.packing()\nlab"


@pytest.mark.parametrize("dark", [False, True])
def test_a_leak_is_predicted_seen_and_mended(opened: Opened, dark: bool) -> None:
    page = opened(CELL, dark=dark)
    page.get_by_label("Padded to the longest of its batch: what share is padding?").fill("50")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline").startswith("Padding: "))
    until(lambda: words(page, "score").startswith("You predicted 50 %, it is "))
    page.get_by_label("The leak").check()
    until(lambda: words(page, "headline") == "The leak")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline").startswith("The loss leaks into other documents: "))
    leaking = pixels(page)
    page.get_by_label("mask", exact=True).select_option("block causal")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline") == "Nothing leaks: 0 to the last bit")
    until(lambda: pixels(page) != leaking)
    page.get_by_label("Positions that restart, or run on").check()
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline").endswith("rotary equal"))
    found = Axe().run(page, context=".lk").response["violations"]
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
