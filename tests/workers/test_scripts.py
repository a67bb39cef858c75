"""Ranks started from a script, a command line, standard input and IPython: the script does not run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.lab_in_browser import ROOT

LINES = """\
print("once", flush=True)
from labkit import workers
print(workers.run("tests.workers.ranks:everyone", start="{start}"))
"""
SAID = "once\n[[0, 10], [0, 10]]\n"


def said(command: list[str], folder: Path, text: str = "", temporary: Path | None = None) -> str:
    """What a program prints, whose temporary folder is empty when it has ended."""
    temporary = temporary or Path(tempfile.mkdtemp(prefix="t"))  # a server's socket needs a short name
    temporary.mkdir(exist_ok=True)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, input=text, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    assert not [each for each in temporary.iterdir() if not each.name.startswith("torchinductor_")]
    shutil.rmtree(temporary)
    return ran.stdout


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_a_script_without_a_guard_runs_once(start: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LINES.format(start=start))
    assert said(["script.py"], tmp_path) == SAID


def test_a_module_runs_once_in_a_temporary_folder_with_spaces_and_umlauts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LINES.format(start="spawn"))
    assert said(["-m", "script"], tmp_path, temporary=tmp_path / "Übungen am Gerät") == SAID


@pytest.mark.slow
def test_a_command_line(tmp_path: Path) -> None:
    assert said(["-c", LINES.format(start="forkserver")], tmp_path) == SAID


@pytest.mark.slow
def test_standard_input(tmp_path: Path) -> None:
    assert said(["-"], tmp_path, LINES.format(start="forkserver")) == SAID


def test_ipython(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LINES.format(start="forkserver"))
    command = ["-m", "IPython", "--no-banner", "--HistoryManager.enabled=False", "script.py"]
    assert said(command, tmp_path) == SAID


def test_a_script_that_defines_the_function_is_told_where_to_put_it(tmp_path: Path) -> None:
    lines = "from labkit import LabError, workers\ndef mine(rank, world): ...\ntry:\n    workers.run(mine)\n"
    (tmp_path / "script.py").write_text(f"{lines}except LabError as error:\n    print(error)\n")
    assert said(["script.py"], tmp_path).startswith("mine was typed in a cell or script, and a rank cannot import it")


def test_a_script_that_leaves_at_once_while_torch_is_being_loaded(tmp_path: Path) -> None:
    assert said(["-c", "from labkit import workers; workers.warm(); print('once')"], tmp_path) == "once\n"


def test_a_temporary_folder_whose_name_is_too_long(tmp_path: Path) -> None:
    """The labs' panels still come, and the run says what to do."""
    lines = (
        "from labkit import LabError, workers\nworkers.warm()\ntry:\n    workers.run('labkit.workers:total', value=1)\n"
    )
    (tmp_path / "script.py").write_text(f"{lines}except LabError as error:\n    print(error)\n")
    told = said(["script.py"], tmp_path, temporary=tmp_path / ("long" * 30))
    assert told.rstrip().endswith("try to set TMPDIR to a folder with a shorter name")
