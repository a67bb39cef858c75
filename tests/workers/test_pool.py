"""The pool: what it takes, what it gives back, what it keeps from run to run, and what it refuses."""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import LabError, workers
from labkit.workers import Pool
from tests.workers import living, ranks


def test_every_rank_is_called_with_its_number_and_the_values(pool: Pool) -> None:
    assert pool.run(ranks.sentinel, a=1, b="text") == [[rank, 2, {"a": 1, "b": "text"}] for rank in (0, 1)]


def test_ranks_are_in_one_group(pool: Pool) -> None:
    assert pool.run("tests.workers.ranks:everyone") == [[0, 10], [0, 10]]


def test_ranks_are_processes_that_stay(pool: Pool) -> None:
    pool.run(ranks.everyone)
    before = pool.processes
    pool.run(ranks.everyone)
    assert pool.processes == before and len({*before, os.getpid()}) == 3


def test_each_call_begins_from_the_same_state(pool: Pool) -> None:
    first = pool.run(ranks.drawn)
    assert pool.run(ranks.drawn) == first and first[0] == first[1]
    assert first[0][2:] == [1, 1, 4]  # threads, gradients, bytes of a float


@pytest.mark.skipif(sys.platform != "linux", reason="counted as Linux does")
def test_what_a_call_has_used_is_given_back(pool: Pool) -> None:
    pool.run(ranks.everyone)
    every = [psutil.Process(pid) for pid in pool.processes]
    before = [each.memory_full_info().uss for each in every]
    assert pool.run(ranks.wasted) == [51, 51]
    living.until(lambda: all(e.memory_full_info().uss < b + 20e6 for e, b in zip(every, before, strict=True)))


def test_it_listens_on_127_0_0_1_alone(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    outward = [name for name, each in psutil.net_if_addrs().items() if any(_outward(one.address) for one in each)]
    pool.close()
    if outward:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", outward[0])  # where gloo would listen if it were let
    addresses = pool.run(ranks.listening)
    assert all(each and set(each) == {"127.0.0.1"} for each in addresses)


def _outward(address: str) -> bool:
    return bool(re.fullmatch(r"[0-9.]+", address)) and not address.startswith("127.")


def test_the_folder_is_private(pool: Pool) -> None:
    folders = pool.run(ranks.folder)
    assert folders[0] == folders[1]
    assert stat.S_IMODE(os.stat(folders[0]).st_mode) == 0o700
    pool.close()
    assert not os.path.exists(folders[0])


def test_a_large_answer_and_a_large_argument(pool: Pool) -> None:
    assert [len(each) for each in pool.run(ranks.bulk, size=100_000_000)] == [100_000_000] * 2
    assert pool.run(ranks.size, data=bytes(100_000_000)) == [100_000_000] * 2


@pytest.mark.parametrize("world", [1, 3, 4])
def test_other_numbers_of_ranks(world: int) -> None:
    with Pool(world, "forkserver") as pool:
        assert pool.run(ranks.everyone) == [[10 * rank for rank in range(world)]] * world


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        ({"ranks": 0}, "ranks = 0 is outside 1 … 4: try 1"),
        ({"ranks": 5}, "ranks = 5 is outside 1 … 4: try 4"),
        ({"ranks": True}, "ranks = True is not a number: try 1"),
        ({"ranks": 2.5}, "ranks = 2.5 is not a whole number: try 2"),
        ({"ranks": "2"}, "ranks = '2' is not a number: try 1"),
        ({"start": "fork"}, "start = 'fork' is none of forkserver, spawn: try 'forkserver'"),
        ({"device": "gpu"}, "device = 'gpu' is none of cpu, cuda: try 'cpu'"),
        ({"start": "forkserver", "device": "cuda"}, "start = 'forkserver' is none of spawn: try 'spawn'"),
        ({"timeout": 0}, "timeout = 0 is outside 0.01 … 86400 s: try 0.01"),
        ({"timeout": -1}, "timeout = -1 is outside"),
        ({"timeout": math.inf}, "timeout = inf is outside"),
        ({"timeout": math.nan}, "timeout = nan is not a number"),
    ],
)
def test_what_cannot_be_asked_for(ask: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LabError, match="^" + re.escape(sentence)):
        workers.run(ranks.everyone, **ask)


