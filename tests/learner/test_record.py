"""Progress: what was done outlives its kernel, two kernels lose nothing, and no fault of a disk disturbs a learner."""

from __future__ import annotations

import contextlib
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
from labkit import check
from labkit.learner import one_time_messages, record

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def data(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "data"))
    one_time_messages.forget()
    yield tmp_path / "data"
    one_time_messages.forget()


def step(number: float, *, score: float = 0.5) -> None:
    record.predicted("roofline.ceiling", number, 160.0, score, {"intensity": 2.0, "kind": "full", "on": True})


def kept() -> Any:
    return json.loads((record.folder() / "progress.json").read_text())


def test_no_test_touches_the_real_folder(monkeypatch: pytest.MonkeyPatch, data: pathlib.Path) -> None:
    assert record.folder() == data
    monkeypatch.undo()
    assert "labkit-tests-" in str(record.folder())


def test_what_was_done_is_there_in_another_process() -> None:
    step(150)
    record.passed("token_mean")
    asked = (
        "from labkit.learner import record; done = record.done(); print(done.last('roofline.ceiling'), done.exercises)"
    )
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=ROOT, timeout=60).stdout
    assert "predicted=150.0, answer=160.0, score=0.5" in said and "token_mean" in said


# Written by labkit.progress, as this module was called before.
EARLIER = """{"version":1,"predictions":{"roofline.ceiling":[{"at":"2026-12-01T02:37:13Z","predicted":150.0,\
"answer":160.0,"score":0.0625,"values":{"intensity":2.0,"cold":true,"dtype":"float32","width":64}}],\
"noise.norms":[{"at":"2026-12-01T02:37:13Z","predicted":3.0,"answer":null,"score":null,"values":{}}]},\
"exercises":{"token_mean":"2026-12-01T02:37:14Z"}}"""


def test_a_file_of_an_earlier_labkit_is_read_and_goes_on_unchanged(data: pathlib.Path) -> None:
    data.mkdir()
    (data / "progress.json").write_text(EARLIER)
    done = record.done()
    assert (done.best("roofline.ceiling"), done.last("roofline.ceiling").values["dtype"]) == (0.0625, "float32")
    assert done.last("noise.norms").answer is None and done.exercises == {"token_mean": "2026-12-01T02:37:14Z"}
    record.passed("token_mean")
    assert (data / "progress.json").read_text() == EARLIER and one_time_messages.take() == []


def test_two_kernels_at_once_lose_nothing() -> None:
    """Four processes, each with threads of its own in the file; more than two, so that they really meet."""
    write = """
import sys, threading
from labkit.learner import record
record.PATIENCE = 100  # this machine may be slow
def work(me):
    for n in range(6):
        record.predicted(f"topic.{me}", n, 1.0, 0.5, {})
        record.passed(f"{me}-{n}")
threads = [threading.Thread(target=work, args=(f"{sys.argv[1]}-{t}",)) for t in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
from labkit.learner import one_time_messages; assert not one_time_messages.take()
"""
    kernels = [subprocess.Popen([sys.executable, "-c", write, str(k)], cwd=ROOT) for k in range(4)]
    assert [kernel.wait(120) for kernel in kernels] == [0] * 4
    done = record.done()
    writers = [f"{k}-{t}" for k in range(4) for t in range(2)]
    assert set(done.exercises) == {f"{me}-{n}" for me in writers for n in range(6)}
    for me in writers:
        assert [each.predicted for each in done.predictions[f"topic.{me}"]] == list(range(6))


def test_the_best_stays_and_the_file_stays_small() -> None:
    step(160, score=0.0)
    for number in range(record.KEPT + 20):
        step(number, score=1 + number)
    series = record.done().predictions["roofline.ceiling"]
    assert len(series) == record.KEPT and series[0].score == 0.0 and series[-1].predicted == record.KEPT + 19
    assert record.done().best("roofline.ceiling") == 0.0


def test_the_first_pass_counts() -> None:
    record.passed("plan")
    first = dict(record.done().exercises)
    record._change(lambda old: type(old)(old.predictions, {"plan": "2020-01-01T00:00:00Z"}))
    record.passed("plan")
    assert record.done().exercises == {"plan": "2020-01-01T00:00:00Z"} != first


def test_it_is_anonymous() -> None:
    step(150)
    text = (record.folder() / "progress.json").read_text()
    home, user = str(pathlib.Path.home()), os.environ.get("USER", "root")
    assert home not in text and user not in text and "/" not in text
    assert set(kept()["predictions"]["roofline.ceiling"][0]) == {"at", "predicted", "answer", "score", "values"}


