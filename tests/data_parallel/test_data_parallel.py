"""Real ranks against the whole batch in one pass, algebra in fractions, and what a hook counted."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from labkit import data_parallel, rules, workers
from labkit.corpus import batch
from labkit.data_parallel import allreduce_time, no_sync, rank_losses, sharding, step_timeline, uneven_ranks
from labkit.data_parallel.compare import apart, draw_batches, share
from labkit.errors import LabError
from labkit.fit import flat, gradient
from labkit.nets import IGNORE, Transformer, next_token_loss, valid_tokens
from labkit.throughput import step_seconds
from tests.lab_in_browser import ROOT

torch.set_num_threads(1)

WRONG = tuple(word for word in rank_losses.RECIPES if word != "token-mean")
EXPERIMENTS = (
    *(data_parallel.recipes, data_parallel.collectives, data_parallel.buckets, data_parallel.timeline),
    *(data_parallel.allreduce, data_parallel.empty_rank, data_parallel.uneven, data_parallel.overflow),
    *(data_parallel.killed, data_parallel.fsdp),
)


def fractions(word: str, counts: Sequence[Sequence[int]], seen_from: int = 0) -> list[Fraction]:
    """Weight × N of each microbatch, worked out from what the recipe divides by and DDP's 1/W."""
    W, N = len(counts), sum(map(sum, counts))
    found = []
    for rank, own in enumerate(counts):
        for n in own:
            each = {
                "token-mean": Fraction(W, N),
                "rank-means": Fraction(1, sum(own)),
                "missing-world-factor": Fraction(1, N),
                "extra-world-factor": Fraction(W, sum(own)),
                "mean-of-means": Fraction(1, n * len(own)),
                "reduction-bypassed": Fraction(W, N) * W * (rank == seen_from),
            }[word]
            found.append(each * N / W)
    return found


@pytest.mark.parametrize("word", rank_losses.RECIPES)
@pytest.mark.parametrize("counts", [[[1, 3], [5, 7]], [[4], [4]], [[2, 2], [3, 9], [8, 1]], [[6]]])
def test_predicted_weights_are_the_fractions(word: str, counts: list[list[int]]) -> None:
    for seen_from in range(len(counts)):
        found = rank_losses.weights(word, rank_losses.layout(counts, seen_from))
        assert found.tolist() == pytest.approx([float(each) for each in fractions(word, counts, seen_from)], rel=1e-14)


def test_a_microbatch_without_a_valid_token_weighs_nothing() -> None:
    assert rank_losses.weights("mean-of-means", rank_losses.layout([[0, 3], [4, 4]])).tolist()[0] == 0


@pytest.mark.parametrize("word", WRONG)
def test_every_wrong_recipe_stands_in_the_table_with_its_weights(word: str) -> None:
    rule = rules.rule(word)
    assert rule.word == word and rule.fix and rule.looks_like and not rule.right
    if rule.topic == "data_parallel":
        counts = [[1, 3], [5, 7]]
        assert rule.needs == "ranks" and rule.loop is rank_losses.RECIPES[word]
        predicted = rule.weights(rank_losses.layout(counts)).tolist()
        assert predicted == pytest.approx([float(each) for each in fractions(word, counts)])


def test_a_recipe_without_ranks_says_what_it_needs() -> None:
    with pytest.raises(LabError, match=r"needs ranks: try labkit\.data_parallel\.recipes"):
        rules.rule("missing-world-factor").run(Transformer(), [batch(0, 2)])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("word", rank_losses.RECIPES)
