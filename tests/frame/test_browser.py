"""What only a browser shows: keys, pixels, focus, themes, accessibility, and that no request leaves the machine."""

from __future__ import annotations

import time

import pytest

from tests.lab_in_browser import (
    Opened,
    accessible,
    command,
    corner,
    pixels,
    step,
    still,
    theme,
    until,
    words,
)

CEILING = "import labkit\nlab = labkit.labs.roofline('ceiling')\nlab"
TOPIC = "import labkit\nlab = labkit.labs.roofline()\nlab"
KERNEL = "jupyterapp.shell.currentWidget.sessionContext.session.kernel.status"
LONG = "from labkit.labs import Lab\nfrom tests.made import Long\nlab = Lab([Long()], steps=1000, pause=0.02)\nlab"


def test_predict_step_score_reset(opened: Opened) -> None:
    page = opened(CEILING)
    hidden = pixels(page)
    assert "160" not in page.locator(".lk").inner_text()
    page.get_by_label("What rate does the roof allow?").fill("150")
    page.keyboard.press("Enter")
    until(lambda: page.locator(".lk-top .lk-primary").inner_text() == "Step")
    step(page)
    until(lambda: "160" in words(page, "headline"))
    assert words(page, "score") == "You predicted 150 GFLOP/s, it is 160 GFLOP/s: 6.25 % off."
    until(lambda: pixels(page) != hidden)
    assert page.locator(".lk").get_by_role("img").get_attribute("aria-label") == words(page, "sentence")
    page.get_by_role("button", name="Reset", exact=True).click()
    until(lambda: "hidden" in words(page, "sentence"))
    assert page.get_by_label("What rate does the roof allow?").input_value() == ""


def test_a_typed_number_counts_although_predict_was_not_pressed(opened: Opened) -> None:
    page = opened(CEILING)
    page.get_by_label("What rate does the roof allow?").fill("160")
    step(page)
    until(lambda: "exactly" in words(page, "score"))


def test_a_slider_key_changes_pixels_and_sentence_and_values_stay_exact(opened: Opened) -> None:
    page = opened(CEILING)
    page.get_by_label("live", exact=True).check()
    until(lambda: "160" in words(page, "headline"))
    before = pixels(page)
    slider = page.get_by_role("slider", name="intensity")
    assert slider.get_attribute("aria-valuetext") == "2 FLOP/byte"
    slider.focus()
    page.keyboard.press("ArrowRight")
    until(lambda: words(page, "sentence").startswith("At 2.18 FLOP/byte"))
    until(lambda: pixels(page) != before)
    page.get_by_label("bandwidth, exact value in GB/s").fill("123.456")
    page.keyboard.press("Enter")
    until(lambda: "123.5 GB/s" in words(page, "sentence"))
    assert page.get_by_label("bandwidth, exact value in GB/s").input_value() == "123.456"


def test_keys_go_in_reading_order_and_step_keeps_its_focus(opened: Opened) -> None:
    page = opened(CEILING)
    page.get_by_label("predict first").focus()
    seen = []
    named = (
        """(e => e.textContent || e.getAttribute('aria-label') || e.labels?.[0]?.textContent)(document.activeElement)"""
    )
    for _ in range(10):
        seen.append(page.evaluate(named))
        page.keyboard.press("Tab")
    assert seen == [
        "predict first", "What rate does the roof allow?", "Predict", "Step", "Reset",
        "intensity, exact value in FLOP/byte", "intensity", "bandwidth, exact value in GB/s", "bandwidth",
        "ceiling, exact value in GFLOP/s",
    ]  # fmt: skip
    page.get_by_role("button", name="Step", exact=True).focus()
    page.keyboard.press("Space")
    until(lambda: "160" in words(page, "headline"))
    assert page.evaluate("document.activeElement.textContent") == "Step"


def test_a_bad_value_stands_in_the_alert_line_until_the_remedy_is_followed(opened: Opened) -> None:
    page = opened(CEILING)
    field = page.get_by_label("bandwidth, exact value in GB/s")
    field.fill("99999")
    page.keyboard.press("Enter")
    until(lambda: page.get_by_role("alert").inner_text() == "bandwidth = 99999 is outside 10 … 4000 GB/s: try 4000")
    assert (field.input_value(), field.get_attribute("aria-invalid")) == ("99999", "true")
    field.fill("4000")
    page.keyboard.press("Enter")
    until(lambda: page.get_by_role("alert").inner_text() == "")
    assert field.get_attribute("aria-invalid") == "false"


def test_axe_finds_nothing_serious(opened: Opened) -> None:
    page = opened(TOPIC)
    accessible(page)
    step(page)
    until(lambda: "160" in words(page, "headline"))
    accessible(page)


def test_the_picture_is_dark_at_first_paint_and_follows_the_theme(opened: Opened) -> None:
    page = opened(CEILING, "import time; time.sleep(3)", dark=True)
    assert sum(corner(page)[:3]) < 150
    theme(page, dark=False)
    until(lambda: sum(corner(page)[:3]) > 600)
    theme(page, dark=True)
    until(lambda: sum(corner(page)[:3]) < 150)


@pytest.mark.parametrize("ratio", [1, 2])
def test_the_picture_has_the_displays_own_pixels(opened: Opened, ratio: int) -> None:
    page = opened(CEILING, ratio=ratio)
    shape = "(c => [c.width / c.clientWidth, c.height / c.clientHeight])(document.querySelector('.lk-canvas'))"
    until(lambda: page.evaluate(shape) == pytest.approx([ratio, ratio], abs=0.01))


