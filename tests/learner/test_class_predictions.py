"""A class's folder: thirty writers lose nothing, no fault of a folder is felt, and what lies there is only data."""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import labkit
from labkit.learner import class_predictions, one_time_messages
from labkit.learner.class_predictions import Entry
from labkit.learner.prediction_histogram import MOST, Tally, close, tally

ROOT = pathlib.Path(__file__).parents[2]
SET = {"intensity": 2.0}


@pytest.fixture(autouse=True)
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    folder = tmp_path / "class"
    folder.mkdir()
    monkeypatch.setenv("LABKIT_CLASS", str(folder))
    monkeypatch.setattr(class_predictions, "_writers", [])
    one_time_messages.forget()
    yield folder
    assert class_predictions.flush()
    one_time_messages.forget()


def submit(number: float, values: dict[str, Any] | None = None) -> None:
    class_predictions.submit("roofline.ceiling", number, SET if values is None else values)


def numbers(place: pathlib.Path) -> list[float]:
    assert class_predictions.flush()
    return [entry.number for entry in class_predictions.entries(place)]


def test_it_is_off_by_default(place: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for off in (lambda: monkeypatch.setenv("LABKIT_CLASS", ""), lambda: monkeypatch.delenv("LABKIT_CLASS")):
        off()
        assert class_predictions.folder() is None
        submit(1)
    assert list(place.iterdir()) == [] and one_time_messages.take() == [] and class_predictions._writers == []


def test_a_prediction_of_a_lab_is_there_before_step_and_the_learner_is_told_once(place: pathlib.Path) -> None:
    lab = labkit.labs.roofline("ceiling", intensity=2, bandwidth=80)
    lab.predict(150)
    lab._receive(lab, {"type": "commands", "commands": [{"type": "predict", "number": 155}]}, [])
    assert numbers(place) == [150, 155]
    (first, _) = class_predictions.entries(place)
    assert first.experiment == "roofline.ceiling" and first.values == {**lab.values} and first.at <= time.time()
    assert "board of your class" in lab.page["notice"] and one_time_messages.take() == []


def test_a_refused_prediction_is_not_sent(place: pathlib.Path) -> None:
    lab = labkit.labs.roofline("ceiling")
    for wrong in (math.nan, "", None):
        with pytest.raises(labkit.LabError):
            lab.predict(wrong)  # type: ignore[arg-type]
    assert numbers(place) == []


def test_nothing_names_the_writer(place: pathlib.Path) -> None:
    submit(150)
    assert numbers(place) == [150]
    (file,) = place.iterdir()
    line = json.loads(file.read_text())
    assert set(line) == {"experiment", "prediction", "values", "at"} and class_predictions.FILE.fullmatch(file.name)


def test_thirty_writers_at_once_lose_nothing(place: pathlib.Path) -> None:
    write = """
import sys, threading, time
from labkit.learner import class_predictions
while not __import__("os").path.exists(sys.argv[2]): time.sleep(0.001)
def work(t):
    for n in range(10): class_predictions.submit("a.b", 1000 * int(sys.argv[1]) + 100 * t + n, {})
threads = [threading.Thread(target=work, args=(t,)) for t in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
assert class_predictions.flush(60)
"""
    start = place.parent / "go"
    command = [sys.executable, "-c", write]
    writers = [subprocess.Popen([*command, str(k), str(start)], cwd=ROOT) for k in range(30)]
    time.sleep(0.5)
    start.touch()
    assert [writer.wait(120) for writer in writers] == [0] * 30
    found = class_predictions.entries(place)
    assert sorted(entry.number for entry in found) == [
        1000 * k + 100 * t + n for k in range(30) for t in (0, 1) for n in range(10)
    ]
    assert len({entry.writer for entry in found}) == 30
    for k in range(30):
        mine = [entry.number for entry in found if entry.number // 100 == 10 * k]
        assert mine == sorted(mine)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_writes_a_file_of_its_own(place: pathlib.Path) -> None:
    submit(1)
    assert class_predictions.flush()
    child = os.fork()
    if child == 0:
        submit(2)
        os._exit(0 if class_predictions.flush(10) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(numbers(place)) == [1, 2] and len(list(place.iterdir())) == 2


@pytest.mark.parametrize("gone", ["removed", "a file", "never there"])
def test_a_folder_that_goes_away_disturbs_nobody(gone: str, place: pathlib.Path) -> None:
    if gone != "never there":
        submit(1)
        assert numbers(place) == [1]
        for file in place.iterdir():
            file.unlink()
    place.rmdir()
    if gone == "a file":
        place.write_text("")
    lab = labkit.labs.roofline("ceiling")
    lab.predict(150)
    lab.predict(160)
    assert class_predictions.flush()
    lab.step()
    said = lab.page["notice"]
    assert said.count("do not reach") == 1 and str(place) not in said and lab.result and not lab.error
    assert class_predictions.entries(place) == []


def test_a_full_disk_disturbs_nobody_and_a_torn_line_spoils_no_other(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [math.inf, 20, 0, math.inf]

    def write(file: int, text: bytes) -> int:
        if not text.lstrip().startswith(b"{"):
            return real(file, text)
        left = room.pop(0)
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, text[: int(min(left, len(text)))])

    monkeypatch.setattr(os, "write", write)
    for number in (1, 2, 3, 4):
        submit(number)
        assert class_predictions.flush()
    monkeypatch.setattr(os, "write", real)
    assert numbers(place) == [1, 4]
    assert len(one_time_messages.take()) == 2  # that there is a board, and that not all reaches it


def test_a_folder_that_never_answers_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    answer = threading.Event()
    monkeypatch.setattr(class_predictions.Writer, "_append", lambda *_: answer.wait(30))
    began = time.monotonic()
    for number in range(3000):
        submit(number)
    assert time.monotonic() - began < 5 and not class_predictions.flush(0.05)
    answer.set()


GOOD = {"experiment": "roofline.ceiling", "prediction": 150, "values": SET, "at": 1000.0}
HOSTILE: list[Any] = [
    b"", b"{", b"\xff\xfe\x00", b"null", b"[]", b"7", b"<script>alert(1)</script>", b"[" * 3000, b'{"a":' * 3000,
    {**GOOD, "prediction": "150"}, {**GOOD, "prediction": True}, {**GOOD, "prediction": None},
    {**GOOD, "prediction": 1e31}, {**GOOD, "prediction": math.nan}, {**GOOD, "prediction": math.inf},
    {**GOOD, "prediction": 10**400}, {**GOOD, "at": -1}, {**GOOD, "at": math.nan}, {**GOOD, "at": "now"},
    {**GOOD, "at": 1e12}, {**GOOD, "values": 3}, {**GOOD, "values": [1]}, {**GOOD, "values": {"a": []}},
    {**GOOD, "values": {"a": math.nan}},
    {**GOOD, "experiment": 3}, {**GOOD, "experiment": None}, {"prediction": 1},
    {**GOOD, "more": "x" * 5000},
]  # fmt: skip


def line(given_: Any) -> bytes:
    return given_ if isinstance(given_, bytes) else json.dumps(given_).encode()


def put(place: pathlib.Path, *lines: Any, name: str = "0" * 32) -> pathlib.Path:
    path = place / f"{name}.jsonl"
    path.write_bytes(b"".join(line(each) + b"\n" for each in lines))
    return path


@pytest.mark.parametrize("bad", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_prediction_is_passed_over_and_its_neighbours_are_read(bad: Any, place: pathlib.Path) -> None:
    put(place, GOOD, bad, {**GOOD, "prediction": 160})
    assert numbers(place) == [150, 160]


@given(st.lists(st.binary(max_size=200) | st.text(max_size=200).map(str.encode)))
def test_any_bytes_are_only_data(lines: list[bytes]) -> None:
    for each in lines:
        entry = class_predictions._entry("w", each)
        assert entry is None or (math.isfinite(entry.number) and math.isfinite(entry.at))


def test_markup_stays_a_word(place: pathlib.Path) -> None:
    put(place, {**GOOD, "experiment": "<script>", "values": {"<b>": "<i>"}})
    (entry,) = class_predictions.entries(place)
    assert tally([entry], "roofline.ceiling", SET).rows() == []


def test_only_our_plain_files_are_read_and_only_so_much_of_them(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = place.parent / "secret"
    secret.write_bytes(line(GOOD) + b"\n")
    (place / f"{'1' * 32}.jsonl").symlink_to(secret)
    os.mkfifo(place / f"{'2' * 32}.jsonl")
    (place / f"{'3' * 32}.jsonl").mkdir()
    (place / f"{'4' * 32}.jsonl").symlink_to("/dev/zero")
    put(place, GOOD, name="notes")
    (place / "0.jsonl\n").write_text("")
    assert class_predictions.entries(place) == []
    path = put(place, GOOD)
    path.write_bytes(path.read_bytes() + line(GOOD))  # a line that is still being written
    assert numbers(place) == [150]
    monkeypatch.setattr(class_predictions, "BYTES", 300)
    put(place, *[GOOD] * 1000)
    assert len(class_predictions.entries(place)) == 300 // (len(line(GOOD)) + 1)
    monkeypatch.setattr(class_predictions, "FILES", 2)
    for k in range(5):
        put(place, GOOD, name=f"{k:032x}")
    assert len({entry.writer for entry in class_predictions.entries(place)}) == 2


def test_a_huge_file_is_read_quickly(place: pathlib.Path) -> None:
    with open(place / f"{'5' * 32}.jsonl", "wb") as file:
        file.write(line(GOOD) + b"\n")
        file.truncate(10**10)  # sparse
    began = time.monotonic()
    assert numbers(place) == [150] and time.monotonic() - began < 10


# Counting.


def said(*predictions: float, writer: str = "a", **values: Any) -> list[Entry]:
    return [Entry(writer, "roofline.ceiling", number, {**SET, **values}, 0.0) for number in predictions]


def count(entries: list[Entry], discussed: dict[str, int] | None = None) -> Tally:
    return tally(entries, "roofline.ceiling", SET, discussed)


def test_one_vote_a_writer_and_round() -> None:
    first = count(said(1, 2, 3) + said(5, writer="b"))
    assert (first.before, first.after) == ((3, 5), ())
    later = count(said(1, 2, 3, 4) + said(5, writer="b") + said(9, writer="c"), dict(first.counts))
    assert (later.before, later.after) == ((3, 5), (4, 9))


def test_other_settings_and_other_experiments_are_no_votes() -> None:
    other = [Entry("d", "noise.norms", 7, SET, 0.0)]
    found = count(said(1) + said(2, writer="b", bandwidth=3) + said(3, writer="a", bandwidth=3) + other)
    assert found.before == (1,) and found.elsewhere == 1


def test_other_settings_of_an_earlier_question_are_not_told() -> None:
    early, late = (
        Entry(writer, "roofline.ceiling", 2, {**SET, "bandwidth": 3}, at) for writer, at in (("a", 9), ("b", 11))
    )
    assert tally([early, late], "roofline.ceiling", SET, late=10).elsewhere == 1


@given(
    st.lists(st.floats(-1e30, 1e30) | st.sampled_from([0.0, 1.0, 150.0])),
    st.lists(st.floats(-1e30, 1e30), max_size=5),
    st.none() | st.floats(-1e30, 1e30) | st.just(math.inf),
)
def test_every_vote_is_in_exactly_one_row(before: list[float], after: list[float], answer: float | None) -> None:
    rows = Tally(tuple(before), tuple(after), 0, {}).rows(answer)
    assert sum(row.before for row in rows) == len(before) and sum(row.after for row in rows) == len(after)
    assert len(rows) <= MOST + 3 and len({row.label for row in rows}) == len(rows)
    known = answer is not None and math.isfinite(answer)
    assert sum(row.answer for row in rows) == known


def test_few_numbers_are_rows_of_their_own_and_many_are_put_together() -> None:
    few = Tally((160, 150, 160.0001), (), 0, {})
    assert [(row.label, row.before, row.answer) for row in few.rows(155)] == [
        ("150", 1, False),
        ("155", 0, True),
        ("160", 2, False),
    ]
    many = Tally(tuple(range(100, 130)), (), 0, {})
    assert [row.label for row in many.rows()][:2] == ["100 … 105", "105 … 110"]
    zeros = Tally((0.0,) * 20 + tuple(range(1, 11)), (), 0, {})
    assert zeros.rows()[0].label == "0 … 1" and zeros.rows()[-1].label == "9 or more"
    wide = Tally(tuple(10.0**k for k in range(14)), (), 0, {})
    assert "100 … 1000" in [row.label for row in wide.rows()]


def test_close() -> None:
    assert close([9, 9.0001, 11, 11.1, -10], 10) == 3 and close([0, 1], 0) == 1
