"""The report: complete, whole in one file, and nothing in it that runs, whatever names and files say."""

from __future__ import annotations

import base64
import errno
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from matplotlib import image as images

import labkit
from labkit import check
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.labs import Lab
from labkit.learner import one_time_messages, record
from tests.learner.test_notebook_map import NOTEBOOKS, Table
from tests.made import Quick


@pytest.fixture(autouse=True)
def _alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(NOTEBOOKS)
    one_time_messages.forget()
    for panel in labkit.frame.open_panels.panels():
        panel.close()
    yield
    one_time_messages.forget()


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "mine.html"


def written(place: pathlib.Path, name: str = "") -> str:
    assert labkit.labs.report(place, name) == place
    return place.read_text(encoding="utf-8")


def test_predictions_and_exercises_are_in_it(place: pathlib.Path) -> None:
    lab = labkit.labs.roofline("ceiling", intensity=2, bandwidth=80)
    lab.predict(150)
    lab.step()
    assert check.token_mean(lambda sums, counts: sum(sums) / sum(counts)).passed
    text = written(place)
    rows = Table(text).rows
    (made,) = [row for row in rows if "What rate does the roof allow?" in row[0]]
    assert "intensity 2, bandwidth 80" in made[0] and made[1:4] == ["150 GFLOP/s", "160 GFLOP/s", "6.2 % off"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", made[4])
    (passed,) = [row for row in rows if "token_mean(sums, counts)" in row[0]]
    assert passed[1] == "00 Start here"
    assert "1 of" in text and "02 Roofline" in text


def test_pictures_of_open_panels_with_an_answer_are_inside(place: pathlib.Path) -> None:
    shown, hidden, gone = (labkit.labs.roofline("ceiling") for _ in range(3))
    shown.step()
    gone.step()
    gone.close()
    text = written(place)
    assert hidden.result is None and text.count("<img") == 1 and shown.text in text and f'alt="{shown.text}"' in text
    png = base64.b64decode(re.search(r"base64,([^\"]+)", text)[1])  # type: ignore[index]
    path = place.with_suffix(".png")
    path.write_bytes(png)
    pixels = images.imread(path)
    assert pixels.shape[1] == 1280 and (pixels[0, 0, :3] == 1).all() and len(np.unique(pixels[..., 0])) > 20


def test_a_picture_is_light_and_leaves_the_panel_as_it_is() -> None:
    cell_panels.page = Page(width=500, text="#eeeeee", background="#111111")
    lab = labkit.labs.roofline("ceiling")
    lab.step()
    page, before = lab._canvas.page, lab._canvas.draw().copy()
    lab.png()
    assert lab._canvas.page == page and np.array_equal(lab._canvas.draw(), before)
    lab.step()
    assert lab.frame["css"] == [500, 300] and lab.frame["base"] is None


def test_it_is_one_file_without_script_or_network(place: pathlib.Path) -> None:
    lab = labkit.labs.roofline("ceiling")
    lab.predict(1)
    lab.step()
    text = written(place, "Ada")
    assert not re.search(r"<(script|link|iframe|object|embed|form|base)\b|\bon\w+=|url\(|https?:", text)
    assert "default-src 'none'" in text and text.startswith("<!doctype html>")


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00\ud800"


def test_every_word_is_escaped(place: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record.predicted(f"roofline.{HOSTILE}", 1, 2, 0.5, {HOSTILE: HOSTILE})
    record.predicted("os.path", 1, 2, 0.5, {})
    record.passed(HOSTILE)
    record.passed("__builtins__")
    monkeypatch.setattr(Quick, "headline", lambda *_: HOSTILE)
    monkeypatch.setattr(Quick, "describe", lambda *_: HOSTILE)
    lab = Lab([Quick()])
    lab.step()
    text = written(place, HOSTILE)
    assert "<script" not in text and "&lt;script" in text and "onerror" in text
    tags = Table(text).tags
    allowed = (
        "html head meta title style body h1 h2 p small table caption thead tbody tr th td br figure figcaption img"
    )
    assert tags <= {*allowed.split(), "strong"}
    assert text.count("<img") == 1


def test_without_anything_done_it_says_so(place: pathlib.Path) -> None:
    text = written(place)
    assert text.count("None yet.") == 2 and "<h2>Pictures" not in text and "so far: 0 of" in text.lower()


def test_an_answer_without_a_number_is_told(place: pathlib.Path) -> None:
    record.predicted("roofline.ceiling", 1.0, float("nan"), float("inf"), {"on": True})
    (row,) = [row for row in Table(written(place)).rows if "roof allow" in row[0]]
    assert row[2:4] == ["none", "far off"] and "on on" in row[0]


@pytest.mark.parametrize("where", ["nowhere/mine.html", "."])
def test_a_place_that_cannot_be_written_is_refused_in_one_sentence(where: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(labkit.LabError, match=r"cannot be written .*: try report"):
        labkit.labs.report(tmp_path / where)


def test_a_full_disk_leaves_the_old_report(place: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written(place)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(labkit.LabError, match="No space left"):
        labkit.labs.report(place)
    assert place.read_text(encoding="utf-8") == before and list(place.parent.glob("*.new")) == []


def test_the_name_is_kept_nowhere_else(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    record.passed("plan")
    assert "Ada Lovelace" in written(place, "Ada Lovelace")
    place.unlink()
    assert all("Lovelace" not in path.read_text() for path in (tmp_path / "data").iterdir())
