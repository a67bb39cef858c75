"""The noise lab: what it draws is what was measured, at every extreme of every control."""

from __future__ import annotations

import math
from typing import Any

import pytest

import labkit
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.labs import Lab
from labkit.noise.panels import EXPERIMENTS, between
from tests.frame.driven import drawn_while_running, ticks

LONG: dict[str, Any] = {"noise": 1.0, "target": 2.0, "largest": 128, "seeds": 4}


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


def stepped(name: str, **values: object) -> Lab:
    lab = labkit.labs.noise(name, **values)
    lab.step()
    return lab


def shown(lab: Lab) -> Any:
    return lab.experiment


def test_ten_voters_and_a_million() -> None:
    lab = labkit.labs.noise("voters")
    lab.predict(316)
    lab.step()
    seen, result = shown(lab), lab.result
    assert lab.score == pytest.approx(abs(316 - result.ratio) / result.ratio)
    assert lab.page["headline"] == "1,000,000 voters or 10: 303 times less spread"
    assert "a poll of 10 lies 0.156 from that of all, that of a poll of 1,000,000 lies 0.000514 from it" in lab.text
    assert "= 316." in lab.text
    assert list(seen.formula.get_ydata()) == result.formula.tolist()
    assert list(seen.measured.dots.get_ydata()) == result.spread.tolist()
    assert list(seen.rings.get_xdata()) == [10, 1_000_000] and seen.words[0].get_text() == "0.156"
    (left, right), (low, high) = seen.axes.get_xlim(), seen.axes.get_ylim()
    assert left < 1 and right > 1e6 and low < min(result.spread) and max(result.spread) < high


def test_the_noise_scale_stands_where_the_line_has_twice_the_norm() -> None:
    lab = stepped("norms")
    seen, result = shown(lab), lab.result
    assert lab.page["headline"] == "Noise scale 20.3 examples, 95 % between 18.7 and 22.1"
    assert "In closed form: 0.939, 19.7 and 21." in lab.text and "gets 14.5; algebra says 14.8" in lab.text
    assert list(seen.measured.dots.get_ydata()) == pytest.approx(result.measured.tolist())
    assert list(seen.estimate.dots.get_xdata()) == [result.estimated] and lab.result.noise_scale == pytest.approx(21)
    assert list(seen.estimate.bars.get_xdata())[:2] == [result.least, result.most]
    height = float(seen.estimate.dots.get_ydata()[0])
    assert height == pytest.approx(2 * result.squared_norm)
    assert result.squared_norm + result.trace / result.noise_scale == pytest.approx(height)
    assert list(seen.naive.get_xdata()) == [result.naive] and list(seen.rings.get_xdata()) == [4, 64]
    line = seen.formula.get_data()
    assert [x * (y - result.squared_norm) for x, y in zip(*line, strict=True)] == pytest.approx([result.trace] * 41)


def test_a_gradient_that_is_drowned_has_no_end() -> None:
    lab = stepped("norms", distance=0.05, noise=8.0, steps=16, big=2, small=1, seed=3)
    assert math.isinf(lab.result.most) and "no end" in lab.text
    assert math.isfinite(shown(lab).answer(lab.result)) and ticks(lab) <= 5
    lost = next(
        lab
        for seed in range(20)
        if math.isinf(
            (lab := stepped("norms", distance=0.05, noise=8.0, steps=16, big=2, small=1, seed=seed)).result.estimated
        )
    )
    assert lost.page["headline"] == "Nothing of the gradient is seen above its noise"
    assert shown(lost).answer(lost.result) == 1e6 and "noise scale no end" in lost.text
    assert shown(lost).words.get_text() == "no end (closed form 25600)"


def test_what_lies_below_the_picture_is_drawn_at_its_edge() -> None:
    assert between([0.5], [-1.0], [2.0], 0.1) == [(0.1, 0.5, 2.0)]


def test_steps_and_samples_over_the_least_meet_at_the_critical_batch() -> None:
    lab = labkit.labs.noise("batches")
    lab.predict(512)
    lab.step()
    seen, result = shown(lab), lab.result
    S, B = result.fit
    assert lab.page["headline"] == "512 times the batch, 43.6 times fewer steps"
    assert "SGD: 1180 steps with a batch of 1, 27 steps with 512, for 11.7 times the samples" in lab.text
    assert "Critical batch 49.1; the noise scale at the start is 53 in closed form." in lab.text
    for dots, values, least in zip(seen.dots, (result.steps, result.samples), (S, S * B), strict=True):
        assert list(dots.dots.get_ydata()) == pytest.approx((values / least).tolist())
    for line, curve in zip(seen.lines, (lambda b: 1 + B / b, lambda b: 1 + b / B), strict=True):
        assert [curve(b) for b in line.get_xdata()] == pytest.approx(list(line.get_ydata()))
    assert list(seen.critical.get_xdata()) == pytest.approx([B, B]) and seen.words[2].get_text() == "B = 49.1"
    low, high = seen.axes.get_ylim()
    assert all(low < y < high for dots in seen.dots for y in dots.dots.get_ydata())


