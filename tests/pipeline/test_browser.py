"""The pipeline lab as a browser shows it: ranks started from a page, a batch that fails, a step in time, a verdict."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.frame.test_browser import Opened, opened, pixels, served, until, words

__all__ = ["opened", "served"]  # fixtures
pytestmark = pytest.mark.browser

CELL = "import labkit\nlab = labkit.labs.pipeline()\nlab"
LOSS = """from labkit import check
from torch.nn.functional import cross_entropy
check.pipeline_loss(lambda logits, targets, N: cross_entropy(logits.transpose(1, 2), targets, reduction="sum") / N)"""


def test_weights_are_predicted_a_batch_refused_by_the_library_a_step_seen_and_a_loss_judged(opened: Opened) -> None:
    page = opened(CELL, LOSS)
    page.get_by_label("By how many per cent is the gradient wrong?").fill("70")
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: "You predicted 70 %, it is 71.78 %" in words(page, "score"))
    weights = pixels(page)
    page.get_by_label("A batch that does not divide").click()
    until(lambda: "hidden" in words(page, "sentence"))
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline") == "The library stopped")
    until(lambda: pixels(page) != weights)
    page.get_by_label("One step of a pipeline in time").click()
    until(lambda: "hidden" in words(page, "sentence"))
    page.get_by_role("button", name="Step", exact=True).click()
    until(lambda: words(page, "headline") == "GPipe, 2 ranks, M = 4: 20 % bubble, keeps 4")
    found = Axe().run(page, context=".lk").response["violations"]
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
    said = page.locator(".jp-OutputArea-output").last
    until(lambda: "double-division" in said.inner_text())
