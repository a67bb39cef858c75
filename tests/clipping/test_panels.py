"""The clipping lab: what it draws is what reached the optimizer, at every extreme of every control."""

from __future__ import annotations

import math

import numpy as np
import pytest

import labkit
from labkit.clipping.ordering import ORDERS
from labkit.clipping.panels import Orders
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.labs import Lab


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


def stepped(name: str, **values: object) -> Lab:
    lab = labkit.labs.clipping(name, **values)
    lab.step()
    return lab


@pytest.mark.parametrize("word", ORDERS)
@pytest.mark.parametrize("max_norm", [1.0, 1e5])
def test_dots_are_the_fitted_weights_and_bars_the_predicted(word: str, max_norm: float) -> None:
    lab = stepped("orders", rule=word, max_norm=max_norm)
    shown, result = lab.experiment, lab.result
    assert list(shown.fitted.get_xdata()) == pytest.approx(result.weights.tolist())
    assert list(shown.predicted.get_xdata()) == pytest.approx(result.predicted.tolist())
    assert list(shown.fitted.get_ydata()) == [1, 2, 3, 4]
    assert set(shown.right.get_xdata()) == {result.right_weight}
    low, high = shown.axes.get_xlim()
    assert all(low < x < high for x in (*shown.fitted.get_xdata(), result.right_weight))


def test_replacing_an_order_behind_the_librarys_back_moves_the_dots_and_not_the_bars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ORDERS, "clip-once", (ORDERS["unscale-early"][0], ORDERS["clip-once"][1]))
    shown = stepped("orders", rule="clip-once").experiment
    assert list(shown.fitted.get_xdata()) == pytest.approx([1, 16, 16, 16])
    assert list(shown.predicted.get_xdata()) == [1, 1, 1, 1]


def test_unscaled_early_the_others_weigh_s_and_the_prediction_is_scored() -> None:
    lab = labkit.labs.clipping("orders")
    lab.predict(16)
    lab.step()
    assert lab.score == pytest.approx(0, abs=1e-9) and lab.page["headline"] == "11 times as long as the right step"
    assert "the microbatches weigh 1, 16, 16, 16; clip-once gives each 1" in lab.text


def test_the_right_order_is_called_equal_with_its_tolerance() -> None:
    lab = stepped("orders", rule="clip-once", max_norm=1.0)
    assert (
        lab.page["headline"] == "Equal to clip-once, as far as rounding goes" and "rounding alone explains" in lab.text
    )


def test_what_torch_refuses_is_shown() -> None:
    lab = stepped("orders", rule="unscale-every")
    assert "torch's unscale_ refuses this order" in lab.text and "RuntimeError: unscale_() has already been" in lab.text
    lab = stepped("orders", rule="unscale-every", accumulation_steps=8, scale_exponent=16)
    assert "weigh ≈ 0, ≈ 0" in lab.text and lab.experiment.answer(lab.result) == pytest.approx(1e15)
    words = [word.get_text() for word in lab.experiment.words]
    assert words[0] == "≈ 0" and words[-1] == "1"


def test_many_microbatches_carry_no_numbers_in_the_picture() -> None:
    lab = stepped("orders", accumulation_steps=32, sequences=32)
    assert not any(word.get_text() for word in lab.experiment.words) and "1, 16, 16, …, 16;" in lab.text


def test_clipped_once_and_each() -> None:
    lab = stepped("clip")
    shown, result = lab.experiment, lab.result
    assert lab.page["headline"] == "Clipped once: 1 long; each: 0.693, turned by 6.14°" and "31.9 % off" in lab.text
    measured = [float(dot.get_ydata()[0]) for dot in shown.dots]
    assert measured == [result.once, result.each, 0, result.angle]
    for line, dot in zip(shown.lines, shown.dots, strict=True):
        x, y = line.get_data()
        assert np.interp(math.log(result.max_norm), np.log(x), y) == pytest.approx(
            dot.get_ydata()[0], rel=1e-4, abs=1e-3
        )
    assert stepped("clip", max_norm=10).page["headline"] == "No microbatch is longer than c: no difference"


def test_what_half_precision_loses() -> None:
    lab = stepped("underflow")
    shown, result = lab.experiment, lab.result
    assert lab.page["headline"] == "float16: 22.8 % became 0 and 0 % inf or NaN" and "54.8 % off" in lab.text
    assert sum(shown.all.get_ydata()) == pytest.approx(100, rel=1e-4)
    assert sum(shown.lost.get_ydata()) == pytest.approx(result.zero, rel=1e-4)
    assert [set(line.get_xdata()) for line in shown.limits] == [{-24.0}, {result.largest}]
    assert stepped("underflow", scale_exponent=12).page["headline"] == "float16: no entry is lost"


def test_bfloat16_has_no_limit_on_the_picture() -> None:
    lab = stepped("underflow", dtype="bfloat16")
    shown = lab.experiment
    assert lab.page["headline"] == "bfloat16: no entry is lost" and not any(
        len(line.get_xdata()) for line in shown.limits
    )
    assert [word.get_text() for word in shown.words] == ["← smallest", "largest →"]


def test_steps_are_skipped_and_counted() -> None:
    lab = labkit.labs.clipping("overflow")
    lab.predict(11)
    lab.step()
    shown, result = lab.experiment, lab.result
    assert lab.page["headline"] == "Steps skipped: 1 counted in windows, 11 in microbatches" and lab.score == 0
    assert [len(mark.get_xdata()) for mark in shown.marks] == [result.right_skipped, result.wrong_skipped]
    for line, scale in zip(shown.lines, (result.scale, result.scale_per_microbatch), strict=True):
        assert list(line.get_ydata())[:-1] == scale.tolist()


def test_a_search_that_is_under_way_says_how_far_it_is() -> None:
    experiment = stepped("overflow", updates=20).experiment
    first = next(experiment.run(updates=20))
    assert experiment.headline(first) == "1 of 20 steps" and experiment.describe(first).startswith("1 optimizer steps.")


def test_ranks_that_disagree_drift_and_ranks_that_agree_do_not() -> None:
    lab = stepped("ranks")
    shown = lab.experiment
    assert lab.page["headline"] == "37.5 % apart, from one step that only one rank skipped"
    assert "2^15 and the last one's 2^16" in lab.text and "is 2 times what it should be" in lab.text
    assert list(shown.wrong.get_ydata()) == lab.result.distance.tolist() and not len(shown.right.get_xdata())
    assert set(shown.when.get_xdata()) == {5}
    lab = stepped("ranks", agree=True)
    assert "no distance" in lab.page["headline"] and list(lab.experiment.right.get_ydata()) == [0] * 20


def test_the_source_on_the_page_holds_the_orders() -> None:
    source = Lab([Orders()]).spec["source"]
    assert "def unscale_early(" in source and "scaler.unscale_(optimizer)" in source
