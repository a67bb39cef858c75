"""The audit lab as a browser shows it: a loop predicted and named, a hunt in live mode, a report in a cell."""

from __future__ import annotations

from tests.lab_in_browser import Opened, accessible, pixels, step, until, words

CELL = "import labkit\nlab = labkit.labs.audit()\nlab"
REPORT = "from labkit.audit.bug_hunt.suspects import loops\nlabkit.labs.shown(loops(loop='B'))"


def test_a_loop_is_named_and_a_fault_is_hunted(opened: Opened) -> None:
    page = opened(CELL, REPORT)
    page.get_by_label("The heaviest microbatch: how many times its right weight?").fill("1.855263")
    step(page)
    until(lambda: "exactly" in words(page, "score"))
    assert words(page, "headline") == "mean-of-means"
    page.get_by_label("The bug hunt", exact=True).check()
    page.get_by_label("live", exact=True).check()
    until(lambda: words(page, "headline") == "Not guessed yet: 10 points to win")
    before = pixels(page)
    page.get_by_label("one forward", exact=True).check()
    until(lambda: "9 points" in words(page, "headline") and pixels(page) != before)
    page.get_by_label("guess", exact=True).select_option("batch-dependent-layer")
    until(lambda: words(page, "headline") == "Right, batch-dependent-layer: 9 points")
    accessible(page)
    figure = page.locator(".jp-OutputArea-output figure").last
    assert "schedule-per-microbatch" in figure.inner_text()
    assert figure.locator("img.lk-light").is_visible() and not figure.locator("img.lk-dark").is_visible()
    assert figure.locator("img.lk-light").evaluate("image => image.complete && image.naturalWidth > 0")
