"""The batch lab in a browser: predicted, seen, turned, and a world that does not divide mended as its message says."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.frame.test_browser import Opened, opened, pixels, served, until, words

__all__ = ["opened", "served"]  # fixtures

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("dark", [False, True])
def test_a_step_is_predicted_and_a_world_that_does_not_divide_is_mended(opened: Opened, dark: bool) -> None:
    page = opened("import labkit\nlab = labkit.labs.batch('planner')\nlab", dark=dark)
    page.get_by_label("How many sequences does one optimizer step consume?").fill("256")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: "exactly" in words(page, "score"))
    seen = pixels(page)
    world = page.get_by_label("world, exact value in devices")
    world.fill("100")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: page.get_by_role("alert").inner_text().endswith("but 96 and 104 are: try 96"))
    world.fill("96")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline").endswith("12 replicas × 4 microbatches = 384 sequences"))
    until(lambda: pixels(page) != seen)
    found = Axe().run(page, context=".lk").response["violations"]
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
