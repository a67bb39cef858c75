"""The map: read from the notebooks, true to what was done, safe and the same in words as in HTML."""

from __future__ import annotations

import html.parser
import json
import pathlib
import re
from collections.abc import Iterator

import pytest

import labkit
from labkit import check
from labkit.learner import notebook_map, notebooks, one_time_messages, record

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"


@pytest.fixture(autouse=True)
def _alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path))
    monkeypatch.chdir(NOTEBOOKS)
    one_time_messages.forget()
    yield
    one_time_messages.forget()


class Table(html.parser.HTMLParser):
    """The rows of a table, its links, and every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True
        if tag == "a":
            self.links.append(dict(attrs)["href"] or "")
        if tag == "br" and self.inside:
            self.rows[-1][-1] += "\n"

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def table() -> Table:
    return Table(labkit.labs.map()._repr_html_())


def row(title: str) -> list[str]:
    return next(cells for cells in table().rows if title in cells[0])


def test_every_notebook_on_disk_is_on_the_map_and_a_link() -> None:
    there = {path.name for path in NOTEBOOKS.glob("*.ipynb")}
    assert set(table().links) == there and len(table().rows) == 1 + len(there)
    assert [each.file for each in notebooks.notebooks()] == sorted(there)
    assert all(each.about for each in notebooks.notebooks())


def test_what_stands_in_two_notebooks_counts_once() -> None:
    every = [name for each in notebooks.notebooks() for name in each.experiments]
    twice = next(name for name in every if every.count(name) > 1)
    record.predicted(twice, 3.0, 2.0, 0.5, {})
    summary = notebook_map.overview().summary()
    assert summary.startswith(f"So far: 1 of {len(set(every))} experiments predicted")


def test_a_notebook_that_is_not_there_is_no_link(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebooks, "HERE", tmp_path)
    assert table().links == [] and len(table().rows) == 1
    assert "So far: 0 of 0" in labkit.labs.map()._repr_html_()


def test_a_notebook_of_ones_own_is_no_row_and_an_older_copy_is_one(tmp_path: pathlib.Path) -> None:
    cells = [{"cell_type": "code", "source": "labkit.labs.roofline('ceiling')"}]
    for name in ("02_roofline.ipynb", "77_mine.ipynb"):
        (tmp_path / name).write_text(json.dumps({"cells": cells, "metadata": {}}))
    seen = {each.file: each for each in notebooks.notebooks(tmp_path)}
    assert "77_mine.ipynb" not in seen
    assert seen["02_roofline.ipynb"].here and seen["02_roofline.ipynb"].experiments == ("roofline.ceiling",)


def test_far_from_the_notebooks_the_numbers_are_those_of_the_repository(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert table().links == [] and row("Roofline")[1].endswith("min")


def test_every_experiment_of_every_lab_is_asked_in_a_notebook() -> None:
    asked = {name for each in notebooks.notebooks() for name in each.experiments}
    for topic, lab in labkit.labs.all().items():
        for experiment in lab().experiments:
            stands = any(topic in name for name in asked)
            assert f"{topic}.{experiment}" in asked or not stands, f"{topic}.{experiment} is in no notebook"
    assert {name.split(".")[0] for name in asked} <= set(labkit.labs.all())


def test_every_notebook_says_its_minutes_and_has_an_exercise() -> None:
    for each in notebooks.notebooks():
        if each.here:
            assert each.minutes and each.experiments and each.exercises, each.file
            assert set(each.exercises) <= set(check.all())


def test_what_is_done_is_counted() -> None:
    before = row("02 Roofline")
    assert before[2].startswith("0 of ") and before[3].startswith("0 of ")
    lab = labkit.labs.roofline("ceiling")
    for number in (160, 150):
        lab.predict(number)
        lab.step()
        lab.reset()
    assert re.fullmatch(r"1 of \d+\nclosest exact\nlatest 6\.2 % off", row("02 Roofline")[2])
    assert check.intensity(lambda b, d, size: 2 * b * d * d / (size * (2 * b * d + d * d))).passed
    assert row("02 Roofline")[3].startswith("1 of ")
    assert check.token_mean(lambda sums, counts: sum(sums) / sum(counts)).passed
    assert row("00 Start")[3] == "✓ 1 of 1"
    assert "2 of" in labkit.labs.map().summary()


def test_a_prediction_that_is_far_off_is_said_so() -> None:
    record.predicted("roofline.ceiling", 1.0, 0.0, float("inf"), {})
    assert row("02 Roofline")[2].startswith("1 of ") and "off" not in row("02 Roofline")[2]
    record.predicted("roofline.ceiling", 160, 150, 1 / 15, {})
    assert "closest 6.7 % off" in row("02 Roofline")[2]


def test_it_is_a_table_with_heads_and_no_script() -> None:
    text = labkit.labs.map()._repr_html_()
    assert table().tags <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td", "a", "br", "span"}
    assert text.count('scope="row"') == 15 and text.count('scope="col"') == 4 and "color" not in text


def test_words_say_the_same_as_the_table() -> None:
    record.predicted("roofline.ceiling", 160, 150, 1 / 15, {})
    words = repr(labkit.labs.map())
    for cells in table().rows[1:]:
        assert cells[0].split("\n")[0] in words
        for cell in cells[1:]:
            assert cell.split("\n")[0] in words


def test_titles_are_data(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"cell_type": "markdown", "source": ["# 2 · <script>alert(1)</script>\n", "about 5 minutes"]}
    (tmp_path / "02_roofline.ipynb").write_text(json.dumps({"cells": [cell]}))
    monkeypatch.chdir(tmp_path)
    assert "<script>" not in labkit.labs.map()._repr_html_()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', '{"cells": [{}]}', "\udcff"])
def test_a_notebook_that_cannot_be_read_is_no_fault(
    text: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "02_roofline.ipynb").write_bytes(text.encode(errors="surrogateescape"))
    monkeypatch.chdir(tmp_path)
    assert row("02 Roofline")[1] == "not here yet"


def test_a_damaged_progress_file_is_told_on_the_map(tmp_path: pathlib.Path) -> None:
    (tmp_path / "progress.json").write_text("{")
    assert "progress-damaged-1.json" in labkit.labs.map()._repr_html_()


def test_it_is_large_on_a_projector() -> None:
    labkit.labs.projector()
    assert "150%" in labkit.labs.map()._repr_html_()
    labkit.labs.projector(False)
    assert "150%" not in labkit.labs.map()._repr_html_()


def test_percent() -> None:
    assert [notebook_map.percent(score) for score in (0.0004, 0.0006, 9.9, 10.1)] == [
        "exact", "0.06 % off", "990 % off", "far off"
    ]  # fmt: skip
