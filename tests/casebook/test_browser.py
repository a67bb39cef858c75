"""The casebook as a browser shows it: cases chosen from the list, one on real ranks, a case as a page with links."""

from __future__ import annotations

from tests.lab_in_browser import Opened, accessible, pixels, step, until, words

CELL = "import labkit\nlab = labkit.labs.casebook()\nlab"
PAGE = "labkit.casebook.find('B57')"


def test_a_case_is_predicted_and_another_is_chosen(opened: Opened) -> None:
    page = opened(CELL, PAGE)
    page.get_by_label("What does the wrong loop give?").fill("5")
    step(page)
    until(lambda: words(page, "score") == "You predicted 5, it is 5: exactly.")
    assert words(page, "headline") == "Gradient: 5 in place of 3.5"
    before = pixels(page)
    page.get_by_label("case", exact=True).select_option("B40 DDP bypassed")
    until(lambda: "hidden" in words(page, "sentence") and pixels(page) != before)
    assert page.evaluate("document.activeElement.tagName") != "BODY" and "5.5" not in words(page, "sentence")
    step(page)
    page.locator(".lk-headline").filter(has_text="Gradient of rank 0: 1 in place of 5.5").wait_for(timeout=60_000)
    accessible(page)
    link = page.locator(".jp-OutputArea-output a").first
    assert link.get_attribute("href") == "https://github.com/huggingface/sentence-transformers/issues/1822"
    code = page.locator(".jp-OutputArea-output pre").last
    assert (
        "negatives_of_the_batch" in code.inner_text() and code.evaluate("e => getComputedStyle(e).whiteSpace") == "pre"
    )
