"""The packing lab in a browser: a leak that is predicted, seen and mended, positions, and what axe says of them."""

from __future__ import annotations

from tests.lab_in_browser import Opened, accessible, pixels, step, until, words

CELL = "import labkit\nlab = labkit.labs.packing()\nlab"


def test_a_leak_is_predicted_seen_and_mended(opened: Opened) -> None:
    page = opened(CELL)
    page.get_by_label("Padded to the longest of its batch: what share is padding?").fill("50")
    step(page)
    until(lambda: words(page, "headline").startswith("Padding: "))
    until(lambda: words(page, "score").startswith("You predicted 50 %, it is "))
    page.get_by_label("The leak").check()
    until(lambda: words(page, "headline") == "The leak")
    step(page)
    until(lambda: words(page, "headline").startswith("The loss leaks into other documents: "))
    leaking = pixels(page)
    page.get_by_label("mask", exact=True).select_option("block causal")
    step(page)
    until(lambda: words(page, "headline") == "Nothing leaks: 0 to the last bit")
    until(lambda: pixels(page) != leaking)
    page.get_by_label("Positions that restart, or run on").check()
    step(page)
    until(lambda: words(page, "headline").endswith("rotary equal"))
    accessible(page)