def test_a_recipe_gives_the_weights_that_algebra_says(word: str, ranks: int) -> None:
    found = data_parallel.recipes(recipe=word, ranks=ranks)
    here = share(draw_batches(ranks, 2, 4, 294), 294)
    assert found.counts.tolist() == [n for rank in here.counts for n in rank]
    for seen_from in range(ranks):
        said = [float(each) for each in fractions(word, here.counts, seen_from)]
        assert found.predicted[seen_from].tolist() == pytest.approx(said)
        assert found.fitted[seen_from].tolist() == pytest.approx(said, rel=1e-9, abs=1e-9)
    assert found.residual < 1e-12
    expected = torch.tensor([float(each) for each in fractions(word, here.counts)], dtype=torch.float64)
    error = (expected @ here.rows / here.total - here.right).norm() / here.right.norm()
    assert found.relative_error == pytest.approx(float(error), abs=1e-12)
    assert found.equal == (word == "token-mean") and (found.apart > 0.1) == (word == "reduction-bypassed")


def test_the_table_of_the_curriculum() -> None:
    for ranks in (2, 4):
        right = data_parallel.recipes(recipe="token-mean", ranks=ranks)
        assert right.relative_error < 1e-15 < right.tolerance.value < 1e-12
        short = data_parallel.recipes(recipe="missing-world-factor", ranks=ranks)
        assert short.relative_error == pytest.approx(1 - 1 / ranks) and short.norm_ratio == pytest.approx(1 / ranks)
        assert short.cosine == pytest.approx(1)
        long, means = (data_parallel.recipes(recipe=f"{w}", ranks=ranks) for w in ("extra-world-factor", "rank-means"))
        assert long.norm_ratio == pytest.approx(ranks * means.norm_ratio) and long.cosine == pytest.approx(means.cosine)
    hidden = data_parallel.recipes()
    assert hidden.relative_error > 0.3 and abs(hidden.projection - 1) < 0.02 and abs(hidden.norm_ratio - 1) < 0.05


@pytest.mark.parametrize("word", ["rank-means", "mean-of-means"])
def test_equal_counts_hide_it(word: str) -> None:
    assert data_parallel.recipes(recipe=word, shortest=32).equal


def test_the_right_gradient_is_that_of_every_token_by_itself() -> None:
    here = share(draw_batches(2, 1, 4, 3), 3)
    model, N = Transformer(seed=3, dtype=torch.float64), 0
    for tokens, labels in [each for rank in here.microbatches for each in rank]:
        losses = next_token_loss(model, tokens, labels, "none")
        losses[labels[:, 1:] != IGNORE].sum().backward()
        N += valid_tokens(labels)
    assert torch.allclose(flat(gradient(model)) / N, here.right, rtol=1e-12, atol=1e-15) and here.total == N


def test_one_rank_is_no_special_case() -> None:
    for word in ("token-mean", "missing-world-factor", "extra-world-factor", "rank-means", "reduction-bypassed"):
        assert data_parallel.recipes(recipe=word, ranks=1).equal, word


# Where a step synchronises.

SIZE = 8 * sum(p.numel() for p in Transformer().parameters())


@pytest.mark.parametrize(("ranks", "K"), [(2, 4), (2, 1), (2, 6), (4, 3), (1, 2)])
def test_all_reduces_of_every_pattern(ranks: int, K: int) -> None:
    found = data_parallel.collectives(ranks=ranks, accumulation_steps=K)
    assert [each.name for each in found.patterns] == list(no_sync.PATTERNS)
    assert [each.all_reduces for each in found.patterns] == [K, 1, K, 1, 0, 1]
    assert all(each.bytes == each.all_reduces * SIZE for each in found.patterns)
    for at, each in enumerate(found.patterns):
        fine = at < 4 or ranks == 1 or (at == 5 and K == 1)
        assert (each.relative_error <= found.tolerance) == (each.apart <= found.tolerance) == fine, each


