"""The memory lab in a browser: a sweep that is predicted and drawn, the classic mistake, and what axe says of them."""

from __future__ import annotations

from tests.lab_in_browser import Opened, accessible, pixels, step, until, words

CELL = "import labkit\nlab = labkit.labs.memory()\nlab"


def test_a_sweep_is_predicted_and_the_classic_mistake_is_seen(opened: Opened) -> None:
    page = opened(CELL)
    page.get_by_label("The full batch: how many times the bytes of b = 1?").fill("16")
    step(page)
    until(lambda: "290 kB for each sequence of a microbatch, whatever K" in words(page, "headline"))
    until(lambda: words(page, "score").startswith("You predicted 16 times, it is 16.01 times"))
    page.get_by_label("The classic mistake").check()
    until(lambda: words(page, "headline") == "The classic mistake")
    step(page)
    until(lambda: words(page, "headline") == "summed loss: 4 times the peak, for the same gradient")
    mistaken = pixels(page)
    page.get_by_label("loop", exact=True).select_option("logged loss")
    step(page)
    until(lambda: words(page, "headline") == "logged loss: no more than backward in the loop")
    until(lambda: pixels(page) != mistaken)
    accessible(page)
