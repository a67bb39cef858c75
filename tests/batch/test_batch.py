"""Batch quantities against enumeration: a step is listed device by device, a batch is searched for by brute force."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import batch
from labkit.batch import Plan, cuts, planner, progress, timeline, two_plans, wanted
from labkit.errors import LabError
from tests.strategies import NONSENSE, settings_of

EXPERIMENTS = (planner, wanted, two_plans, timeline, progress)

small = st.integers(1, 5)


def listed(D: int, tp: int, pp: int, cp: int, b: int, K: int) -> tuple[int, int]:
    """Devices, and the different sequences that they read in one step, each device by its place in the mesh."""
    mesh = list(itertools.product(range(pp), range(D), range(cp), range(tp)))
    read = {(replica, m, row) for _, replica, _, _ in mesh for m in range(K) for row in range(b)}
    return len(mesh), len(read)


@given(small, small, small, small, small, small, st.integers(1, 5000))
@settings(max_examples=50)
def test_a_step_listed_device_by_device(D: int, tp: int, pp: int, cp: int, b: int, K: int, S: int) -> None:
    world, sequences = listed(D, tp, pp, cp, b, K)
    rest = {"microbatch": b, "accumulation": K, "sequence_length": S, "tp": tp, "pp": pp, "cp": cp}
    made = batch.plan(world=world, **rest)
    assert (made.replicas, made.global_batch, made.tokens_per_update) == (D, sequences, S * sequences)
    assert batch.plan(replicas=D, **rest) == batch.plan(replicas=D, world=world, **rest) == made
    assert made.world == world and (made.tp, made.pp, made.cp) == (tp, pp, cp)


def test_the_figures() -> None:
    device = batch.plan(microbatch=8, sequence_length=4096)
    assert device.tokens_per_update == 32_768 and device.world == device.replicas == 1
    for D, K in ((256, 1), (64, 4), (1, 256)):
        made = batch.plan(microbatch=8, replicas=D, accumulation=K, sequence_length=4096)
        assert made.tokens_per_update == 32_768 * 256 == 8_388_608
    assert batch.plan(microbatch=4, replicas=128, accumulation=8, sequence_length=4096).tokens_per_update == 16_777_216
    one, eight = (batch.plan(microbatch=4, replicas=8, accumulation=K) for K in (1, 8))
    assert (one.global_batch, eight.global_batch) == (32, 256)
    assert (one.updates(25_600), eight.updates(25_600)) == (800, 100) and one.left(25_600) == eight.left(25_600) == 0
    assert batch.plan(microbatch=8, replicas=8, accumulation=4).global_batch == eight.global_batch
    assert round(progress().right.positions / 1e12, 2) == 0.70


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 9), st.integers(0, 400))
def test_an_epoch_counted_out(D: int, b: int, K: int, sequences: int) -> None:
    made = batch.plan(microbatch=b, replicas=D, accumulation=K, sequence_length=3)
    steps, left = 0, sequences
    while left >= b * D * K:
        steps, left = steps + 1, left - b * D * K
    assert (made.updates(sequences), made.left(sequences)) == (steps, left)
    assert made.samples_after(steps) == sequences - left and made.tokens_after(steps) == 3 * (sequences - left)
    assert made.samples_after(0) == made.tokens_after(0) == 0


def tried(error: LabError) -> Any:
    return ast.literal_eval(str(error).rpartition("try ")[2])


@given(st.integers(1, 300), small, small, small)
def test_a_world_that_does_not_divide_is_refused_with_the_nearest_that_do(
    world: int, tp: int, pp: int, cp: int
) -> None:
    ways = {"tp": tp, "pp": pp, "cp": cp}
    fine = [other for other in range(1, 500) if other % (tp * pp * cp) == 0]
    if world in fine:
        assert batch.plan(world=world, **ways).world == world
        return
    with pytest.raises(LabError) as refused:
        batch.plan(world=world, **ways)
    near = [max((w for w in fine if w < world), default=None), min(w for w in fine if w > world)]
    named = [str(each) for each in near if each]
    assert f"but {' and '.join(named)} {'are' if len(named) == 2 else 'is'}: try {named[0]}" in str(refused.value)
    assert batch.plan(world=tried(refused.value), **ways).world == int(named[0])


def test_messages() -> None:
    with pytest.raises(LabError, match=r"^world = 100 is no multiple of tp × pp × cp = 8, but 96 and 104 are: try 96$"):
        batch.plan(world=100, tp=4, pp=2)
    with pytest.raises(LabError, match=r"^world = 3 is no multiple of tp × pp × cp = 8, but 8 is: try 8$"):
        batch.plan(world=3, tp=2, pp=2, cp=2)
    with pytest.raises(LabError, match=r"^replicas = 4 is not world / \(tp × pp × cp\) = 8: try 8$"):
        batch.plan(replicas=4, world=64, tp=8)
    with pytest.raises(LabError, match=r"^replicas = 64 is not world .* = 8: try 8$"):
        batch.plan(replicas=64, world=64, tp=8)
    with pytest.raises(LabError, match=r"^sequence length = 0 is outside 1 … 1000000000000: try 1$"):
        batch.plan(sequence_length=0)
    with pytest.raises(LabError, match=r"^step = -1 is outside 0"):
        batch.plan().tokens_after(-1)


PLAN = ("microbatch", "replicas", "accumulation", "sequence_length", "world", "tp", "pp", "cp")


@given(st.sampled_from(PLAN), NONSENSE | st.integers(max_value=0) | st.floats(0.1, 0.9))
def test_what_is_no_count_is_refused(name: str, value: object) -> None:
    if value is None and name in ("replicas", "world"):
        return
    with pytest.raises(LabError, match=f"{name.replace('_', ' ')} = .*: try 1"):
        batch.plan(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(LabError, match="try"):
        batch.plan(**{"world": 4, name: value})  # type: ignore[arg-type]


@given(st.sampled_from(["updates", "left", "samples_after", "tokens_after"]), NONSENSE | st.integers(max_value=-1))
def test_what_is_no_count_is_refused_by_a_plan(name: str, value: object) -> None:
    with pytest.raises(LabError, match="try 0"):
        getattr(batch.plan(), name)(value)


def test_a_float_that_is_whole_becomes_one() -> None:
    made = batch.plan(microbatch=8.0, world=64.0, tp=2.0)  # type: ignore[arg-type]
    assert made == batch.plan(microbatch=8, world=64, tp=2)
    assert all(type(value) is int for value in vars(made).values())


# The planner.


@given(settings_of(planner))
def test_the_planner_is_the_plan_and_its_epoch(values: dict[str, Any]) -> None:
    try:
        epoch = planner(**values)
    except LabError as refused:
        epoch = planner(**{**values, "world": tried(refused)})
    made = epoch.plan
    assert epoch.replicas * epoch.devices == made.world and epoch.devices == made.tp * made.pp * made.cp
    assert epoch.updates * epoch.global_batch + epoch.left == values.get("sequences", 25_600)
    assert 0 <= epoch.left < epoch.global_batch == made.global_batch
    assert epoch.tokens_per_update == epoch.tokens_per_microbatch * epoch.replicas * made.accumulation


def test_the_planner_in_numbers() -> None:
    epoch = planner(world=512, accumulation_steps=4, tp=4, pp=2)
    assert (epoch.replicas, epoch.tokens_per_microbatch, epoch.tokens_per_update) == (64, 32_768, 8_388_608)
    assert (epoch.updates, epoch.left) == (12, 1024)


# Ranks that share sequences: what is wrong where they multiply the batch, by exactly how much.


@given(small, small, small, small)
def test_model_parallel_ranks_never_multiply_the_batch(D: int, tp: int, pp: int, cp: int) -> None:
    right = batch.plan(microbatch=3, replicas=D, accumulation=2, tp=tp, pp=pp, cp=cp)
    assert right.global_batch == batch.plan(microbatch=3, replicas=D, accumulation=2).global_batch == 6 * D
    as_if_all_were_replicas = batch.plan(microbatch=3, replicas=right.world, accumulation=2).global_batch
    assert as_if_all_were_replicas == tp * pp * cp * right.global_batch


# The reverse.


@given(st.integers(1, 4000), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=200)
def test_a_wanted_batch_by_brute_force(tokens: int, largest: int, D: int, S: int) -> None:
    result = cuts(tokens=tokens, largest_microbatch=largest, replicas=D, sequence_length=S)
    every = {(b, K): S * b * D * K for b in range(1, largest + 1) for K in range(1, 4 + tokens // (S * b * D))}
    exact = {way for way, got in every.items() if got == tokens}
    assert {(way.microbatch, way.accumulation) for way in result.exact} == exact
    assert bool(exact) == (tokens % (S * D) == 0) == (tokens % result.smallest == 0)
    assert result.best.off == result.best.tokens - tokens
    assert abs(result.best.off) == min(abs(got - tokens) for got in every.values())
    nearest = {way for way, got in every.items() if abs(got - tokens) == abs(result.best.off)}
    assert result.best.accumulation == min(K for _, K in nearest)
    assert [way.accumulation for way in result.exact] == sorted(way.accumulation for way in result.exact)
    if not exact:
        fewer, more = ([got for got in every.values() if sign * (got - tokens) > 0] for sign in (-1, 1))
        assert (result.below.tokens if result.below else None) == max(fewer, default=None)
        assert (result.above.tokens if result.above else None) == min(more)
        for near in filter(None, (result.below, result.above)):
            assert near.accumulation == min(K for (_, K), got in every.items() if got == near.tokens)
    near = {(b, K) for (b, K), got in every.items() if abs(got - tokens) < S * b * D or (K == 1 and got > tokens)}
    assert {(way.microbatch, way.accumulation) for way in result.ways} == near
    assert all(way.tokens == S * way.microbatch * D * way.accumulation for way in result.ways)


def test_the_largest_microbatch_that_fits_is_not_always_the_one() -> None:
    result = wanted(ki_tokens=16_384, largest_microbatch=6, replicas=128, sequence_length=4096)
    assert result == wanted() == cuts(tokens=16_777_216, largest_microbatch=6, replicas=128, sequence_length=4096)
    assert [(way.microbatch, way.accumulation) for way in result.exact] == [(4, 8), (2, 16), (1, 32)]
    six = [(way.accumulation, way.off) for way in result.ways if way.microbatch == 6]
    assert six == [(5, -1_048_576), (6, 2_097_152)]  # 16,777,216 / 32 of 30 and of 36 sequences a replica


def test_what_does_not_divide_has_neighbours() -> None:
    ways = cuts(tokens=1_000_000, largest_microbatch=8, replicas=8, sequence_length=4096)
    assert ways.exact == () and ways.below and ways.above
    assert (ways.below.tokens, ways.above.tokens) == (983_040, 1_015_808)  # 30 and 31 times 8 × 4096
    assert (ways.below.microbatch, ways.below.accumulation) == (6, 5)
    assert (ways.above.microbatch, ways.above.accumulation) == (1, 31)
    assert ways.best == ways.above
    lone = wanted(ki_tokens=1, largest_microbatch=2, replicas=8, sequence_length=4096)
    assert lone.below is None and lone.best.tokens == 32_768


# Two plans.


def rows(**values: int) -> dict[str, tuple[float, float]]:
    return {f"{row.name} {row.unit}": (row.a, row.b) for row in two_plans(**values).rows}


def test_the_same_batch_cut_in_two_ways() -> None:
    table = rows()
    assert table == {
        "global batch sequences": (256, 256),
        "tokens per update tokens": (1_048_576, 1_048_576),
        "updates per epoch updates": (100, 100),
        "sequences in warmup sequences": (25_600, 25_600),
        "syncs per update synchronisations": (1, 1),
        "syncs per 1000 sequences synchronisations": (3.90625, 3.90625),
        "passes per update forward and backward passes of a replica": (4, 8),
        "activation memory sequences held at a time": (8, 4),
    }
    assert two_plans().changed == ("microbatch",)


def test_a_comparison_that_changes_two_things() -> None:
    plans = two_plans(accumulation_b=1)
    assert (
        plans.changed == ("global batch", "microbatch") and str(plans.a) == "(8, 8, 4)" and str(plans.b) == "(4, 8, 1)"
    )
    same = rows(accumulation_b=1)
    assert same["global batch sequences"] == (256, 32) and same["updates per epoch updates"] == (100, 800)
    assert same["sequences in warmup sequences"] == (25_600, 3_200)
    assert same["syncs per 1000 sequences synchronisations"] == (3.90625, 31.25)


triples = st.tuples(small, small, small)


@given(triples, triples)
def test_what_changes(a: tuple[int, int, int], b: tuple[int, int, int]) -> None:
    names = ("microbatch", "replicas", "accumulation")
    values = {f"{name}_{side}": n for side, plan in (("a", a), ("b", b)) for name, n in zip(names, plan, strict=True)}
    plans = two_plans(**values)
    expected = [a[0] * a[1] * a[2] != b[0] * b[1] * b[2], a[0] != b[0], a[1] != b[1]]
    words = ("global batch", "microbatch", "replicas")
    assert plans.changed == tuple(itertools.compress(words, expected))
    assert not plans.changed or a != b
    assert plans.rows[0].same == ("global batch" not in plans.changed)
    assert plans.rows[5].a * plans.rows[0].a == pytest.approx(1000) and plans.rows[0].a == plans.a.global_batch
    assert (a == b) == (all(row.same for row in plans.rows) and not plans.changed)


# The timeline.


def share(**values: Any) -> float:
    step = timeline(**values)
    return step.waiting / step.total


def test_a_step_in_milliseconds() -> None:
    step = timeline()
    names = [part.name for part in step.parts]
    assert names == ["forward", "backward"] * 4 + ["synchronise", "update"]
    assert (step.parts[8].start, step.parts[8].end, step.parts[9].end) == (720, 810, 840)
    assert (step.forward, step.backward, step.waiting, step.optimizer) == (240, 480, 90, 30)
    assert step.unaccumulated == 4 * (60 + 120 + 90 + 30) and step.hidden == 0
    assert share(accumulation_steps=1) == pytest.approx(0.3) and share() == pytest.approx(90 / 840)


def test_synchronising_after_every_microbatch_costs_k_times_as_much() -> None:
    for K in (1, 3, 64):
        once, always = timeline(accumulation_steps=K), timeline(accumulation_steps=K, every_microbatch=True)
        assert always.total - once.total == pytest.approx((K - 1) * 90) and always.waiting == pytest.approx(K * 90)
        assert [p.name for p in always.parts] == ["forward", "backward", "synchronise"] * K + ["update"]


def test_overlap_hides_at_most_the_whole_synchronisation() -> None:
    half, all_of_it = timeline(overlap=0.5), timeline(overlap=1)
    assert (half.hidden, half.waiting, half.total) == (60, 30, 780)
    assert (all_of_it.hidden, all_of_it.waiting, all_of_it.total) == (90, 0, 750)
    assert all_of_it.parts[8].end == all_of_it.parts[7].end == all_of_it.parts[9].start
    short = timeline(overlap=1, backward=10.0, synchronise=100.0, every_microbatch=True)
    assert (short.hidden, short.waiting) == (40, 360)


@given(settings_of(timeline))
def test_the_parts_make_up_the_step(values: dict[str, Any]) -> None:
    step = timeline(**values)
    for name, length in (("forward", step.forward), ("backward", step.backward), ("update", step.optimizer)):
        assert sum(p.end - p.start for p in step.parts if p.name == name) == pytest.approx(length)
    network = sum(p.end - p.start for p in step.parts if p.name == "synchronise")
    assert network == pytest.approx(step.hidden + step.waiting, abs=1e-6)
    busy = [p for p in step.parts if p.name != "synchronise"]
    assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(busy))
    gaps = sum(other.start - one.end for one, other in itertools.pairwise(busy))
    assert gaps == pytest.approx(step.waiting, abs=1e-6)
    assert step.total == pytest.approx(step.forward + step.backward + step.waiting + step.optimizer)
    assert busy[0].start == 0 and busy[-1].end == step.total
    K, again = values.get("accumulation_steps", 4), {**values, "accumulation_steps": 1}
    assert step.unaccumulated == pytest.approx(K * timeline(**again).total)


# Progress.


def test_a_step_number_is_tokens_only_with_tokens_per_update() -> None:
    reading = progress()
    assert (reading.counter, reading.tokens_per_update) == (83_421, 8_388_608)
    assert reading.right.positions == reading.right.valid == 83_421 * 8_388_608 == 699_786_067_968
    assert reading.right.iterations == 4 * 83_421 and reading.right.samples == 83_421 * 2048
    assert progress(padding=0.25).right.valid == 0.75 * 699_786_067_968


@given(settings_of(progress))
def test_both_readings_of_the_same_number(values: dict[str, Any]) -> None:
    result = progress(**values)
    right, wrong, made = result.right, result.wrong, result.plan
    assert right.steps == wrong.iterations == result.counter
    assert right.positions == made.tokens_after(result.counter) and right.samples == made.samples_after(result.counter)
    assert right.positions == made.accumulation * wrong.positions
    assert wrong.steps * made.accumulation <= wrong.iterations < (wrong.steps + 1) * made.accumulation
    for each in (right, wrong):
        assert each.positions == each.samples * made.sequence_length
        assert each.valid == pytest.approx((1 - values.get("padding", 0)) * each.positions)


# All of them.


@pytest.mark.parametrize("run", EXPERIMENTS)
@given(data=st.data())
@settings(max_examples=20)
def test_what_is_declared_runs_the_same_twice(run: Callable[..., Any], data: st.DataObject) -> None:
    values = data.draw(settings_of(run))
    try:
        assert run(**values) == run(**values)
    except LabError as refused:
        assert run(**{**values, "world": tried(refused)}) is not None
        assert run is planner


def test_a_plan_reads_as_microbatch_replicas_accumulation() -> None:
    assert str(Plan(8, 16, 4, 4096, 16, 1, 1, 1)) == "(8, 16, 4)"