def test_what_is_left_without_a_synchronisation() -> None:
    here = share(draw_batches(2, 3, 4, 5), 5)
    *_, never, first = data_parallel.collectives(accumulation_steps=3, seed=5).patterns
    own = [2 * here.rows[3 * rank : 3 * rank + 3].sum(0) / here.total for rank in (0, 1)]
    synchronised = (here.rows[0] + here.rows[3]) / here.total
    later = [synchronised + 2 * here.rows[3 * rank + 1 : 3 * rank + 3].sum(0) / here.total for rank in (0, 1)]
    for pattern, (one, other) in ((never, own), (first, later)):
        length = float(here.right.norm())
        assert pattern.relative_error == pytest.approx(float((one - here.right).norm()) / length)
        assert pattern.apart == pytest.approx(float((other - one).norm()) / length)


@pytest.mark.parametrize(("cap", "messages"), [(0.1, 8), (1, 8), (2, 4), (3, 3), (4, 2), (8, 1), (25, 1)])
def test_a_bucket_is_closed_by_the_layer_that_fills_it(cap: float, messages: int) -> None:
    found = data_parallel.buckets(bucket_cap=cap)
    assert found.messages == len(found.sizes) == messages == math.ceil(8 / math.ceil(cap))
    assert found.bytes == int(found.sizes.sum()) == 8 * 512 * 512 * 4
    assert found.backward.count == 5 and 0 < found.backward.lowest <= found.backward.median


# Time.


@pytest.mark.parametrize(("ranks", "K", "cap"), [(2, 4, 0.25), (2, 1, 25.0), (1, 3, 0.5)])
def test_a_step_in_time_has_all_its_parts_in_order(ranks: int, K: int, cap: float) -> None:
    found = data_parallel.timeline(ranks=ranks, accumulation_steps=K, bucket_cap=cap, rows=8)
    assert (
        found.messages == math.ceil(step_timeline.LAYERS / math.ceil(cap / 0.25))
        and found.step.count == step_timeline.TIMES
    )
    assert (
        found.microbatch.count == ranks * K * step_timeline.TIMES and found.exposed.count == ranks * step_timeline.TIMES
    )
    for rank in range(ranks):
        own = [each for each in found.stretches if each.rank == rank]
        work = [each for each in own if each.name != "all-reduce"]
        assert [each.name for each in work] == ["microbatch"] * K + ["wait", "update"]
        assert all(one.end == other.start for one, other in itertools.pairwise(work))
        sent = [each for each in own if each.name == "all-reduce"]
        assert len(sent) == found.messages and all(each.start <= each.end for each in own)
        assert (
            work[K - 1].start <= sent[0].start and sent[-1].start == work[K].start
        )  # the last one leaves, the rank waits
        assert all(each.end <= work[K].end for each in sent)
    assert 0 <= found.hidden_share < 1
    if found.messages == 1:
        assert found.hidden.highest == 0 and found.hidden_share == 0  # nothing is left to compute when it leaves


def test_stretches_of_a_step_by_hand() -> None:
    steps: list[step_timeline.Step] = [
        ([10.0, 11.0, 13.0, 13.5], [[11.5, 12.0], [12.0, 12.9]]),
        ([10.5, 11.5, 14.0, 14.25], [[12.0, 12.4], [13.0, 13.9]]),
    ]
    found = step_timeline._stretches(steps)
    told = [(s.rank, s.name, s.start, s.end) for s in found]
    assert told[:6] == [
        (0, "microbatch", 0.0, 1000.0),
        (0, "microbatch", 1000.0, 2000.0),
        (0, "wait", 2000.0, 3000.0),
        (0, "update", 3000.0, 3500.0),
        (0, "all-reduce", 1500.0, 2000.0),
        (0, "all-reduce", 2000.0, pytest.approx(2900.0)),
    ]
    assert told[6] == (1, "microbatch", 500.0, 1500.0) and told[8] == (1, "wait", 3000.0, 4000.0)
    assert step_timeline._slowest([[ticks] for ticks, _ in steps]) == [3.75]


