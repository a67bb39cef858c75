"""The batch lab in a browser: predicted, seen, turned, and a world that does not divide mended as its message says."""

from __future__ import annotations

from tests.lab_in_browser import Opened, accessible, pixels, step, until, words


def test_a_step_is_predicted_and_a_world_that_does_not_divide_is_mended(opened: Opened) -> None:
    page = opened("import labkit\nlab = labkit.labs.batch('planner')\nlab")
    page.get_by_label("How many sequences does one optimizer step consume?").fill("256")
    step(page)
    until(lambda: "exactly" in words(page, "score"))
    seen = pixels(page)
    world = page.get_by_label("world, exact value in devices")
    world.fill("100")
    page.keyboard.press("Enter")
    step(page)
    until(lambda: page.get_by_role("alert").inner_text().endswith("but 96 and 104 are: try 96"))
    world.fill("96")
    page.keyboard.press("Enter")
    step(page)
    until(lambda: words(page, "headline").endswith("12 replicas × 4 microbatches = 384 sequences"))
    until(lambda: pixels(page) != seen)
    accessible(page)