DAMAGED = [
    b"", b"{", b"\xff\xfe", b"[]", b"null", b"3", b'{"version": 1}', b'{"version": null}', b'{"version": NaN}',
    b'{"version":1,"predictions":[],"exercises":{}}', b'{"version":1,"predictions":{},"exercises":{"a":1}}',
    b'{"version":1,"predictions":{},"exercises":{"a":"soon"}}', b'{"version":0,"predictions":{},"exercises":{}}',
    b'{"version":1,"predictions":{"a":[{}]},"exercises":{}}', b'{"version":1,"predictions":{"a":7},"exercises":{}}',
    b'{"version":1,"predictions":{"a":[{"at":"2026-01-01T00:00:00Z","predicted":1e999,"answer":1,"score":0,"values":{}}]},"exercises":{}}',
    b'{"version":1,"predictions":{"a":[{"at":"2026-01-01T00:00:00Z","predicted":1,"answer":1,"score":0,"values":{"b":[]}}]},"exercises":{}}',
    b'{"version":1,"predictions":{"a":[{"at":"2026-01-01T00:00:00Z","predicted":true,"answer":1,"score":0,"values":{}}]},"exercises":{}}',
    b"[" * 100_000, b" " * (record.LARGEST + 1), b'{"version":1,"predictions":{},"exercises":{},"more":1}',
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_set_aside_and_said_so_once(text: bytes, data: pathlib.Path) -> None:
    data.mkdir()
    (data / "progress.json").write_bytes(text)
    assert record.done() == record.Done({}, {})
    step(150)
    assert (data / "progress-damaged-1.json").read_bytes() == text
    (told,) = one_time_messages.take()
    assert "progress-damaged-1.json" in told and record.done().last("roofline.ceiling")
    (data / "progress.json").write_bytes(b"again")
    record.passed("plan")
    assert (data / "progress-damaged-2.json").read_bytes() == b"again" and one_time_messages.take() == []


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
row = st.fixed_dictionaries(
    {"at": anything, "predicted": anything, "answer": anything, "score": anything, "values": anything}
)


@given(
    found=anything
    | st.fixed_dictionaries(
        {
            "version": st.just(1) | anything,
            "predictions": anything | st.fixed_dictionaries({"a": st.lists(row | anything)}),
            "exercises": anything,
        }
    )
)
def test_whatever_json_is_there_is_read_or_set_aside(found: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "progress.json").write_text(json.dumps(found))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_DATA", str(folder))
        step(150)
        assert record.done().last("roofline.ceiling")


def test_a_file_of_a_newer_labkit_is_set_aside_untouched(data: pathlib.Path) -> None:
    data.mkdir()
    text = '{"version": 2, "whatever": true}'
    (data / "progress.json").write_text(text)
    step(150)
    assert (data / "progress-newer-1.json").read_text() == text and kept()["version"] == record.VERSION
    assert "newer labkit" in " ".join(one_time_messages.take())


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link"])
def test_what_is_no_file_is_set_aside_or_replaced(kind: str, data: pathlib.Path) -> None:
    data.mkdir()
    path = data / "progress.json"
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "dangling link": lambda: path.symlink_to("nowhere")}[kind]()
    step(150)
    assert path.is_file() and record.done().last("roofline.ceiling")


def quiet(tmp_path: pathlib.Path) -> str:
    """Work goes on, and one sentence says what is not kept."""
    step(150)
    step(151)
    record.passed("plan")
    record.done()
    said = one_time_messages.take()
    assert len(said) == 1 and "all else works" in said[0] and str(tmp_path) not in said[0]
    return said[0]


def test_a_folder_that_cannot_be_made_disturbs_nobody(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "file" / "data"))
    quiet(tmp_path)