@settings(max_examples=30)
@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.lists(st.integers())))
def test_no_odd_number_of_ranks_is_accepted(asked: Any) -> None:
    if not (isinstance(asked, (int, float)) and asked in (1, 2, 3, 4)):
        with pytest.raises(LabError, match=r"^ranks = "):
            Pool(asked)


def typed_in_a_cell() -> None: ...


typed_in_a_cell.__module__ = "__main__"


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda rank, world: 0, r"<lambda> was typed in a cell or script, .*: try to put it into a \.py file"),
        (typed_in_a_cell, r"typed_in_a_cell was typed in a cell or script"),
        (functools.partial(ranks.everyone), "function = .* cannot be imported by a rank: try"),
        ("everyone", "function = 'everyone' cannot be imported by a rank: try 'package.module:function'"),
        (":everyone", "function = ':everyone' cannot be"),
        ("tests.workers.ranks:", "function = 'tests.workers.ranks:' cannot be"),
        (None, "function = None cannot be"),
    ],
)
def test_a_function_without_an_importable_name(function: Any, sentence: str) -> None:
    with pytest.raises(LabError, match="^" + sentence):
        workers.run(function)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such:thing", r"rank [01]: there is no module 'no_such': try"),
        ("labkit.no_such:thing", r"rank [01]: there is no module 'labkit\.no_such': try"),
        ("tests.workers.ranks:nothing", r"rank [01]: 'tests\.workers\.ranks' has no 'nothing': try"),
        ("tests.workers.ranks:FATES", r"rank [01]: tests\.workers\.ranks:FATES is no function: try"),
        ("broken:thing", r"rank [01]: 'broken' raises ZeroDivisionError: .*: try to import it by itself"),
        ("needs:thing", r"rank [01]: 'needs' raises ModuleNotFoundError: No module named 'nowhere'"),
        ("leaves:thing", r"rank [01]: 'leaves' raises SystemExit: 3"),
        ("tests.workers.ranks:fault", r"rank [01]: tests\.workers\.ranks:fault does not take these arguments: missing"),
    ],
)
def test_a_call_that_cannot_begin_costs_no_rank(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "needs.py").write_text("import nowhere\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    pool.run(ranks.everyone)
    before = pool.processes
    with pytest.raises(LabError, match="(?m)^" + sentence):
        pool.run(name)
    assert pool.run(ranks.everyone) == [[0, 10]] * 2
    assert pool.processes == before


def test_a_module_that_the_notebook_writes_and_changes(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(ranks.everyone)
    monkeypatch.syspath_prepend(tmp_path)  # after the ranks have started
    written = tmp_path / f"written_{pool.start}.py"
    for text in ("'first'", "'second, longer'"):
        written.write_text(f"def answer(rank, world):\n    return {text}\n")
        assert pool.run(f"{written.stem}:answer") == [eval(text)] * 2


def test_a_module_beside_the_notebook(forked: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked.run(ranks.everyone)
    (tmp_path / "beside.py").write_text("def answer(rank, world):\n    return rank\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    assert forked.run("beside:answer") == [0, 1]


def test_a_working_folder_that_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with Pool(2, "forkserver") as early, Pool(2, "forkserver") as late:
        early.run(ranks.everyone)
        monkeypatch.chdir(gone)
        gone.rmdir()
        assert early.run(ranks.everyone) == [[0, 10]] * 2
        with pytest.raises(
            LabError, match=r"^the ranks cannot be started \(FileNotFoundError.*: try os.chdir to a folder"
        ):
            late.run(ranks.everyone)
        os.chdir(tmp_path)  # as it says
        assert late.run(ranks.everyone) == [[0, 10]] * 2


def test_arguments_and_answers_that_cannot_travel(forked: Pool) -> None:
    forked.run(ranks.everyone)
    before = forked.processes
    with pytest.raises(LabError, match=r"^an argument cannot be sent to a rank \(.*\): try numbers, text, lists$"):
        forked.run(ranks.sentinel, value=lambda: 0)
    with pytest.raises(LabError, match=r"(?m)^rank [01]: an argument cannot be read \(ValueError: .*\): try"):
        forked.run(ranks.sentinel, value=ranks.Unreadable())
    assert forked.run(ranks.everyone) == [[0, 10]] * 2 and forked.processes == before
    with pytest.raises(LabError, match=r"(?m)^rank [01]: what it returned cannot be sent \(.*\): try numbers"):
        forked.run(ranks.unsendable)
    with pytest.raises(
        LabError, match=r"^rank [01]: what it returned cannot be read here \(ValueError.*\): try numbers"
    ):
        forked.run(ranks.unreadable)
    assert forked.run(ranks.everyone) == [[0, 10]] * 2


def test_a_rank_starts_no_ranks(forked: Pool) -> None:
    with pytest.raises(LabError, match=r"(?m)^rank [01]: a rank cannot start ranks of its own: try to call it from"):
        forked.run(ranks.nested)


def test_runs_from_two_threads_take_turns() -> None:
    answers: dict[int, list[Any]] = {}

    def repeat(ranks_: int) -> None:
        for _ in range(3):
            answers[ranks_] = workers.run(ranks.everyone, ranks_)

    threads = [threading.Thread(target=repeat, args=(world,)) for world in (1, 2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert answers == {1: [[0]], 2: [[0, 10]] * 2}


def test_another_number_of_ranks_replaces_those_that_are_kept() -> None:
    workers.run(ranks.everyone, 2)
    kept = workers.pool(2)
    before = [psutil.Process(pid) for pid in kept.processes]
    assert workers.pool(2) is kept
    assert workers.run(ranks.everyone, 1) == [[0]]
    living.all_end(before)
    with pytest.raises(LabError):
        workers.pool(7)
    assert workers.pool(1).processes  # what cannot be had costs nothing
    workers.close()
    workers.close()
    assert workers.run(ranks.everyone, 1) == [[0]]


def test_a_forked_copy_of_the_notebook_leaves_the_ranks_alone() -> None:
    workers.run(ranks.everyone)
    before, kept = workers.pool().processes, workers.pool()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            workers.run(ranks.everyone)
        except LabError as error:
            code = 0 if "cannot start ranks" in str(error) else 2
        kept.close()
        workers.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert workers.run(ranks.everyone) == [[0, 10]] * 2
    assert workers.pool().processes == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_nobody_uses_does_nothing(pool: Pool) -> None:
    pool.run(ranks.everyone)
    living.until(lambda: _switches(pool.processes, 0.0) == _switches(pool.processes, 0.5))


def _switches(processes: list[int], later: float) -> dict[str, str]:
    """How often each thread has waited until now; but for gloo's own, which looks around 100 times a second."""
    time.sleep(later)
    found = {}
    for task in (task for pid in processes for task in Path(f"/proc/{pid}/task").iterdir()):
        if not (task / "comm").read_text().startswith("gloo"):
            found[task.name] = (task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0]
    return found


def test_importing_it_loads_no_torch() -> None:
    import subprocess

    code = "import sys, labkit.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    importlib.invalidate_caches()


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_a_gpu_that_is_not_there() -> None:
    with (
        Pool(2, device="cuda") as pool,
        pytest.raises(LabError, match=r"^rank [01]: device = 'cuda', and there is no GPU"),
    ):
        pool.run(ranks.everyone)
