"""The data parallel lab as a browser shows it: predict, step, another experiment, a killed rank, and an exercise."""

from __future__ import annotations

from tests.lab_in_browser import Opened, accessible, pixels, step, until, words

CELL = "import labkit\nlabkit.data_parallel.recipes(seed=1)  # starts the ranks\nlab = labkit.labs.data_parallel()\nlab"
LOSS = """from labkit import check
check.ddp_loss(lambda local_sum, local_count, global_count, world: local_sum / global_count)"""


def test_a_recipe_is_predicted_all_reduces_counted_a_rank_killed_and_a_loss_judged(opened: Opened) -> None:
    page = opened(CELL, LOSS)
    page.get_by_label("How large is the relative error of the gradient?").fill("30")
    step(page)
    until(lambda: "You predicted 30 %, it is" in words(page, "score"))
    weights = pixels(page)
    page.get_by_label("Where no_sync stands").click()
    until(lambda: "hidden" in words(page, "sentence"))
    step(page)
    until(lambda: words(page, "headline").endswith("synchronised four times all the same"))
    until(lambda: pixels(page) != weights)
    page.get_by_label("A rank is killed").click()
    until(lambda: "hidden" in words(page, "sentence"))
    step(page)
    until(lambda: "and the next run works" in words(page, "headline"))
    assert "rank 1 of 2 was killed by SIGKILL" in words(page, "sentence")
    accessible(page)
    said = page.locator(".jp-OutputArea-output").last
    until(lambda: "DDP divides by the number of ranks once more" in " ".join(said.inner_text().split()))
