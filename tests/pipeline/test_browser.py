"""The pipeline lab as a browser shows it: ranks started from a page, a batch that fails, a step in time, a verdict."""

from __future__ import annotations

from tests.lab_in_browser import Opened, accessible, pixels, step, until, words

CELL = "import labkit\nlab = labkit.labs.pipeline()\nlab"
LOSS = """from labkit import check
from torch.nn.functional import cross_entropy
check.pipeline_loss(lambda logits, targets, N: cross_entropy(logits.transpose(1, 2), targets, reduction="sum") / N)"""


def test_weights_are_predicted_a_batch_refused_by_the_library_a_step_seen_and_a_loss_judged(opened: Opened) -> None:
    page = opened(CELL, LOSS)
    page.get_by_label("By how many per cent is the gradient wrong?").fill("70")
    step(page)
    until(lambda: "You predicted 70 %, it is 71.78 %" in words(page, "score"))
    weights = pixels(page)
    page.get_by_label("A batch that does not divide").click()
    until(lambda: "hidden" in words(page, "sentence"))
    step(page)
    until(lambda: words(page, "headline") == "The library stopped")
    until(lambda: pixels(page) != weights)
    page.get_by_label("One step of a pipeline in time").click()
    until(lambda: "hidden" in words(page, "sentence"))
    step(page)
    until(lambda: words(page, "headline") == "GPipe, 2 ranks, M = 4: 20 % bubble, keeps 4")
    accessible(page)
    said = page.locator(".jp-OutputArea-output").last
    until(lambda: "double-division" in said.inner_text())
