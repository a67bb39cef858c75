"""The loops to copy from: each is right, and its commented line breaks it into the word beside it."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import subprocess
import sys

import pytest

from labkit.__main__ import main
from tests.lab_in_browser import ROOT

EXAMPLES = sorted((ROOT / "examples" / "audit").glob("*.py"))
INSTEAD = re.compile(r"^.*\n( *)# instead: (.*)  # ([a-z-]+)$", re.MULTILINE)
each = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    status = main(["audit", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


@each
def test_it_is_right_as_it_stands(path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = said(capsys, str(path))
    assert status == 0 and report["verdict"] == "token-mean" and report["faults"] == []
    counts = report["counts"]
    assert isinstance(counts, list) and len(set(counts)) == len(counts), "equal counts would tell little"


@each
def test_its_commented_line_breaks_it(
    path: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = path.read_text()
    ((indent, code, word),) = INSTEAD.findall(text)
    broken = tmp_path / f"broken_{path.name}"
    broken.write_text(INSTEAD.sub(lambda _: indent + code, text))
    status, report = said(capsys, f"{broken}:build")
    assert status == 1 and report["faults"] == [word]
    assert report["verdict"] == word


@each
def test_it_is_short_and_needs_nothing_but_torch_and_the_probe(path: pathlib.Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert modules <= {"torch", "torch.nn.functional", "labkit.audit"}
    assert {"build", "loss_sum"} <= {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def test_there_are_ten_in_different_words() -> None:
    words = [INSTEAD.findall(path.read_text())[0][2] for path in EXAMPLES]
    assert len(EXAMPLES) == len(set(words)) == 10


BROKEN = {
    "no build": ("microbatches = []\n", "has no 'build'"),
    "no microbatches": ("def build(): ...\n", "has no 'microbatches'"),
    "an empty list": ("microbatches = []\nbuild = loss_sum = print\n", "0 microbatches"),
    "no model": ("microbatches = [1]\nbuild = loss_sum = lambda *_: 3\n", "gives a int and no model with its step"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_module_gets_no_verdict(name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, words = BROKEN[name]
    path = tmp_path / f"{name.replace(' ', '_')}.py"
    path.write_text(text)
    assert main(["audit", str(path)]) == 2
    out = capsys.readouterr().out
    assert out.startswith("no verdict: ") and words in out


def test_a_step_that_raises_gets_no_verdict(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLES[0].read_text().replace("optimizer.step()", "optimizer.stop()")
    path = tmp_path / "raises.py"
    path.write_text(text)
    assert main(["audit", str(path)]) == 2
    assert "the step raises AttributeError" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["x = (\n", "import no_such_module\n", "1 / 0\n"])
def test_a_module_that_cannot_be_imported_gets_no_verdict(text: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert main(["audit", str(path)]) == 2


def test_a_missing_file_gets_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "nowhere.py"]) == 2 and "there is no file 'nowhere.py'" in capsys.readouterr().out


def test_what_a_step_prints_does_not_spoil_the_report(tmp_path: pathlib.Path) -> None:
    chatty = (EXAMPLES[0].read_text()).replace("optimizer.step()", "optimizer.step(); print('loss 1.0')")
    (tmp_path / "chatty.py").write_text(chatty)
    command = [sys.executable, "-m", "labkit", "audit", "chatty.py", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["verdict"] == "token-mean" and "loss 1.0" in done.stderr


@pytest.mark.parametrize(("name", "status"), [("build", 0), ("rank_means", 1)])
def test_a_step_in_a_file_on_two_ranks(name: str, status: int, tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from labkit.data_parallel.steps import build, loss_sum, microbatches, rank_means\n"
    )
    command = [sys.executable, "-m", "labkit", "audit", f"{tmp_path / 'mine.py'}:{name}", "--ranks", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (status, "rank-means" if status else "token-mean")
