"""Whatever happens to a rank: one sentence that names it, nothing left behind, and the next run works."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from labkit import LabError
from labkit.workers import Pool, _rank, _start
from tests.workers import living, ranks

BOTH = {
    "killed": r"^rank 1 of 2 was killed by SIGKILL .*, so all were ended: try the same again$",
    "os._exit": r"^rank 1 of 2 ended with exit code 7, ",
    "raises": r"^rank 1: ValueError: weights are gone$",
}
MORE = {
    "terminated": r"^rank 1 of 2 was killed by SIGTERM, ",
    "realtime": r"^rank 1 of 2 was killed by (SIGRTMIN\+6|signal 40), ",
    "aborted": r"^rank 1 of 2 was killed by SIGABRT, ",
    "segfault": r"^rank 1 of 2 was killed by SIGSEGV, ",
    "sys.exit": r"^rank 1: SystemExit: 3$",
    "memory": r"^rank 1: RuntimeError: .*memory",
}


class Around:
    """What is there before a test; afterwards there is nothing more."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.before = folder, living.pool_processes()

    def nothing_is_left(self, pool: Pool, were: list[int]) -> None:
        assert pool.processes == [] and not list(self.folder.glob("labkit-ranks-*"))
        assert not set(living.pool_processes()) - set(self.before)
        assert not [pid for pid in were if psutil.pid_exists(pid) and living.alive(psutil.Process(pid))]


@pytest.fixture
def around(temporary: Path) -> Around:
    return Around(temporary)


def fails(pool: Pool, around: Around, how: str, sentence: str, timeout: float = 60) -> LabError:
    pool.run(ranks.everyone)
    were = pool.processes
    with pytest.raises(LabError, match="(?m)" + sentence) as caught:
        pool.run(ranks.fault, who=1, how=how, timeout=timeout)
    around.nothing_is_left(pool, were)
    return caught.value


@pytest.mark.parametrize("how", BOTH)
def test_a_rank_that_ends_is_named_and_the_next_run_works(pool: Pool, around: Around, how: str) -> None:
    fails(pool, around, how, BOTH[how])


@pytest.mark.parametrize("how", MORE)
def test_every_end_has_its_sentence(forked: Pool, around: Around, how: str) -> None:
    fails(forked, around, how, MORE[how])


@pytest.mark.parametrize("how", ["hangs", "spins", "in C", "stopped"])
def test_a_hang_names_at_its_timeout_who_gave_no_answer_and_where_it_is(forked: Pool, around: Around, how: str) -> None:
    error = fails(
        forked, around, how, r"^ranks 0 and 1 gave no answer within 0.5 s, so all were ended \(.*\): try ", 0.5
    )
    assert "rank 0 is at ranks.py line" in str(error) and "dist.all_reduce(term)" in str(error)
    assert ("rank 1 is at ranks.py" in str(error)) == (how in ("hangs", "spins"))
    assert any("all_reduce" in note for note in error.__notes__)


def test_a_stopped_rank_that_takes_no_message_is_ended(forked: Pool, around: Around) -> None:
    forked.run(ranks.everyone)
    were = forked.processes
    os.kill(were[1], signal.SIGSTOP)
    with pytest.raises(LabError, match=r"^rank 1 stopped halfway through a message, so all were ended: try the same"):
        forked.run(ranks.sentinel, timeout=0.5, value="x" * 10_000_000)
    around.nothing_is_left(forked, were)
    assert forked.run(ranks.everyone) == [[0, 10]] * 2


def test_a_hang_of_spawned_ranks(pool: Pool, around: Around) -> None:
    fails(pool, around, "in C", "^ranks 0 and 1 gave no answer within 0.5 s", 0.5)


def test_a_rank_that_waits_for_one_that_has_left_is_named_with_its_line(forked: Pool) -> None:
    with pytest.raises(LabError, match=r"^rank 1 gave no answer .*rank 1 is at ranks.py line \d+: dist.all_reduce"):
        forked.run(ranks.skips, timeout=0.5)


def test_the_fault_carries_the_traceback_of_the_rank(forked: Pool) -> None:
    with pytest.raises(LabError) as caught:
        forked.run(ranks.fault, who=0, how="raises")
    assert str(caught.value) == "rank 0: ValueError: weights are gone"
    assert "in _raises" in "".join(caught.value.__notes__)


def test_a_lost_connection_is_not_the_cause_where_another_rank_has_one(forked: Pool) -> None:
    with pytest.raises(LabError, match=r"(?m)^rank 1: ValueError: the cause$"):
        forked.run(ranks.echo_first)
    with pytest.raises(LabError, match=r"(?m)^rank 0: ConnectionResetError: a server far away$"):
        forked.run(ranks.only_echo)


def test_a_rank_that_dies_after_its_answer_explains_why_others_wait(forked: Pool) -> None:
    with pytest.raises(LabError, match=r"^rank 1 of 2 ended with exit code 9"):
        forked.run(ranks.death_after_answer)


