"""The state of one experiment: what hides, what reveals, what is kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import LabError
from labkit.frame.trial import Trial
from tests.made import Broken, Long, Quick


def run(trial: Trial) -> Trial:
    trial.begin()
    *_, trial.result = trial.outcomes()
    trial.finish()
    return trial


def test_a_fresh_trial_holds_the_declared_values_and_no_answer() -> None:
    trial = Trial(Quick())
    assert trial.values == {"rows": 3.0, "columns": 4, "kind": "full", "twice": False}
    assert (trial.result, trial.prediction, trial.score, trial.verdict) == (None, None, None, "")


def test_a_prediction_is_scored_by_its_relative_error() -> None:
    trial = Trial(Quick())
    trial.predict(9)
    assert trial.score is None
    assert run(trial).score == 0.25
    assert trial.verdict == "You predicted 9 cells, it is 12 cells: 25 % off."


def test_an_exact_prediction_says_so() -> None:
    trial = Trial(Quick())
    trial.predict(12)
    assert run(trial).score == 0
    assert trial.verdict.endswith("exactly.")


@pytest.mark.parametrize(("said", "score"), [(0, 0.0), (1, math.inf)])
def test_an_answer_of_zero_is_met_or_missed(said: float, score: float) -> None:
    trial = Trial(Quick())
    trial.set({"kind": "empty"})
    trial.predict(said)
    assert run(trial).score == score


def test_a_prediction_survives_a_move_before_the_answer_and_not_after_it() -> None:
    trial = Trial(Quick())
    trial.predict(9)
    trial.set({"rows": 5})
    assert trial.prediction == 9
    run(trial)
    trial.set({"rows": 6})
    assert (trial.prediction, trial.result) == (None, None)


def test_setting_the_same_values_hides_nothing() -> None:
    trial = run(Trial(Quick()))
    trial.set({"rows": 3})
    assert trial.result is not None


def test_a_refused_value_changes_nothing_and_is_remembered() -> None:
    trial = run(Trial(Quick()))
    with pytest.raises(LabError, match="rows = 101"):
        trial.set({"columns": 8, "rows": 101})
    assert trial.values["columns"] == 4 and trial.result is not None
    assert trial.rejected == {"columns": 8, "rows": 101} and "rows = 101" in trial.error
    trial.set({"rows": 100})
    assert not trial.rejected and not trial.error


@given(st.one_of(st.none(), st.text(alphabet="xyz"), st.just(math.nan), st.just(math.inf), st.booleans(), st.just([])))
def test_a_prediction_that_is_no_number_is_refused(number: object) -> None:
    trial = Trial(Quick())
    with pytest.raises(LabError, match=r"the prediction .* type one"):
        trial.predict(number)
    assert trial.prediction is None


def test_nobody_predicts_what_is_on_the_page() -> None:
    with pytest.raises(LabError, match="press Reset"):
        run(Trial(Quick())).predict(3)


def test_reset_hides_first_and_restores_second() -> None:
    trial = Trial(Quick())
    trial.set({"rows": 8})
    run(trial).reset()
    assert (trial.result, trial.values["rows"]) == (None, 8.0)
    trial.reset()
    assert trial.values["rows"] == 3.0


def test_reset_leaves_live_mode() -> None:
    trial = Trial(Quick())
    trial.turn("live")
    run(trial).reset()
    assert trial.mode == "predict"


def test_a_long_run_is_not_live_and_scores_only_when_complete() -> None:
    trial = Trial(Long())
    with pytest.raises(LabError, match="live"):
        trial.turn("live")
    trial.predict(5)
    trial.begin()
    trial.result = next(trial.outcomes())
    trial.finish()
    assert trial.score is None and trial.result.counts == (0,)
    assert run(trial).score == 0


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(LabError, match="try 'predict'"):
        Trial(Quick()).turn("dead")


def test_what_a_run_raises_is_raised() -> None:
    trial = Trial(Broken())
    trial.set({"when": 1})
    with pytest.raises(ZeroDivisionError):
        run(trial)