@given(st.floats(1e-5, 1e-2), st.floats(1e-11, 1e-7))
def test_a_line_is_found_again(latency: float, per_byte: float) -> None:
    found = allreduce_time.line(allreduce_time.SIZES, [latency + size * per_byte for size in allreduce_time.SIZES])
    assert found.residual < 1e-6
    for size in allreduce_time.SIZES:
        assert found.seconds(size) == pytest.approx(latency + size * per_byte, rel=1e-6)
    assert found.seconds(1000, 7) == pytest.approx(7 * latency + 1000 * per_byte, rel=1e-4)


@given(st.lists(st.floats(1e-5, 1.0), min_size=len(allreduce_time.SIZES), max_size=len(allreduce_time.SIZES)))
def test_no_line_has_a_negative_number_and_none_is_nearer(seconds: list[float]) -> None:
    found = allreduce_time.line(allreduce_time.SIZES, seconds)
    assert found.latency >= 0 and found.per_byte >= 0

    def miss(latency: float, per_byte: float) -> float:
        terms = [(latency + b * per_byte) / t - 1 for b, t in zip(allreduce_time.SIZES, seconds, strict=True)]
        return math.sqrt(sum(each**2 for each in terms) / len(terms))

    assert found.residual == pytest.approx(miss(found.latency, found.per_byte))
    for up, along in itertools.product((0.9, 1.0, 1.1), repeat=2):
        assert found.residual <= miss(up * found.latency, along * found.per_byte) + 1e-9


def test_all_reduces_are_measured_and_modelled() -> None:
    found = data_parallel.allreduce(payload=0.5, messages=4)
    assert found.payload == 500_000 and len(found.measured) == len(found.sizes) == len(allreduce_time.SIZES)
    assert all(each.count >= 3 and each.lowest > 0 for each in (*found.measured, found.found))
    assert found.modelled == pytest.approx(4 * found.latency + 0.5 / found.bandwidth * 1e3)
    assert found.residual == pytest.approx(100 * found.line.residual)
    assert data_parallel.allreduce(payload=0.01, messages=64).payload == 10_000


def test_the_line_of_a_session_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = data_parallel.allreduce_seconds(1e6)
    monkeypatch.setattr(allreduce_time, "workers", None)
    both = data_parallel.allreduce_seconds(2e6), data_parallel.allreduce_seconds(1e6)
    assert both[1] == first and both[0] >= first
    line = allreduce_time._line(2)
    assert data_parallel.allreduce_seconds(0, messages=3) == pytest.approx(3 * line.latency)
    step = functools.partial(step_seconds, 4, 2, 1e-3, 1e-3, 1e-3)
    assert step(allreduce=first) - step() == pytest.approx(first)


# Ranks that are not alike.


@pytest.mark.parametrize(("ranks", "empty"), [(2, 1), (2, 0), (3, 2)])
def test_a_rank_without_a_valid_token(ranks: int, empty: int) -> None:
    found = data_parallel.empty_rank(ranks=ranks, empty=empty)
    right, clamped, library, by_hand = found.policies
    assert found.counts[empty] == 0 and all(n for rank, n in enumerate(found.counts) if rank != empty)
    assert right.relative_error <= found.tolerance and right.empty_loss == 0
    microbatches = draw_batches(ranks, 1, 4, 0)
    microbatches[empty][0][1].fill_(IGNORE)
    here = share(microbatches, 0)
    weights = [n and here.total / (ranks * n) for n in found.counts]
    expected = torch.tensor(weights, dtype=torch.float64) @ here.rows / here.total
    for each in (clamped, library):
        assert each.relative_error == pytest.approx(float((expected - here.right).norm() / here.right.norm()))
        assert each.norm_ratio == pytest.approx(float(expected.norm() / here.right.norm())) and not each.broken
    assert clamped.empty_loss == 0 and math.isnan(library.empty_loss) and math.isnan(by_hand.empty_loss)
    assert by_hand.broken == ranks and math.isnan(by_hand.relative_error) and not right.broken
    if ranks == 2:
        assert clamped.relative_error == pytest.approx(0.5)


