"""The time of a step goes from mark to mark, on the device's own clock, and settings take turns."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch

from labkit.corpus import batch
from labkit.device import quota_threads
from labkit.errors import LabError
from labkit.nets import IGNORE, Transformer, next_token_loss, valid_tokens
from labkit.throughput import timing
from tests.virtual import set_clock

CPU = torch.device("cpu")


class Event:
    """A GPU's event whose time is the number of marks before it; in milliseconds, as CUDA tells them."""

    made: ClassVar[list[Event]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at, self.waited = -1.0, False

    def record(self) -> None:
        self.at = 100.0 * len(Event.made)
        Event.made.append(self)

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: Event) -> float:
        assert Event.made[-1].waited, "a time is read before the GPU has come so far"
        return later.at - self.at


def test_on_a_gpu_events_are_recorded_and_the_last_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    within: list[Any] = []

    class Within:
        def __init__(self, device: Any) -> None:
            within.append(device)

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", Within)
    gpu = torch.device("cuda", 3)
    watch = timing.Stopwatch(gpu)
    for _ in range(3):
        watch.mark()
    assert watch.spans() == [0.1, 0.1] and within == [gpu] * 3


def test_on_a_cpu_a_monotonic_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch)
    watch = timing.Stopwatch(CPU)
    for at in (1.0, 1.5, 4.0):
        clock.now = at
        watch.mark()
    assert watch.spans() == [0.5, 2.5]


@pytest.mark.parametrize("b", [1, 2, 3, 8])
def test_a_step_is_one_step_on_the_token_mean(b: int) -> None:
    pair = batch(3, 8, 16, text="made")
    mine, whole = (Transformer(seed=1, length=16, dtype=torch.float64) for _ in range(2))
    marks: list[int] = []
    microbatches = timing.cut(pair, b, CPU)
    mine.embedding.grad = torch.ones_like(mine.embedding)  # of the step before
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
    timing.step(mine, optimizer, microbatches, valid_tokens(pair[1]), lambda: marks.append(1))
    next_token_loss(whole, *pair, "mean").backward()
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    for one, other in zip(mine.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert len(marks) == len(microbatches) + 2 and [len(x) for x, _ in microbatches[:-1]] == [b] * (
        8 // b - (8 % b == 0)
    )


def test_the_marks_stand_before_zero_grad_and_after_the_optimizer() -> None:
    order: list[str] = []

    class Model:
        def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
            order.append("forward")
            return torch.zeros(*tokens.shape, 3, requires_grad=True)

    class Optimizer:
        def zero_grad(self) -> None:
            order.append("zero_grad")

        def step(self) -> None:
            order.append("step")

    given: Any = [(torch.ones(1, 3, dtype=torch.long),) * 2] * 2
    timing.step(Model(), Optimizer(), given, 4, lambda: order.append("mark"))  # type: ignore[arg-type]
    assert order == ["mark", "zero_grad", "forward", "mark", "forward", "mark", "step", "mark"]


def test_times_of_a_step_are_those_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch, launch=0.5, per_sequence=0.25, optimizer=8.0)
    model, optimizer = timing.trainee(0, 8, CPU)
    rows = batch(0, 7, 8)
    times = timing.timed(model, optimizer, timing.cut(rows, 2, CPU), CPU)
    assert times == timing.Times(step=3 * 1.0 + 0.75 + 8.0, microbatch=0.9375, optimizer=8.0)
    assert clock.given == [2, 2, 2, 1]


def test_one_thread_is_used_and_the_number_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    work = timing.step

    def step(*given: Any) -> None:
        seen.append(torch.get_num_threads())
        work(*given)

    monkeypatch.setattr(timing, "step", step)
    with quota_threads(2):
        timing.timed(*timing.trainee(0, 8, CPU), timing.cut(batch(0, 2, 8), 1, CPU), CPU)
        assert seen == [1] and torch.get_num_threads() == 2


def test_settings_take_turns_and_the_first_call_of_each_is_dropped() -> None:
    order: list[str] = []

    def work(name: str) -> str:
        order.append(name)
        return f"{name}{len(order)}"

    works = [lambda: work("A"), lambda: work("B"), lambda: work("C")]
    looks = [[list(each) for each in found] for found in timing.interleave(works, 2)]
    assert order == list("AABBCCABC")
    assert looks[0] == [["A2"], [], []] and looks[-1] == [["A2", "A7"], ["B4", "B8"], ["C6", "C9"]]
    assert len(looks) == 6


def test_drift_that_lasts_meets_all_alike() -> None:
    clock = itertools.count(1.0, 0.01)  # each call is slower than the one before
    *_, (one, other) = timing.interleave([lambda: next(clock), lambda: next(clock)], 9)
    assert sum(other) / sum(one) < 1.012 < max(one) / min(one)


@pytest.mark.parametrize(("value", "near"), [(3, 2), (12, 8), (63, 32)])
def test_only_powers_of_two_and_the_remedy_is_one(value: int, near: int) -> None:
    with pytest.raises(LabError, match=f"^sequences = {value} is no power of two: try {near}$"):
        timing.doubling("sequences", value)
    assert timing.doubling("sequences", near) == near


def test_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    model, optimizer = timing.trainee(5, 16, CPU)
    timing.timed(model, optimizer, timing.cut(batch(0, 2, 16), 1, CPU), CPU)
    assert torch.equal(torch.get_rng_state(), before)
    again, _ = timing.trainee(5, 16, CPU)
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())


def test_cut_keeps_every_row_and_its_labels() -> None:
    tokens, labels = batch(0, 8, 16)
    parts = timing.cut((tokens, labels), 4, CPU)
    assert torch.equal(torch.cat([x for x, _ in parts]), tokens)
    assert torch.equal(torch.cat([y for _, y in parts]), labels) and (labels == IGNORE).any()
