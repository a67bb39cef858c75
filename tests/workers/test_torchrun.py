"""The same functions under torchrun: the same result, on one machine and on two."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from labkit import LabError
from labkit.workers.__main__ import main, plain, run
from tests.lab_in_browser import ROOT
from tests.workers.experiments import sums


def torchrun(*arguments: str, ranks: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(*arguments: str) -> str:
    process = torchrun(*arguments)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def from_pool(*arguments: str) -> str:
    """What the command prints on this machine's pool."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(list(arguments)) == 0
    return out.getvalue()


def test_a_script_gets_the_same_list_on_every_rank_and_a_fault_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""\
        import os, sys
        from labkit import LabError, workers
        from tests.workers import experiments, ranks
        said = [workers.run(ranks.everyone), workers.run("tests.workers.ranks:sentinel", a=1), experiments.twice()]
        try:
            workers.run(ranks.everyone, 3)
        except LabError as error:
            said.append(str(error))
        try:
            workers.run(ranks.fault, who=1, how="raises")
        except LabError as error:
            said.append(str(error))
        with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
            file.write(repr(said))
        """)
    )
    printed_ = torchrun(str(script), str(tmp_path)).communicate()
    said = [eval((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert said[0] == said[1], printed_
    everyone, sentinel, (first, second), number, fault = said[0]
    assert everyone == [[0, 10]] * 2
    assert sentinel == [[rank, 2, {"a": 1}] for rank in (0, 1)]
    assert first == second
    assert number == "ranks = 3, and torchrun started 2: try 2"
    assert fault == "rank 1: ValueError: weights are gone"


def test_an_experiment_gives_the_result_of_the_pool_once() -> None:
    command = "-m", "labkit.workers", "tests.workers.experiments:sums", "factor=1.5"
    out = printed(*command)
    assert out.count("\n") == 1 and json.loads(out) == plain(sums(factor=1.5)) == {"factor": 1.5, "sums": [4.5, 4.5]}


def test_two_machines() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = "-m", "labkit.workers", "tests.workers.ranks:everyone"
    machines = [
        torchrun(
            "--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", *command, ranks=1
        )
        for node in (0, 1)
    ]
    said = [each.communicate() for each in machines]
    assert [each.returncode for each in machines] == [0, 0], said
    assert [out for out, _ in said] == ["[[0, 10], [0, 10]]\n", ""]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("raises", "rank 1: ValueError: weights are gone"),
        ("killed", "rank 0 lost a rank that ended: try to find which in torchrun's report"),
        (
            "hangs",
            "rank 0 waited 2 s for another rank: "
            "try to let every rank take part in each collective, or a longer timeout",
        ),
    ],
)
def test_a_fault_is_one_sentence_and_an_exit_status(how: str, sentence: str) -> None:
    process = torchrun("-m", "labkit.workers", "tests.workers.ranks:fault", "who=1", f"how={how}", "timeout=2")
    out, err = process.communicate()
    assert process.returncode == 1 and not out
    assert [line for line in err.splitlines() if line.startswith("rank ")] == [sentence]
    assert err.count("Traceback") == 1 and "ChildFailedError" in err  # torchrun's own report


def test_the_command_without_torchrun() -> None:
    assert json.loads(from_pool("labkit.workers:total", "value=3", "ranks=1")) == [3.0]
    assert json.loads(from_pool("tests.workers.experiments:sums", "ranks=1")) == {"factor": 2.0, "sums": [2.0]}
    assert json.loads(from_pool("tests.workers.experiments:growing")) == 2.0
    assert json.loads(from_pool("tests.workers.ranks:sentinel", "text=plain", 'list=[1, "a"]', "ranks=1")) == [
        [0, 1, {"text": "plain", "list": [1, "a"]}]
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such:thing"], "there is no module 'no_such': try the name"),
        (["thing"], "function = 'thing' cannot be imported"),
        (["labkit.workers:total", "value"], "'value' is no argument: try name=value"),
        (["labkit.workers:total", "worth=3"], "rank [01]: labkit.workers:total does not take these arguments"),
        (["tests.workers.experiments:sums", "worth=3"], "tests.workers.experiments:sums: got an unexpected keyword"),
    ],
)
def test_what_the_command_cannot_do(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert not said.out and re.match(sentence, said.err) and said.err.count("\n") == 1


def test_a_result_that_is_not_finite_is_null() -> None:
    assert plain({"a": [float("inf"), (1, None, True)], 2: "text"}) == {"a": [None, [1, None, True]], "2": "text"}
    with pytest.raises(LabError):
        run("tests.workers.experiments:nothing", {})