@pytest.mark.parametrize(("ranks", "K", "missing"), [(2, 4, 1), (2, 4, 4), (3, 3, 2), (2, 2, 0)])
def test_join_ends_the_hang_and_not_the_wrong_weighting(ranks: int, K: int, missing: int) -> None:
    found = data_parallel.uneven(ranks=ranks, accumulation_steps=K, missing=missing)
    assert found.steps == (K,) * (ranks - 1) + (K - missing,) and not found.hangs
    faded = Fraction(ranks - 1, ranks)  # a rank that is through answers with zeros, for what was averaged before too
    weights = [
        float(faded ** (K - 1 - max(at, K - 1 - missing))) for rank, own in enumerate(found.steps) for at in range(own)
    ]
    assert found.fitted.tolist() == pytest.approx(weights)
    assert (found.relative_error <= found.tolerance) == (missing == 0)


def test_one_synchronisation_a_rank_needs_no_equal_numbers() -> None:
    found = data_parallel.uneven(way="last microbatch only", missing=3)
    assert found.relative_error <= found.tolerance and found.fitted.tolist() == pytest.approx([1.0] * 5)


@pytest.mark.parametrize(
    ("way", "missing"), [("every microbatch", 1), ("last microbatch only", 4), ("every microbatch", 0)]
)
def test_who_waits_for_ever_is_named(way: str, missing: int) -> None:
    found = data_parallel.uneven(way=way, missing=missing)
    if not missing:
        assert not found.hangs and found.relative_error <= found.tolerance
        return
    assert found.hangs.startswith("rank 0 gave no answer within 1 s") and math.isnan(found.relative_error)
    assert found.fitted.isnan().all()
    assert workers.run("labkit.workers:total", 2, value=1) == [2.0, 2.0]


def simulated(agree: bool, on: int, at: int, updates: int, seed: int) -> list[float]:
    """Two replicas by hand, one after the other: distance over the longest way, in per cent."""
    replicas = [Transformer(seed=seed, dtype=torch.float64) for _ in range(2)]
    start, scales, found = flat(replicas[0].parameters()), [1024.0, 1024.0], []
    for step in range(1, updates + 1):
        gradients: list[Tensor] = []
        for rank, model in enumerate(replicas):
            tokens, labels = batch(1_000_003 * (seed + 1) + 10 * (step - 1) + rank, 1, text="made")
            model.zero_grad()
            (scales[rank] * next_token_loss(model, tokens, labels, "mean")).backward()
            gradients.append(flat(gradient(model)))
        mean = (gradients[0] + gradients[1]) / 2
        for rank, model in enumerate(replicas):
            if step == at and (agree or rank == on):
                scales[rank] /= 2
                continue
            moved = flat(model.parameters()) - 0.1 * mean / scales[rank]
            torch.nn.utils.vector_to_parameters(moved, model.parameters())
        here = [flat(model.parameters()) for model in replicas]
        way = max(float((each - start).norm()) for each in here)
        found.append(100 * float((here[1] - here[0]).norm()) / way if way else 0.0)
    return found


@pytest.mark.parametrize(("agree", "on", "at"), [(False, 1, 4), (False, 0, 1), (True, 0, 3), (True, 1, 8)])
def test_replicas_drift_as_two_by_hand_do(agree: bool, on: int, at: int) -> None:
    found = data_parallel.overflow(agree=agree, overflow_on=on, overflow_at=at, updates=8, seed=1)
    assert found.distance.tolist() == pytest.approx(simulated(agree, on, at, 8, 1), abs=1e-6)
    assert found.distance[: at - 1].eq(0).all() and (found.distance[at - 1 :] > 1).all() == (not agree)
    assert found.scales.tolist() == [9.0 if agree or rank == on else 10.0 for rank in range(2)]


