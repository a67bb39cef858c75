"""The acceptance test as a browser shows it: gates passed one by one, a margin moved, two traces."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.frame.test_browser import Opened, opened, pixels, served, until, words

__all__ = ["opened", "served"]  # fixtures
pytestmark = pytest.mark.browser

CELL = "import labkit\nlab = labkit.labs.audit('acceptance')\nlab"


def test_a_candidate_is_adopted_and_another_is_not(opened: Opened) -> None:
    page = opened(CELL)
    page.get_by_label("How many of the four gates does the candidate pass?").fill("4")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: "exactly" in words(page, "score"))
    assert words(page, "headline") == "Adopt: four gates passed"
    before = pixels(page)
    page.get_by_label("candidate", exact=True).select_option("new trainer")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline") == "Reject: it fails at traces" and pixels(page) != before)
    page.get_by_label("candidate", exact=True).select_option("larger batch")
    page.get_by_label("invariant", exact=True).select_option("large-batch")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline").startswith("Cannot tell: open at invariant"))
    found = Axe().run(page, context=".lk").response["violations"]
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
