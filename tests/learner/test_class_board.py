"""The board: what it shows live, before and after a discussion, and that only the teacher's press shows the answer."""

from __future__ import annotations

import json
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

import labkit
from labkit.learner import notebooks, one_time_messages
from labkit.learner.class_board import Board

ROOT = pathlib.Path(__file__).parents[2]
SET = {"intensity": 2.0, "bandwidth": 80.0, "ceiling": 1000.0}


@pytest.fixture(autouse=True)
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    folder = tmp_path / "class"
    folder.mkdir()
    monkeypatch.setenv("LABKIT_CLASS", str(folder))
    one_time_messages.forget()
    yield folder
    one_time_messages.forget()


def says(place: pathlib.Path, writer: int, number: Any, values: Any = None, at: float | None = None) -> None:
    said = {"experiment": "roofline.ceiling", "prediction": number, "values": values or SET, "at": at or time.time()}
    with open(place / f"{writer:032x}.jsonl", "a") as file:
        file.write(json.dumps(said) + "\n")


@pytest.fixture
def board(place: pathlib.Path) -> Board:
    return labkit.labs.class_board("roofline", "ceiling", intensity=2, bandwidth=80)


def press(board: Board, type: str, **given: Any) -> None:
    board._receive(board, {"type": type, **given}, [])


def labels(board: Board) -> list[tuple[Any, ...]]:
    return [(row["label"], row["before"], row["after"], row["answer"]) for row in board.view["rows"]]


def test_it_is_live(board: Board, place: pathlib.Path) -> None:
    assert board.text == "No prediction yet." and board.view["rows"] == []
    says(place, 1, 150)
    says(place, 2, 80)
    press(board, "look")
    assert board.text == "2 predictions, median 115 GFLOP/s."
    assert labels(board) == [("80", 1, 0, False), ("150", 1, 0, False)]
    says(place, 1, 160)
    board.look()
    assert labels(board) == [("80", 1, 0, False), ("160", 1, 0, False)]


def test_two_rounds(board: Board, place: pathlib.Path) -> None:
    for writer in (1, 2, 3):
        says(place, writer, 80)
    press(board, "discuss")
    assert board.text == "Before: 3 predictions, median 80 GFLOP/s. After: no prediction yet." and board.view["second"]
    says(place, 1, 160)
    says(place, 4, 160)
    press(board, "look")
    assert labels(board) == [("80", 3, 0, False), ("160", 0, 2, False)]
    press(board, "reveal")
    assert board.text.startswith(
        "It is 160 GFLOP/s. Before: 3 predictions, median 80 GFLOP/s, 0 within 10 % of it. After: 2"
    )


