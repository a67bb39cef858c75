"""Nothing grows: not with the runs, not with the faults."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import psutil
import pytest

from labkit import LabError
from labkit.workers import Pool
from tests.workers import living, ranks


def own() -> tuple[int, int]:
    """Threads and open files of this process."""
    gc.collect()
    me = psutil.Process()
    return me.num_threads(), me.num_fds()


def test_faults_leave_no_thread_and_no_file_open(forked: Pool, temporary: Path) -> None:
    def fault() -> None:
        with pytest.raises(LabError, match=r"(?m)^rank 1: ValueError"):
            forked.run(ranks.fault, who=1, how="raises")

    fault()
    before = own()
    for _ in range(4):
        fault()
    living.until(lambda: own() == before, f"{before} became {own()}")
    assert not list(temporary.glob("labkit-ranks-*"))


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_500_moves(start: str, temporary: Path) -> None:
    with Pool(2, start) as pool:
        for _ in range(20):
            pool.run(ranks.ddp_step)
        before, mine, folders = pool.run(ranks.state), own(), sorted(temporary.rglob("*"))
        memory = psutil.Process().memory_info().rss
        for _ in range(500):
            pool.run(ranks.ddp_step)
        after = pool.run(ranks.state)
        assert [(each["threads"], each["files"]) for each in after] == [(b["threads"], b["files"]) for b in before]
        assert max(a["memory"] - b["memory"] for a, b in zip(after, before, strict=True)) < 20e6
        assert own() == mine and psutil.Process().memory_info().rss - memory < 20e6
        assert sorted(temporary.rglob("*")) == folders


@pytest.mark.slow
def test_four_spawned_ranks(temporary: Path) -> None:
    with Pool(4, "spawn") as pool:
        assert pool.run(ranks.everyone) == [[0, 10, 20, 30]] * 4
        for how, sentence in [("killed", "rank 3 of 4 was killed by SIGKILL"), ("raises", "rank 3: ValueError")]:
            with pytest.raises(LabError, match="(?m)^" + re.escape(sentence)):
                pool.run(ranks.fault, who=3, how=how)
            assert pool.processes == [] and not list(temporary.glob("labkit-ranks-*"))
        assert pool.run(ranks.fault, who=3, how="nothing") == [4.0] * 4
