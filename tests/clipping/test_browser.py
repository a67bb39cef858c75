"""The clipping lab as a browser shows it: predict, step, another order, and a learner's own step judged."""

from __future__ import annotations

from tests.lab_in_browser import Opened, accessible, pixels, step, until, words

CELL = "import labkit\nlab = labkit.labs.clipping('orders')\nlab"
STEP = """from labkit import check, nets
def step(model, optimizer, scaler, microbatches, max_norm):
    for tokens, labels in microbatches:
        scaler.scale(nets.next_token_loss(model, tokens, labels, "mean") / len(microbatches)).backward()
        scaler.unscale_(optimizer)
check.clipped_step(step)"""


def test_an_order_is_predicted_seen_and_mended_and_a_step_is_judged(opened: Opened) -> None:
    page = opened(CELL, STEP)
    page.get_by_label("The heaviest microbatch: how many times the lightest?").fill("16")
    step(page)
    until(lambda: "exactly" in words(page, "score"))
    assert "weigh 1, 16, 16, 16" in words(page, "sentence")
    wrong = pixels(page)
    page.get_by_label("rule", exact=True).select_option("clip-once")
    until(lambda: "hidden" in words(page, "sentence"))
    step(page)
    until(lambda: words(page, "headline") == "Equal to clip-once, as far as rounding goes")
    until(lambda: pixels(page) != wrong)
    accessible(page)
    said = page.locator(".jp-OutputArea-output").last
    until(lambda: "Unscale once a window, after the loop." in " ".join(said.inner_text().split()))