def test_the_answer_is_nowhere_before_reveal_and_nothing_runs(
    board: Board, place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(place, 1, 150)
    monkeypatch.setattr(board._trial.experiment, "run", pytest.fail, raising=False)
    press(board, "look")
    press(board, "discuss")
    assert "160" not in json.dumps(board.view) and not board.view["revealed"] and not board._error
    monkeypatch.undo()
    monkeypatch.setenv("LABKIT_CLASS", str(place))
    press(board, "reveal")
    assert ("160", 0, 0, True) in labels(board) and board.view["revealed"]


def test_what_lies_there_is_shown_as_words_or_not_at_all(board: Board, place: pathlib.Path) -> None:
    (place / f"{7:032x}.jsonl").write_text("<script>alert(1)</script>\n{\n")
    says(place, 8, "<b>1</b>")
    says(place, 9, 150, {"<script>": "<script>"})
    says(place, 10, 150)
    board.look()
    assert "<" not in json.dumps(board.view) and labels(board) == [("150", 1, 0, False)]
    assert "1 predicted with other settings only, in the last five minutes." in board.text


def test_other_settings_of_the_last_question_are_forgotten(board: Board, place: pathlib.Path) -> None:
    says(place, 1, 150, {**SET, "bandwidth": 3}, at=time.time() - 360)
    says(place, 2, 150, at=time.time() - 360)
    board.look()
    assert board.text == "1 prediction, median 150 GFLOP/s."


def test_what_is_old_is_not_of_this_class(place: pathlib.Path) -> None:
    says(place, 1, 150, at=time.time() - 13 * 3600)
    assert labkit.labs.class_board("roofline", "ceiling", **SET).view["rows"] == []
    assert labkit.labs.class_board("roofline", "ceiling", hours=14, **SET).view["rows"]


def test_a_folder_that_goes_away_is_told_and_may_come_back(board: Board, place: pathlib.Path) -> None:
    place.rmdir()
    press(board, "look")
    assert "is not there" in board.view["error"]
    place.mkdir()
    says(place, 1, 3)
    press(board, "look")
    assert board.view["error"] == "" and labels(board) == [("3", 1, 0, False)]


def test_an_experiment_that_refuses_says_why(place: pathlib.Path) -> None:
    board = labkit.labs.class_board("batch", "planner", world=7, tp=2)
    press(board, "reveal")
    assert "try" in board.view["error"] and not board.view["revealed"]


def test_a_fault_of_its_own_is_kept_for_check(board: Board, capsys: pytest.CaptureFixture[str]) -> None:
    board._trial.experiment.answer = lambda _: 1 / 0  # type: ignore[method-assign]
    press(board, "reveal")
    assert "division" in board.view["error"] and isinstance(labkit.labs.errors.pop(), ZeroDivisionError)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_lab_and_its_board_agree(board: Board, place: pathlib.Path) -> None:
    lab = labkit.labs.roofline("ceiling", intensity=2, bandwidth=80)
    lab.predict(150)
    assert labkit.learner.class_predictions.flush()
    board.look()
    assert labels(board) == [("150", 1, 0, False)]


@pytest.mark.parametrize(
    ("topic", "experiment", "values", "words"),
    [
        ("nothing", "ceiling", {}, "try accumulation, audit"),
        ("roofline", "nothing", {}, "try ceiling"),
        ("roofline", "ceiling", {"bandwidth": 1e9}, "is outside"),
        ("roofline", "ceiling", {"folder": "/nowhere"}, "is not there: try"),
    ],
)
def test_what_is_not_there_is_refused(topic: str, experiment: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(labkit.LabError, match=words):
        labkit.labs.class_board(topic, experiment, **values)


def test_the_boards_of_the_plan_of_an_hour_open_and_give_its_numbers() -> None:
    plan = (ROOT / "docs" / "teaching.md").read_text()
    answers = []
    for call in re.findall(r'^labkit\.labs\.class_board\("accumulation".*?\)', plan, re.MULTILINE):
        board = eval(call)
        board.reveal()
        answers.append(board._answer)
    assert answers == pytest.approx([4.375, 0.7, 2, 160, 26.5], rel=0.01)


def test_every_panel_of_a_plan_stands_in_its_notebook_and_has_a_board() -> None:
    rows = re.findall(r"^\| \d+–\d+ \| (\d\d), (`[^|]*) \|", (ROOT / "docs" / "teaching.md").read_text(), re.MULTILINE)
    named = [(number, name) for number, words in rows for name in re.findall(r"`(\w+)`", words)]
    there = {(each.file[:2], *key.split(".")) for each in notebooks.notebooks() for key in each.experiments}
    missing = {name for number, name in named if (number, name) not in {(n, name) for n, _, name in there}}
    assert len(named) == 20 and missing == {"installation", "audited"}
    for number, topic, name in there:
        if (number, name) in named:
            assert labkit.labs.class_board(topic, name).view["question"]


def test_without_a_class_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_CLASS")
    with pytest.raises(labkit.LabError, match=r"LABKIT_CLASS is not set: try class_board\(…, folder="):
        labkit.labs.class_board("roofline", "ceiling")


def test_it_follows_the_projector_and_is_words_without_a_page(board: Board) -> None:
    press(board, "projector", on=True)
    assert board.large and labkit.labs.roofline("ceiling").large
    labkit.labs.projector(False)
    assert not board.large
    assert board._repr_mimebundle_()[0]["text/plain"] == "No prediction yet."