@pytest.mark.parametrize("width", [700, 1024, 1400])
def test_nothing_sticks_out_and_narrow_is_one_column(opened: Opened, width: int) -> None:
    page = opened(CEILING, width=width, fresh=True)
    command(page, "application:toggle-left-area")
    until(lambda: page.evaluate("(e => e.scrollWidth <= e.clientWidth + 1)(document.querySelector('.lk'))"))
    still(page)
    below = "document.querySelector('.lk-picture').offsetTop > document.querySelector('.lk-controls').offsetTop + 20"
    assert page.evaluate(below) == (width == 700)


def test_a_hundred_moves_end_in_the_last_state(opened: Opened) -> None:
    page = opened(CEILING)
    page.get_by_label("live", exact=True).check()
    until(lambda: "160" in words(page, "headline"))
    page.evaluate(
        """async () => { const range = document.querySelector('.lk-control[data-name=bandwidth] [type=range]')
        for (let i = 0; i < 100; i++) { range.value = i % 60; range.dispatchEvent(new Event('input'))
          await new Promise(r => setTimeout(r, 20)) } range.value = 3; range.dispatchEvent(new Event('input')) }"""
    )
    last = page.get_by_label("bandwidth, exact value in GB/s").input_value()
    until(lambda: f"{last} GB/s" in words(page, "sentence"))


def test_stop_keeps_what_is_there_and_the_next_run_works(opened: Opened) -> None:
    page = opened(LONG)
    step(page)
    until(lambda: words(page, "headline").endswith("steps"))
    pressed = time.monotonic()
    page.get_by_role("button", name="Stop", exact=True).click()
    until(lambda: not page.get_by_role("button", name="Stop", exact=True).is_visible())
    assert time.monotonic() - pressed < 5  # a second for the lab, the rest for a busy machine
    kept = int(words(page, "headline").split()[0])
    assert 0 < kept < 1000
    page.get_by_label("steps, exact value").fill("3")
    page.keyboard.press("Enter")
    step(page)
    until(lambda: words(page, "headline") == "3 steps")


def test_tabs_switch_experiments_and_keep_their_answers(opened: Opened) -> None:
    page = opened(TOPIC)
    step(page)
    until(lambda: "160" in words(page, "headline"))
    page.get_by_label("Trap: sparse peak").check()
    until(lambda: words(page, "headline") == "Trap: sparse peak")
    page.get_by_label("A modelled ceiling").check()
    until(lambda: "160" in words(page, "headline"))


def test_two_views_show_the_same_and_a_reload_restores_it(opened: Opened) -> None:
    page = opened(CEILING, "lab", fresh=True)
    page.get_by_role("button", name="Step", exact=True).first.click()
    until(lambda: "160" in page.locator(".lk-headline").nth(1).inner_text())
    same = "(([a, b]) => a.toDataURL() === b.toDataURL())(document.querySelectorAll('.lk-canvas'))"
    until(lambda: page.evaluate(same))
    picture = pixels(page)
    command(page, "docmanager:save")
    page.reload()
    page.wait_for_selector(".lk-canvas[data-seq]", timeout=60_000)
    until(lambda: "160" in words(page, "headline"))
    until(lambda: pixels(page) == picture)


def test_code_reaches_the_page(opened: Opened) -> None:
    page = opened(CEILING, "lab.set(intensity=8)\nlab.figure.axes[0].set_title('of a teacher')\nlab.step()")
    until(lambda: "640" in words(page, "headline"))


def test_after_a_restart_one_line_says_so(opened: Opened) -> None:
    page = opened(CEILING)
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:restart-kernel') }")
    page.locator(".jp-Dialog button.jp-mod-accept").click()
    until(lambda: "run this cell again" in page.get_by_role("alert").inner_text())
    until(lambda: page.evaluate(KERNEL) == "idle")


def test_the_weight_of_each_token_is_predicted_seen_and_mended(opened: Opened) -> None:
    cell = "import labkit\nlab = labkit.labs.accumulation('weights', sequences=2, accumulation_steps=2, seed=3)\nlab"
    page = opened(cell)
    page.get_by_label("The heaviest token: how many times its right weight?").fill("4.375")
    step(page)
    until(lambda: "exactly" in words(page, "score"))
    wrong = pixels(page)
    page.get_by_label("rule", exact=True).select_option("token-mean")
    until(lambda: "hidden" in words(page, "sentence"))
    step(page)
    until(lambda: "equal to the full batch" in words(page, "headline"))
    until(lambda: pixels(page) != wrong)
    accessible(page)


def test_two_trainings_are_drawn_while_they_run(opened: Opened) -> None:
    page = opened("import labkit\nlab = labkit.labs.accumulation('trainings', updates=200)\nlab")
    step(page)
    until(lambda: "of 200 updates" in words(page, "headline"))
    early = pixels(page)
    until(lambda: pixels(page) != early)
    page.get_by_role("button", name="Stop", exact=True).click()
    until(lambda: not page.get_by_role("button", name="Stop", exact=True).is_visible())
    assert "of 200 updates" in words(page, "headline")


def test_a_learners_own_loop_is_judged_in_the_notebook(opened: Opened) -> None:
    loop = """from labkit import check, nets
def accumulate(model, microbatches):
    for tokens, labels in microbatches:
        nets.next_token_loss(model, tokens, labels, "mean").backward()
check.accumulate(accumulate)"""
    page = opened(CEILING, loop)
    said = page.locator(".jp-OutputArea-output").last
    until(lambda: "four means were added and never divided" in " ".join(said.inner_text().split()))


def test_the_installation_answers(opened: Opened) -> None:
    page = opened("import labkit\nlabkit.labs.installation()", CEILING)
    until(
        lambda: "there and back" in page.get_by_role("status").first.inner_text() or "there and back" in page.content()
    )