def test_a_rank_that_is_killed_while_nobody_uses_it_is_replaced(pool: Pool, temporary: Path) -> None:
    pool.run(ranks.everyone)
    before = pool.processes
    os.kill(before[1], signal.SIGKILL)
    crew = pool._crew
    assert crew
    living.until(lambda: not crew.ready, "its last thread has not ended")
    assert pool.run(ranks.everyone) == [[0, 10]] * 2
    assert not set(before) & set(pool.processes)
    assert not any(map(psutil.pid_exists, before))


def test_a_rank_is_deaf_to_the_interrupt_button(forked: Pool) -> None:
    assert forked.run(ranks.fault, who=1, how="interrupted") == [2.0, 2.0]


def test_a_rank_that_is_killed_from_outside_in_a_run(forked: Pool, around: Around) -> None:
    forked.run(ranks.everyone)
    threading.Timer(0.2, os.kill, (forked.processes[0], signal.SIGKILL)).start()
    with pytest.raises(LabError, match=r"^rank 0 of 2 was killed by SIGKILL"):
        forked.run(ranks.fault, who=1, how="spins")
    around.nothing_is_left(forked, [])


def test_the_end_of_the_server_is_survived(forked: Pool) -> None:
    from multiprocessing import forkserver

    forked.run(ranks.everyone)
    left = [psutil.Process(pid) for pid in forked.processes]
    living.end(forkserver._forkserver._forkserver_pid)
    living.until(lambda: not forked._crew or not forked._crew.ready)
    assert forked.run(ranks.everyone) == [[0, 10]] * 2
    living.all_end(left)


def test_without_a_temporary_folder(forked: Pool, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("tempfile.tempdir", str(temporary / "gone"))
        with pytest.raises(LabError, match=r"^there is no temporary folder \(.*No such file.*\): try to set TMPDIR"):
            forked.run(ranks.everyone)
    assert forked.run(ranks.everyone) == [[0, 10]] * 2


def test_closed_from_another_thread(forked: Pool, around: Around) -> None:
    forked.run(ranks.everyone)
    were = forked.processes
    threading.Timer(0.2, forked.close).start()
    with pytest.raises(LabError, match=r"^the ranks were closed while they worked: try the same again$"):
        forked.run(ranks.fault, who=1, how="in C")
    around.nothing_is_left(forked, were)
    assert forked.run(ranks.everyone) == [[0, 10]] * 2


def test_closed_from_another_thread_while_they_start(around: Around) -> None:
    with Pool(2, "spawn") as pool:
        threading.Timer(0.3, pool.close).start()
        with pytest.raises(LabError, match=r"^the ranks were closed while they worked"):
            pool.run(ranks.everyone)
        living.until(lambda: not set(living.pool_processes()) - set(around.before))
        around.nothing_is_left(pool, [])


def test_closing_does_not_wait_for_a_server_that_loads_torch(around: Around) -> None:
    """A server that has just been asked for: the close returns, and what starts later ends at once."""
    from multiprocessing import forkserver

    server = forkserver._forkserver._forkserver_pid
    if server:
        living.end(server)
    pool = Pool(2, "forkserver")
    returned: list[bool] = []

    def close() -> None:
        living.until(lambda: pool._crew)
        pool.close()
        returned.append(not pool.processes)

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(LabError, match=r"^the ranks were closed while they"):
        pool.run(ranks.everyone)
    thread.join()
    assert returned == [True]
    living.until(lambda: not set(living.pool_processes()) - set(around.before))
    around.nothing_is_left(pool, [])


def test_a_rank_that_starts_after_its_notebook_has_ended_ends(forked: Pool, tmp_path: Path) -> None:
    forked.run(ranks.everyone)  # the server has loaded torch, so that a rank meets the store at once
    for _ in range(20):
        with _start.launching("forkserver") as context:
            ours, theirs = context.Pipe()
            ours.close()
            given = (0, 2, str(tmp_path / "gone"), 0, "cpu", theirs)
            rank = context.Process(target=_rank.serve, args=given)  # type: ignore[attr-defined]
            rank.start()
        theirs.close()
        rank.join(living.PATIENCE)
        assert rank.exitcode == 1


@pytest.fixture
def button() -> Iterator[None]:
    """The button works, also where a shell that began the tests in its background lets them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("button")
def test_two_presses_of_the_button_leave_nothing(forked: Pool, around: Around) -> None:
    forked.run(ranks.everyone)

    def press() -> None:
        for _ in range(40):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.002)

    main, thread, pressed = signal.getsignal(signal.SIGINT), threading.Timer(0.2, press), 0
    thread.start()
    while thread.is_alive():  # whatever the presses interrupt
        try:
            forked.run(ranks.fault, who=1, how="hangs", timeout=0.3)
        except KeyboardInterrupt:
            pressed += 1
        except LabError:
            pass  # no press within its time: on a busy machine they have yet to begin, else they are over
    assert pressed and signal.getsignal(signal.SIGINT) is main
    forked.close()
    folders = around.folder.glob  # a rank that still starts is reaped in the background, and its folder after it
    living.until(lambda: not (set(living.pool_processes()) - set(around.before) or [*folders("labkit-ranks-*")]))
    around.nothing_is_left(forked, [])
    assert forked.run(ranks.everyone) == [[0, 10]] * 2
