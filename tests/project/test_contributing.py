"""The guide for contributors is followed word for word: a lab out of its own code blocks, in a temporary folder."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import labkit
from labkit import casebook, check, labs, rules
from labkit.accumulation import compare
from labkit.casebook import entry
from labkit.corpus import batch, split
from labkit.learner.notebooks import notebooks
from labkit.nets import Transformer
from tests.frame.driven import drive, extremes

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = ROOT / "docs"
GUIDE = (GUIDES / "contributing.md").read_text(encoding="utf-8")
FILES = re.findall(r"`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)```", GUIDE, re.DOTALL)
PYTHON = [path for path in dict.fromkeys(path for path, _ in FILES) if path.endswith(".py")]
CASE = next(block for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "casebook import" in block)


def state() -> Any:
    """What another test could notice."""
    modules = {name for name in sys.modules if "slopes" in name}
    return list(labkit.__path__), modules, {*labs.all()}, {*check.all()}, {*rules.every()}, casebook.titles()


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder with all the files of the guide; its labkit is one more place where labkit looks."""
    before = state()
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "data"))
    for path, text in FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / path).open("a", encoding="utf-8") as file:
            file.write("\n\n" * bool(file.tell()) + text)
    labkit.__path__.append(str(tmp_path / "labkit"))
    yield tmp_path
    labkit.__path__.remove(str(tmp_path / "labkit"))
    for name in [name for name in sys.modules if name.startswith("labkit.slopes")]:
        del sys.modules[name]
    vars(labkit).pop("slopes", None)
    rules.TABLE.pop("first-microbatch-only", None)
    entry._BOOK.pop("C01", None)
    assert state() == before


def test_the_lab_is_found_stepped_and_drawn(folder: pathlib.Path) -> None:
    assert labkit.labs.all()["slopes"] and "slopes" in dir(labkit.labs)
    lab = labkit.labs.slopes("mean", first=2, second=-1)
    lab.predict(0.5)
    blank = lab.figure.canvas.buffer_rgba().tobytes()
    lab.step()
    assert (lab.result.gradient, lab.score) == (0.5, 0.0)
    assert lab.page["headline"] == "The mean loss has the slope 0.5" and "2 and -1" in lab.text
    assert lab.figure.canvas.buffer_rgba().tobytes() != blank
    assert labkit.labs.slopes().experiments == ["mean", "repeated"]
    repeated = labkit.labs.slopes("repeated")
    for values in extremes(repeated.experiment.run):
        drive(repeated, values)


def test_the_exercises_are_found_and_judge(folder: pathlib.Path) -> None:
    assert {"mean_slope", "descent"} <= set(check.all())
    assert labkit.check.mean_slope(lambda slopes: sum(slopes) / len(slopes)).passed
    assert "only the last example" in labkit.check.mean_slope(lambda slopes: slopes[-1]).sentence
    assert labkit.check.descent(lambda weight, slope, rate: weight - rate * slope).passed
    assert "it climbs" in labkit.check.descent(lambda weight, slope, rate: weight + rate * slope).sentence


def test_the_rule_is_found_and_predicts_what_its_loop_does(folder: pathlib.Path) -> None:
    rule = rules.rule("first-microbatch-only")
    comparison = compare(Transformer(seed=1).double(), split(*batch(1, 6), 3), rule)
    assert rule.topic == "slopes" and comparison.token_weights.tolist() == pytest.approx([1, 0, 0])
    assert comparison.predicted.tolist() == pytest.approx(comparison.sequence_weights.tolist())


def test_the_case_is_in_the_book_and_runs(folder: pathlib.Path) -> None:
    exec(CASE, {"__name__": "counting"})
    assert casebook.find("C01").run() == (5.0, 3.5)


def test_the_tests_and_examples_of_the_guide_pass(folder: pathlib.Path) -> None:
    for path in PYTHON:
        if path.startswith("labkit/"):
            module = importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
            tried = doctest.testmod(module)
            assert not tried.failed and bool(tried.attempted) == (">>>" in inspect.getsource(module)), path
    tests: dict[str, Any] = {}
    exec((folder / "tests/slopes/test_slopes.py").read_text(), tests)
    for test in [each for name, each in tests.items() if name.startswith("test_")]:
        test()


def test_the_notebook_is_on_the_map(folder: pathlib.Path) -> None:
    path = folder / "notebooks/15_slopes.ipynb"
    cell = {"cell_type": "code", "source": ['labkit.labs.slopes("mean")\n', "labkit.check.mean_slope(mine)"]}
    path.write_text(json.dumps({"metadata": json.loads(path.read_text()), "cells": [cell]}))
    mine = notebooks(path.parent)[-1]
    assert (mine.file, mine.about) == (path.name, "why the gradient of a batch is a mean")
    assert (mine.experiments, mine.exercises) == (("slopes.mean",), ("mean_slope",))


@pytest.mark.parametrize("path", PYTHON)
def test_its_code_has_our_style(path: str, folder: pathlib.Path) -> None:
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", path, "-"]
        subprocess.run(ruff, input=(folder / path).read_text(encoding="utf-8"), cwd=ROOT, text=True, check=True)


def test_it_says_what_every_folder_is_and_what_it_names_is_there() -> None:
    for name in [each.name for each in pkgutil.iter_modules(labkit.__path__) if each.ispkg]:
        assert f"`{name}/`" in GUIDE, f"docs/contributing.md does not say what the folder {name} is"
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [name for name in re.findall(r"^make (\w+)", GUIDE, re.MULTILINE) if f"\n{name}:" not in targets] == []


@pytest.mark.parametrize("document", [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))], ids=lambda path: path.name)
def test_documents_name_only_what_is_there(document: pathlib.Path) -> None:
    text = re.sub(r"\S*(slopes|audit_step)\S*", "", document.read_text(encoding="utf-8"))  # files of the reader's own
    for name in {*re.findall(r"\blabkit(?:\.\w+)+", text)}:
        assert pkgutil.resolve_name(name) is not None
    places = {*re.findall(r"\b(?:labkit|tests|docs|examples|notebooks)/[\w/.]*\w", text)}
    assert [place for place in places if not (ROOT / place).exists()] == []
