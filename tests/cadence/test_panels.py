"""The cadence lab: its figures, and every extreme of every control."""

from __future__ import annotations

import pytest

import labkit
from labkit.cadence import adam_step_ratio
from labkit.cadence.panels.translation import _apart
from labkit.cadence.panels.updates import _ellipses
from labkit.frame import cell_panels
from labkit.frame.style import Page
from tests.frame.driven import ticks


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


def test_the_figures_of_adams_count() -> None:
    lab = labkit.labs.cadence("count", accumulation_steps=8, steps=10_000)
    lab.predict(49.6)
    lab.step()
    assert lab.score is not None and lab.score < 0.001
    assert "0.496 at step 1, " in lab.text and "1.000 at step 10000" in lab.text
    experiment = lab.experiment
    assert list(experiment.formula.get_ydata()) == [
        adam_step_ratio(int(s), 8, (0.9, 0.999)) for s in experiment.formula.get_xdata()
    ]
    assert list(experiment.measured.get_ydata()) == pytest.approx(list(experiment.formula.get_ydata()), rel=1e-9)
    measured = dict(zip(experiment.measured.get_xdata(), experiment.measured.get_ydata(), strict=True))
    assert measured[1] == pytest.approx(0.496, abs=5e-4)


def test_at_step_30_it_is_2573_thousandths() -> None:
    lab = labkit.labs.cadence("count", steps=30)
    lab.step()
    assert lab.result.last == pytest.approx(2.573, abs=5e-4)


def test_plain_sgd_at_fixed_weights_walks_the_same_path_and_adamw_does_not() -> None:
    lab = labkit.labs.cadence("path", rule="step-per-microbatch", optimizer="SGD", fixed_weights=True)
    lab.step()
    assert lab.result.equal and lab.page["headline"] == "SGD: the same path within rounding"
    lab.set(optimizer="AdamW")
    lab.step()
    assert not lab.result.equal and lab.experiment.answer(lab.result) > 1


def test_the_level_lines_are_lines_of_equal_loss() -> None:
    lab = labkit.labs.cadence("path")
    lab.step()
    x, y = _ellipses(lab.result)
    for ring, share in enumerate((1.0, 0.5, 0.2, 0.07, 0.02)):
        for at in (0, 20, 50):
            point = lab.result.minimum.new_tensor([x[74 * ring + at], y[74 * ring + at]]) - lab.result.minimum
            assert float(point @ lab.result.hessian @ point / 2) == pytest.approx(
                share * float(lab.result.right_loss[0])
            )


def test_a_rule_without_meaning_for_an_optimizer_is_refused_with_a_remedy() -> None:
    lab = labkit.labs.cadence("path", rule="momentum-per-microbatch", optimizer="AdamW")
    with pytest.raises(labkit.LabError, match="try 'SGD with momentum'"):
        lab.step()


def test_the_schedule_ends_k_times_too_early() -> None:
    lab = labkit.labs.cadence("schedules", accumulation_steps=8, updates=500)
    lab.predict(63)
    lab.step()
    assert lab.score == 0 and lab.page["headline"] == "The learning rate is 0 after 63 of 500 optimizer steps"
    assert "runs 40 times, meant were 5" in lab.text


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD with momentum"])
def test_translated_trainings_are_drawn_while_they_run(optimizer: str) -> None:
    lab = labkit.labs.cadence("translated", optimizer=optimizer, samples=2048)
    lab.predict(2)
    lab.step()
    assert lab.result.progress == 1 and lab.score is not None and ticks(lab) <= 5
    assert [words.get_text() for words in lab.experiment.words] == list(lab.result.names)


def test_labels_keep_their_distance() -> None:
    assert _apart([1.0, 0.0, 1.1], 0.5) == [1.0, 0.0, 1.5]