def test_an_overflow_of_three_ranks() -> None:
    found = data_parallel.overflow(ranks=3, overflow_on=2)
    assert found.scales.tolist() == [10.0, 10.0, 9.0] and found.last > 1
    assert data_parallel.overflow(ranks=3, overflow_on=2, agree=True).last == 0


def test_a_killed_rank_is_named_and_the_next_run_works() -> None:
    before = workers.pool(2).processes
    found = data_parallel.killed(victim=0)
    assert "rank 0 of 2 was killed by SIGKILL" in found.said and found.answers == (2.0, 2.0)
    assert found.noticed > 0 and found.again > 0 and not set(before) & set(workers.pool(2).processes)


@pytest.mark.parametrize(
    ("last_only", "gathered", "ranks", "K"),
    [*itertools.product((True, False), (True, False), (2,), (3,)), (True, False, 3, 2)],
)
def test_collectives_of_shards(last_only: bool, gathered: bool, ranks: int, K: int) -> None:
    found = data_parallel.fsdp(last_only=last_only, gathered=gathered, ranks=ranks, accumulation_steps=K)
    L = sharding.LAYERS
    assert found.reduce_scatters == (L if last_only else K * L)
    assert found.all_gathers == (L if gathered else 2 * K * L)
    assert found.relative_error <= found.tolerance < 1e-12 and found.parameters == L * 16 * 16
    assert found.shard == L * 16 * math.ceil(16 / ranks)


@pytest.mark.parametrize(
    ("run", "values", "message"),
    [
        (data_parallel.empty_rank, {"empty": 2}, "empty = 2 is no rank of 2, which are 0 … 1: try 1"),
        (data_parallel.uneven, {"accumulation_steps": 2, "missing": 3}, "try 2"),
        (data_parallel.uneven, {"ranks": 1, "missing": 4}, "try 3"),
        (data_parallel.overflow, {"overflow_on": 3}, "overflow on = 3 is no rank of 0 … 1: try 1"),
        (data_parallel.overflow, {"overflow_at": 20}, "is after the last of 12 steps: try 12"),
        (data_parallel.killed, {"victim": 2}, "victim = 2 is no rank of 0 … 1: try 1"),
    ],
)
def test_impossible_combinations(run: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message.replace("…", ".")):
        run(**values)


def test_ranks_leave_the_random_numbers_here_alone() -> None:
    before = torch.get_rng_state()
    for run in (data_parallel.recipes, data_parallel.fsdp, data_parallel.collectives):
        run()
    assert torch.equal(before, torch.get_rng_state())


def test_the_same_parameters_give_the_same_result() -> None:
    one, other = (data_parallel.recipes(recipe="mean-of-means", seed=7) for _ in range(2))
    assert torch.equal(one.fitted, other.fitted) and one.relative_error == other.relative_error


def test_ranks_are_apart_by_the_farthest() -> None:
    rows = [torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0]), torch.tensor([3.0, 3.0])]
    assert apart(rows, torch.tensor([0.0, 2.0])) == 2.5


SCRIPT = """
import json, os, dataclasses, torch
from labkit import data_parallel
torch.set_num_threads(1)
found = data_parallel.recipes(recipe="mean-of-means", seed=3), data_parallel.collectives(accumulation_steps=2)
if os.environ["RANK"] == "1":
    print(json.dumps([found[0].fitted.tolist(), found[0].relative_error, dataclasses.asdict(found[1])]))
"""


def test_torchrun_gives_the_same_result(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=100
    )
    fitted, error, collectives = json.loads(ran.stdout)
    here = data_parallel.recipes(recipe="mean-of-means", seed=3)
    assert fitted == here.fitted.tolist() and error == here.relative_error
    assert [each["all_reduces"] for each in collectives["patterns"]] == [2, 1, 2, 1, 0, 1]
    assert uneven_ranks.PATIENCE == 1.0