def test_the_linear_rule_is_crossed_where_it_fails() -> None:
    lab = stepped("rates")
    seen, result = shown(lab), lab.result
    assert lab.page["headline"] == "SGD: linear holds up to 8, square root up to 1"
    assert list(seen.fails.get_xdata()) == [b for b in result.sizes.tolist() if b > 8]
    assert list(seen.best.dots.get_ydata()) == pytest.approx(result.best.tolist())
    linear = [y for y in seen.linear.get_ydata() if not math.isnan(y)]
    assert linear == pytest.approx([0.0625 * 2**k for k in range(len(linear))]) and max(linear) > 2
    assert max(linear) < 0.3 * seen.axes.get_ylim()[1]  # above it stand the words
    assert list(seen.root.get_ydata()) == pytest.approx([0.0625 * 2 ** (k / 2) for k in range(10)])
    assert "not there in twice the time by the linear rule and 0 % more steps by the square root" in lab.text
    assert "Best learning rate 0.0625 with a batch of 1, 1.41 with 512" in lab.text
    adam = stepped("rates", optimizer="Adam")
    assert adam.page["headline"] == "Adam: linear holds up to 2, square root up to 64"


@pytest.mark.parametrize("name", ["batches", "rates"])
def test_a_race_that_is_under_way_says_how_far_it_is_and_can_be_drawn(name: str) -> None:
    lab = labkit.labs.noise(name, **LONG, seed=17)
    experiment, seen = shown(lab), set()
    for result in drawn_while_running(lab):
        seen.add(result.measured)
        if result.progress < 1:
            assert experiment.headline(result) == f"{result.measured} of 8 batch sizes"
            assert experiment.describe(result) == "The trainings are under way."
    assert seen == set(range(9))


def test_a_second_look_is_instant() -> None:
    lab = stepped("batches", **LONG, seed=18)
    assert len(list(shown(lab).run(**lab.values))) == 9  # every race at once
    assert len(list(shown(labkit.labs.noise("rates")).run(**LONG, optimizer="SGD", base=1, seed=18))) == 9


def test_warmup_saves_what_is_lost_without() -> None:
    lab = labkit.labs.noise("warmup")
    lab.predict(6)
    lab.step()
    seen, result = shown(lab), lab.result
    assert lab.score == 0 and lab.page["headline"] == "Lost without warmup: 6 of 8, with warmup: 0"
    assert "Curvature at the start 1.99, so η × curvature is 5.96 at once without" in lab.text
    assert "at most 3.46." in lab.text and "∞ without" in lab.text
    for at in (0, 1):
        y = [each for each in seen.lines[at].get_ydata() if not math.isnan(each)]
        assert y == result.sharpness[at].clamp(0.001, 1000).flatten().tolist()
    assert list(seen.border.get_ydata()) == [2, 2]
    assert "with it, some are lost too." in stepped("warmup", warmup=2).text


def test_decay_in_a_larger_batch() -> None:
    lab = labkit.labs.noise("decay")
    lab.predict(6.25)
    lab.step()
    seen, result = shown(lab), lab.result
    assert lab.score == pytest.approx(0, abs=1e-9)
    assert lab.page["headline"] == "Nothing scaled: 6.25 % of the decay, 92.3 % of the weight is left"
    assert (
        "the base batch makes 256 steps and leaves 27.7 % of a weight. A batch 16 times as large makes 16," in lab.text
    )
    assert (
        "leaves: nothing scaled 92.3 %; η × √K 72.4 %; η and λ × √K 26.3 %" in lab.text
        and "6.25 %, 25.2 %, 104 %, 104 %" in lab.text
    )
    assert [bar.get_xdata()[1] for bar in seen.bars] == pytest.approx((100 * result.left).tolist())


def test_the_source_on_the_page_holds_the_race() -> None:
    source = Lab([kind() for kind in EXPERIMENTS if kind.name == "rates"]).spec["source"]
    assert "def adam(" in source and "away = away - RATES[:, None] * direction(" in source and "def rates(" in source
