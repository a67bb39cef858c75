"""The acceptance test as a browser shows it: gates passed one by one, a margin moved, two traces."""

from __future__ import annotations

from tests.lab_in_browser import Opened, accessible, pixels, step, until, words

CELL = "import labkit\nlab = labkit.labs.audit('acceptance')\nlab"


def test_a_candidate_is_adopted_and_another_is_not(opened: Opened) -> None:
    page = opened(CELL)
    page.get_by_label("How many of the four gates does the candidate pass?").fill("4")
    step(page)
    until(lambda: "exactly" in words(page, "score"))
    assert words(page, "headline") == "Adopt: four gates passed"
    before = pixels(page)
    page.get_by_label("candidate", exact=True).select_option("new trainer")
    step(page)
    until(lambda: words(page, "headline") == "Reject: it fails at traces" and pixels(page) != before)
    page.get_by_label("candidate", exact=True).select_option("larger batch")
    page.get_by_label("invariant", exact=True).select_option("large-batch")
    step(page)
    until(lambda: words(page, "headline").startswith("Cannot tell: open at invariant"))
    accessible(page)