@pytest.mark.parametrize(("call", "code"), [("fsync", errno.ENOSPC), ("replace", errno.EROFS), ("fsync", errno.EIO)])
def test_a_full_or_readonly_disk_disturbs_nobody_and_the_old_file_stays(
    call: str, code: int, data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(1)
    before = (data / "progress.json").read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    assert os.strerror(code) in quiet(tmp_path)
    assert (data / "progress.json").read_bytes() == before and not (data / "progress.new").exists()


def test_a_disk_that_is_really_full(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "labkit", str(place)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        monkeypatch.setenv("LABKIT_DATA", str(place))
        step(1)
        with contextlib.suppress(OSError), open(place / "filler", "wb", buffering=0) as filler:
            while filler.write(b"x" * 1024):
                pass
        before = (place / "progress.json").read_bytes()
        quiet(tmp_path)
        assert (place / "progress.json").read_bytes() == before
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_without_a_home_nothing_is_kept_and_nothing_is_made(tmp_path: pathlib.Path) -> None:
    asked = (
        "import os; os.path.expanduser = lambda path: path\n"
        "from labkit.learner import one_time_messages, record\n"
        "record.passed('plan'); print(record.done(), one_time_messages.take())"
    )
    environment = {
        key: value for key, value in os.environ.items() if key not in ("LABKIT_DATA", "HOME", "XDG_DATA_HOME")
    }
    run = subprocess.run(
        [sys.executable, "-c", asked], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "no home folder" in run.stdout, run.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_hangs_is_not_waited_for(data: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "PATIENCE", 0.1)
    step(1)
    lock = str(data / "progress.lock")
    hold = f"import filelock, time\nwith filelock.FileLock({lock!r}): print(flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
    try:
        assert other.stdout and other.stdout.readline()
        step(2)
        assert "another kernel" in one_time_messages.take()[0]
        assert record.done().last("roofline.ceiling").predicted == 1  # type: ignore[union-attr]
    finally:
        other.kill()
        other.wait()
        other.stdout.close()  # type: ignore[union-attr]
    step(3)
    assert record.done().last("roofline.ceiling").predicted == 3  # type: ignore[union-attr]


def test_a_step_keeps_a_prediction_once() -> None:
    lab = labkit.labs.roofline("ceiling")
    lab.step()
    assert not record.done().predictions
    lab.reset()
    lab.set(intensity=2, bandwidth=80)
    lab.predict(150)
    assert not record.done().predictions
    lab.step()
    lab.step()
    (row,) = record.done().predictions["roofline.ceiling"]
    assert (row.predicted, row.answer, row.score) == (150, 160, 0.0625) and row.values["bandwidth"] == 80
    lab.reset()
    lab.predict(160)
    lab._receive(lab, {"type": "commands", "commands": [{"type": "step"}]}, [])
    assert record.done().last("roofline.ceiling").score == 0  # type: ignore[union-attr]


def test_a_long_run_that_was_stopped_keeps_nothing_and_a_whole_one_does() -> None:
    from tests.made import Long

    lab = labkit.labs.Lab([Long()], steps=1000, pause=0.01)
    lab.topic = "made"
    lab.predict(3)
    lab._receive(lab, {"type": "commands", "commands": [{"type": "step"}]}, [])
    while lab.result is None:
        time.sleep(0.01)
    lab._receive(lab, {"type": "commands", "commands": [{"type": "stop"}]}, [])
    assert lab.result.progress < 1 and not record.done().predictions
    lab.set(steps=3, pause=0)
    lab.predict(3)
    lab.step()
    assert len(record.done().predictions["made.long"]) == 1


def test_a_lab_without_a_topic_keeps_nothing() -> None:
    from tests.made import Quick

    lab = labkit.labs.Lab([Quick()])
    lab.predict(12)
    lab.step()
    assert lab.score == 0 and not record.done().predictions


def test_an_answer_that_is_missed_for_ever_is_kept_without_a_score() -> None:
    record.predicted("a.b", 1.0, 0.0, math.inf, {})
    record.predicted("a.b", 1.0, math.nan, math.inf, {})
    assert [(each.answer, each.score) for each in record.done().predictions["a.b"]] == [(0.0, None), (None, None)]
    assert record.done().best("a.b") is None


def test_a_panel_says_quietly_what_is_not_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_DATA", "/dev/null/data")
    lab = labkit.labs.roofline("ceiling")
    lab.predict(150)
    lab.step()
    assert "cannot be kept" in lab.page["notice"] and lab.error == "" and lab.result
    lab.reset()
    assert lab.page["notice"] == ""


def test_a_checker_keeps_a_pass_and_only_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert not check.token_mean(lambda sums, counts: 1.0).passed and not record.done().exercises
    assert check.token_mean(lambda sums, counts: sum(sums) / sum(counts)).passed
    assert set(record.done().exercises) == {"token_mean"} and capsys.readouterr().out == ""


def test_a_checker_says_once_what_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LABKIT_DATA", "/dev/null/data")
    for _ in range(2):
        assert check.token_mean(lambda sums, counts: sum(sums) / sum(counts)).passed
    assert capsys.readouterr().out.count("cannot be kept") == 1


def test_every_public_checker_counts_and_none_within() -> None:
    for name in check.all():
        assert hasattr(getattr(check, name), "__wrapped__"), name


def test_a_verdict_says_the_same_on_a_page_and_markup_in_it_stays_words() -> None:
    def hostile(sums: list[float], counts: list[int]) -> float:
        print("<script>alert(1)</script>")
        raise ValueError("<b>bold</b>")

    verdict = check.token_mean(hostile)
    page = verdict._repr_html_()
    assert "<script" not in page and "<b>" not in page and "&lt;script" in page and "&lt;b&gt;" in page
    assert page.count("<li>✗") == len(verdict.checks) and f"0 of {len(verdict.checks)} checks" in page
    assert check.token_mean(lambda sums, counts: sum(sums) / sum(counts))._repr_html_().count("<li>✓") == len(
        verdict.checks
    )
