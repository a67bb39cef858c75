"""The device: quotas from made control groups, and times from a made clock."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import device
from labkit.device import Spread
from labkit.errors import LabError

CPU = torch.device("cpu")
UNLIMITED_V1 = "9223372036854771712"

Group = Callable[..., Path]


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 8 cores where nobody asks for less."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def group(tmp_path: Path) -> Group:
    """Writes `proc/self/cgroup` and the files below `sys/fs/cgroup`; gives the root of both."""

    def make(membership: str, **files: str) -> Path:
        proc = tmp_path / "proc/self"
        proc.mkdir(parents=True)
        (proc / "cgroup").write_text(membership)
        for path, text in files.items():
            file = tmp_path / "sys/fs/cgroup" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", 8), ("6400000 100000", 8)],
)
def test_quota_of_version_2_rounds_down_to_at_least_one(group: Group, quota: str, cores: int) -> None:
    assert device.threads(group("0::/\n", **{"cpu.max": quota})) == cores


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", 8), ("10000", 1)])
def test_quota_of_version_1(group: Group, quota: str, cores: int) -> None:
    files = {"cpu,cpuacct/cpu.cfs_quota_us": quota, "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    assert device.threads(group("4:cpu,cpuacct:/\n3:memory:/\n", **files)) == cores


def test_a_group_named_by_one_of_its_controllers(group: Group) -> None:
    files = {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}
    assert device.threads(group("4:cpu,cpuacct:/docker/0123\n0::/\n", **files)) == 4


@pytest.mark.parametrize(("outer", "inner", "cores"), [("2", "4", 2), ("4", "2", 2), ("4", "max", 4)])
def test_the_tightest_of_nested_groups_counts(group: Group, outer: str, inner: str, cores: int) -> None:
    files = {
        "user/cpu.max": f"{outer} 1",
        "user/1000/cpu.max": f"{inner} 1",
        "cpu.max": "max 1",
        "other/cpu.max": "1 1",
    }
    assert device.threads(group("0::/user/1000\n", **files)) == cores


def test_a_path_of_the_host_is_not_there_inside_a_container(group: Group) -> None:
    assert device.threads(group("0::/host/slice/container\n", **{"cpu.max": "3 1"})) == 3


def test_both_versions_at_once(group: Group) -> None:
    files = {"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000", "unified/cpu.max": "2 1"}
    assert device.threads(group("1:cpu:/\n0::/\n", **files)) == 2


@pytest.mark.parametrize("text", ["", "max", "nonsense 1", "1 0", "-5 100000", "200000"])
def test_a_file_that_says_nothing_sets_no_limit(group: Group, text: str) -> None:
    assert device.threads(group("0::/\n", **{"cpu.max": text})) == 8


def test_without_control_groups_affinity_and_environment_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.threads(tmp_path) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    assert device.threads(tmp_path) == 3
    for asked, cores in {"2": 2, "0": 3, "many": 3, "": 3, "1,4": 1, "64": 3}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert device.threads(tmp_path) == cores


def test_a_system_that_knows_no_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert device.threads(tmp_path) == 8
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert device.threads(tmp_path) == 1


def test_memory_limit_of_version_2(group: Group) -> None:
    root = group("0::/a/b\n", **{"memory.max": "max", "a/memory.max": "2147483648", "a/b/memory.max": "4294967296"})
    assert device.memory_limit(root) == 2**31


def test_memory_limit_of_version_1(group: Group) -> None:
    files = {"memory/memory.limit_in_bytes": UNLIMITED_V1, "memory/pod/memory.limit_in_bytes": "1073741824"}
    assert device.memory_limit(group("3:memory:/pod\n", **files)) == 2**30


def test_no_memory_limit(group: Group, tmp_path: Path) -> None:
    assert device.memory_limit(tmp_path / "nothing") is None
    root = group("3:memory:/\n0::/\n", **{"memory/memory.limit_in_bytes": UNLIMITED_V1, "memory.max": "max"})
    assert device.memory_limit(root) is None


def test_pick_names_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.pick() == device.pick("cpu") == device.pick(CPU) == CPU
    for absent in ("cuda", "cuda:0", "gpu", ""):
        with pytest.raises(LabError, match=f"device = '{absent}' is none of auto, cpu on this machine: try 'auto'"):
            device.pick(absent)


def test_pick_finds_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.pick() == torch.device("cuda")
    assert device.pick("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(LabError, match="'cuda:2' is none of auto, cpu, cuda, cuda:0, cuda:1"):
        device.pick("cuda:2")


@given(st.text(max_size=6) | st.integers() | st.none() | st.floats())
def test_pick_refuses_everything_else(name: object) -> None:
    if name not in ("auto", "cpu"):
        with pytest.raises(LabError, match="try 'auto'"):
            device.pick(name)  # type: ignore[arg-type]


def test_quota_threads_restores_what_was_there() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), device.quota_threads(3) as count:
        assert torch.get_num_threads() == count == 3
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


class Clock:
    """Stands for the module `time`: every call of `work` takes as long as `cost` says."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.cost, self.now, self.calls = cost, 0.0, 0

    def perf_counter(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += self.cost(self.calls)
        self.calls += 1


def timed(
    monkeypatch: pytest.MonkeyPatch, cost: Callable[[int], float], cores: int, budget: float
) -> tuple[Clock, list[float]]:
    clock = Clock(cost)
    monkeypatch.setattr(device, "time", clock)
    monkeypatch.setattr(device, "threads", lambda: cores)
    return clock, device.timings(clock.work, CPU, budget)


def test_short_work_is_timed_in_samples_of_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, samples = timed(monkeypatch, lambda _: 1e-5, cores=1, budget=0.1)
    assert samples == pytest.approx([1e-5] * len(samples))
    assert 45 <= len(samples) <= 51
    assert clock.now == pytest.approx(0.05, rel=0.05)


def test_the_first_call_only_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _, samples = timed(monkeypatch, lambda call: 0.01 if call else 0.02, cores=1, budget=0.1)
    assert samples == pytest.approx([0.01] * 3)


def test_work_longer_than_the_budget_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, samples = timed(monkeypatch, lambda _: 0.2, cores=4, budget=0.1)
    assert (clock.calls, samples) == (1, [0.2])


def test_short_work_counts_by_its_better_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that wait for each other 8 or 60 ms a call, one that does not."""
    for waits in (0.008, 0.06):
        cost = {1: 0.0001, 2: waits}
        _, samples = timed(monkeypatch, lambda _, cost=cost: cost[torch.get_num_threads()], cores=2, budget=0.1)
        assert samples == pytest.approx([0.0001] * len(samples))
    _, samples = timed(monkeypatch, lambda _: 0.002 / torch.get_num_threads(), cores=2, budget=0.1)
    assert samples == pytest.approx([0.001] * len(samples))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_a_spread_is_ordered_within_its_values(values: list[float]) -> None:
    spread = Spread.of(values)
    ordered = [spread.lowest, spread.lower, spread.median, spread.upper, spread.highest]
    assert ordered == sorted(ordered)
    assert (spread.lowest, spread.highest, spread.count) == (min(values), max(values), len(values))


def test_spreads_by_hand() -> None:
    assert Spread.of([5, 1, 2, 4, 3]) == Spread(1, 2, 3, 4, 5, 5)
    nothing = Spread.of([])
    assert nothing.count == 0
    assert math.isnan(nothing.median)


def test_cold_weights_are_many_equal_copies() -> None:
    warm = device.weights(1024, torch.float32, CPU)
    cold = device.weights(1024, torch.float32, CPU, cold=True)
    assert (len(warm), len(cold)) == (1, 32)
    assert torch.equal(cold[0], warm[0]) and torch.equal(cold[-1], warm[0])
    assert cold[0].data_ptr() != cold[1].data_ptr()
