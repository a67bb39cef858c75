"""Bubbles and timelines: closed forms, the library's own order, and real ranks whose stages sleep."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import LabError, pipeline, workers
from labkit.device import Spread
from labkit.pipeline import slicing
from labkit.pipeline.simulated_stages import Sleeper
from labkit.pipeline.stages import SCHEDULES, accepts, chunks
from labkit.pipeline.timing import Work, idle, interleave, kept, modelled_bubble, order, simulate, works

torch.set_num_threads(1)

SOME = [
    (schedule, ranks, M)
    for schedule in SCHEDULES
    for ranks in (2, 3, 4)
    for M in range(1, 13)
    if accepts(schedule, ranks, M)
]


@given(st.integers(1, 64), st.integers(1, 64))
def test_the_bubble_is_the_fraction(stages: int, microbatches: int) -> None:
    assert pipeline.bubble(stages, microbatches) == float(Fraction(stages - 1, microbatches + stages - 1))


@given(st.sampled_from([0, -1, 2.5, True, "2", None]))
def test_a_bubble_of_nonsense_is_refused(value: object) -> None:
    with pytest.raises(LabError, match=r"stages = .*: try 1"):
        pipeline.bubble(value, 4)  # type: ignore[arg-type]
    with pytest.raises(LabError, match=r"microbatches = .*: try 1"):
        pipeline.bubble(2, value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("schedule", "ranks", "M"), SOME)
def test_an_order_does_everything_once_and_the_bubble_is_the_formula(schedule: str, ranks: int, M: int) -> None:
    V, orders = chunks(schedule), [order(schedule, rank, ranks, M) for rank in range(ranks)]
    for rank, actions in enumerate(orders):
        mine = [(kind, v * ranks + rank, m) for kind in ("forward", "backward") for v in range(V) for m in range(M)]
        assert sorted(actions) == sorted(mine)
    done = simulate(orders, 1.0 / V, 2.0 / V)
    assert len(done) == 2 * V * M * ranks
    share = idle(done, ranks)
    if schedule != "Interleaved" or ranks <= M:
        assert share == pytest.approx((ranks - 1) / (V * M + ranks - 1))
        assert modelled_bubble(schedule, ranks, M) == pytest.approx(share)
    if V == 1:
        assert share == pytest.approx(pipeline.bubble(ranks, M))


@pytest.mark.parametrize(("schedule", "ranks", "M"), SOME)
def test_in_a_modelled_step_nobody_does_two_things_or_what_is_not_there(schedule: str, ranks: int, M: int) -> None:
    done = simulate([order(schedule, rank, ranks, M) for rank in range(ranks)], 1.0, 2.5)
    ends = {(work.kind, work.stage, work.microbatch): work.end for work in done}
    last = ranks * chunks(schedule) - 1
    for work in done:
        assert work.end - work.begin == pytest.approx(1.0 if work.kind == "forward" else 2.5)
        needs = ("forward", work.stage - 1) if work.kind == "forward" else ("backward", work.stage + 1)
        if 0 <= needs[1] <= last:
            assert ends[(*needs, work.microbatch)] <= work.begin
        if work.kind == "backward":
            assert ends["forward", work.stage, work.microbatch] <= work.begin
    for rank in range(ranks):
        mine = sorted((work.begin, work.end) for work in done if work.rank == rank)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(mine))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("schedule", "M"), [("GPipe", 3), ("Interleaved", 4), ("Interleaved", 8)])
def test_the_order_is_the_librarys_own(schedule: str, M: int, ranks: int) -> None:
    planned = workers.run("tests.pipeline.ranks:planned", ranks, schedule=schedule, microbatches=M)
    assert planned == [order(schedule, rank, ranks, M) for rank in range(ranks)]


@given(st.integers(1, 12), st.integers(1, 4))
def test_what_is_kept_follows_from_the_order(M: int, ranks: int) -> None:
    for rank in range(ranks):
        assert kept(order("GPipe", rank, ranks, M)) == M
        assert kept(order("1F1B", rank, ranks, M)) == min(ranks - rank, M)


def test_woven() -> None:
    f, b = ([(kind, 0, m) for m in range(3)] for kind in ("forward", "backward"))
    assert interleave(f, b, 3) == [*f, *b] and interleave(f, b, 1) == [f[0], b[0], f[1], b[1], f[2], b[2]]
    assert interleave(f, b, 2) == [f[0], f[1], b[0], f[2], b[1], b[2]]


def test_orders_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(LabError, match="wait for each other"):
        simulate([[("backward", 0, 0), ("forward", 0, 0)], [("forward", 1, 0), ("backward", 1, 0)]], 1.0, 1.0)


# Measured, on ranks that sleep.


@pytest.mark.parametrize(
    ("schedule", "ranks", "M"),
    [("GPipe", 2, 4), ("1F1B", 2, 4), ("Interleaved", 2, 4), ("1F1B", 4, 6), ("GPipe", 4, 2)],
)
def test_real_ranks_work_in_the_order_of_the_model_and_keep_what_it_says(schedule: str, ranks: int, M: int) -> None:
    found = pipeline.timeline(schedule=schedule, ranks=ranks, microbatches=M, forward=4.0)
    assert found.kept == found.predicted_kept
    for rank in range(ranks):
        mine = sorted((work for work in found.measured if work.rank == rank), key=lambda work: work.begin)
        assert [(work.kind, work.stage, work.microbatch) for work in mine] == order(schedule, rank, ranks, M)
    V = chunks(schedule)
    assert all(work.end - work.begin >= (4.0 if work.kind == "forward" else 8.0) / V - 0.01 for work in found.measured)
    assert min(work.begin for work in found.measured) == 0 and 0 < found.measured_bubble < 1
    halves = [work.end - work.begin for work in found.measured if work.kind == "forward"]
    assert V == 1 or min(halves) < 4.0  # two stages share what a rank spends on a microbatch
    assert found.measured_total > found.total - 0.1
    assert found.total == pytest.approx((M * V + ranks - 1) * 12 / V)
    ends = {(work.kind, work.stage, work.microbatch): work.end for work in found.measured}
    for work in found.measured:
        if work.kind == "forward" and work.stage:
            assert ends["forward", work.stage - 1, work.microbatch] <= work.begin


def test_more_microbatches_less_bubble_measured() -> None:
    seen = list(pipeline.bubbles(largest=8, forward=10.0))
    last, shares = seen[-1], [spread.median for spread in seen[-1].measured]
    assert last.sizes == (1, 2, 4, 8) and last.progress == 1 and last.kept == (1, 2, 4, 8)
    assert list(last.modelled) == pytest.approx([pipeline.bubble(2, M) for M in last.sizes])
    assert shares[0] > shares[-1] and all(spread.count == 3 for spread in last.measured)
    progress = [each.progress for each in seen]
    assert progress == sorted(progress) and progress[0] == 0 and len(seen) == 1 + 3 * 4
    assert [len(each.measured) for each in seen[:5]] == [0, 1, 1, 1, 2] and seen[2].measured[0].count == 2


def test_a_sweep_leaves_out_what_a_schedule_does_not_take() -> None:
    assert next(pipeline.bubbles(schedule="1F1B", ranks=4)).sizes == (4, 8, 16)
    assert next(pipeline.bubbles(schedule="1F1B", ranks=3, largest=5)).sizes == (4, 5)
    assert next(pipeline.bubbles(largest=12)).sizes == (1, 2, 4, 8, 12)
    assert next(pipeline.cut(schedule="1F1B", ranks=3)).sizes == (4, 8, 16, 32)
    assert next(pipeline.cut(batch=100)).sizes == (1, 2, 4)


# By clocks that are made.


def test_idle_time_by_hand() -> None:
    made = [Work("forward", 0, 0, 0, 2.0, 4.0), Work("backward", 0, 0, 0, 5.0, 8.0), Work("forward", 1, 1, 0, 4.0, 5.0)]
    assert idle(made, 2) == pytest.approx(1 - 6 / 12)


def test_what_ranks_wrote_down_becomes_works_in_ms() -> None:
    times = [("forward", 10.0, 10.001), ("forward", 10.002, 10.003), ("backward", 10.004, 10.006)]
    later = [("backward", 10.007, 10.008)]
    found = list(works([[(1, times), (1, later)], [(1, []), (1, [("forward", 10.001, 10.002)])]]))
    assert [(w.kind, w.rank, w.stage, w.microbatch) for w in found] == [
        ("forward", 0, 0, 0),
        ("forward", 0, 0, 1),
        ("backward", 0, 0, 0),
        ("backward", 0, 2, 0),
        ("forward", 1, 3, 0),
    ]
    assert found[2].begin == pytest.approx(4) and found[2].end == pytest.approx(6)


def test_a_sleeper_counts_what_is_still_kept() -> None:
    stage = Sleeper()
    outs = [stage(torch.zeros(1)) for _ in range(3)]
    assert stage.most == len(stage.held) == 3
    outs[0].backward(torch.ones(1))
    assert len(stage.held) == 2 and stage.most == 3
    del outs
    assert len(stage.held) == 0 and float(stage.weight.grad or 0) == 1
    stage.clear()
    assert stage.most == 0 and stage.times == []


# The fixed batch.


def test_a_cut_batch_by_made_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(function: str, ranks: int, **values: object) -> list[object]:
        assert (function, ranks, values["rows"], values["microbatches"]) == ("labkit.pipeline.slicing:run", 3, 64, 8)
        one = [[(0.0, 0.004), (1.0, 1.002)], [(0.0, 0.002), (0.0, 0.004)], [(0.0, 0.1), (1.0, 1.2)]]
        two = [[(0.0, 0.003), (1.0, 1.005)], [(0.0, 9.0), (0.0, 9.0)], [(0.01, 0.15), (0.9, 1.0)]]
        return [one, two, two]

    monkeypatch.setattr(workers, "run", run)
    found = slicing.measure(8, 64, 16, "GPipe", 3)
    assert (found.rows, found.payload, found.bubble) == (8, 4 * 8 * 16, 0.2)
    assert (found.passes.lowest, found.passes.highest) == pytest.approx((4.0, 5.0))  # the slowest rank of each repeat
    assert (found.message.lowest, found.message.highest) == pytest.approx((1.0, 2.0))  # half of there and back
    assert (found.step.lowest, found.step.highest) == pytest.approx((150.0, 300.0))
    assert found.modelled == pytest.approx((8 + 3 - 1) * (4.0 + 2 * 1.0))
    assert found.rate == pytest.approx(6 * 4 * 8 * 16**2 / 4e-3 / 1e9)


def test_the_best_is_the_least_and_more_pieces_are_smaller_messages() -> None:
    last = list(pipeline.cut(batch=64, width=64))[-1]
    assert last.progress == 1 and [each.microbatches for each in last.slices] == list(last.sizes)
    assert all(each.rows * each.microbatches == 64 for each in last.slices)
    assert len({each.payload * each.microbatches for each in last.slices}) == 1
    assert last.best.modelled == min(each.modelled for each in last.slices)
    assert last.fastest.step.median == min(each.step.median for each in last.slices)
    assert all(isinstance(each.step, Spread) and each.step.count == slicing.REPEATS for each in last.slices)


def test_the_parts_of_a_cut_step_are_of_the_stage() -> None:
    stage, x = slicing.Layers(4), torch.tensor([[1.0, -2.0, 3.0, 0.0]])
    assert stage(x).tolist() == [[1.0, 0.0, 3.0, 0.0]]
    slicing.there_and_back(stage, x)
    assert all(weight.grad is not None and weight.grad.any() for weight in stage.weights) and x.grad is not None
