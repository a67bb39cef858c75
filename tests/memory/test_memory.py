"""Bytes kept for backward, against bytes counted by hand and the allocator's own count."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from labkit import memory, rules
from labkit.corpus import Batch, batch, split
from labkit.errors import LabError
from labkit.fit import distance, flat, gradient
from labkit.memory import OPTIMIZERS, Sweep, allocated, cut, graphs, kept, parts, peak
from labkit.memory.graphs import LOOPS, classic, summed_loss
from labkit.memory.saved_tensors import Kept, Net, Timeline, rounding, size, watch
from labkit.nets import next_token_loss
from tests.strategies import settings_of

torch.set_num_threads(1)

QUICK = [parts, classic, peak]


def by_hand(b: int, T: int, itemsize: int, *, width: int = 32, heads: int = 2, blocks: int = 4, V: int = 128) -> int:
    """What backward needs of the labs' transformer and its loss, tensor by tensor."""
    stream, number = b * T * width, b * T
    attention = 3 * stream + heads * number + stream  # q, k and v; log-sum-exp of each query; what was mixed
    network = 4 * stream + 4 * stream  # before and after gelu
    normed = stream + 2 * number + stream  # input, mean and inverse deviation, output
    floats = blocks * (normed + attention + normed + network) + normed + b * (T - 1) * V + 1  # log-softmax; Σ weights
    targets = 8 * b * (T - 1) if b > 1 else 0  # labels[:, 1:] of one row is a view of the labels
    return itemsize * floats + targets


@pytest.mark.parametrize(("b", "T"), [(1, 8), (1, 32), (2, 8), (3, 33), (8, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_bytes_are_those_counted_by_hand(b: int, T: int, dtype: torch.dtype) -> None:
    timeline = watch(Net(0, T, dtype=dtype), [batch(0, b, T)], rules.token_mean)
    assert timeline == Timeline((by_hand(b, T, dtype.itemsize),), (0,))


def test_a_small_net_by_hand() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.ones(7, 3, dtype=torch.float64), torch.zeros(7, 2, dtype=torch.float64)
    with Kept(*net.parameters(), x, y) as counted:
        loss = F.mse_loss(net(x), y)
    assert counted.bytes == 8 * 7 * (5 + 2)  # the output of tanh, saved twice and counted once; the predictions
    with Kept(y) as everything:
        again = F.mse_loss(net(x), y)
    assert everything.bytes == counted.bytes + x.nbytes + sum(p.nbytes for p in net.parameters() if p.dim() > 1) - (
        net[0].weight.nbytes  # x needs no gradient, so the first weights are not saved
    )
    loss.backward()
    assert (counted.bytes, counted.peak) == (0, 8 * 7 * 7)
    del again
    assert everything.bytes == 0


# The allocator's own count.


def allocations(work: Callable[[], object]) -> list[int]:
    """Bytes allocated since the start, after each allocation and release of `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    events.sort(key=lambda event: event.start_ns())
    del result
    return list(itertools.accumulate(event.nbytes() for event in events))


def model_and_batch(b: int, checkpointing: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Net, Batch]:
    """A model whose gradients exist, so that none is allocated later."""
    model, pair = Net(0, 32, checkpointing, dtype), batch(0, b)
    rules.token_mean(model, [pair])
    return model, pair


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("b", [1, 2, 5])
def test_after_a_forward_the_allocator_holds_what_is_kept_and_the_loss(
    b: int, dtype: torch.dtype, checkpointing: bool
) -> None:
    model, pair = model_and_batch(b, checkpointing, dtype)
    with Kept(*model.parameters(), *pair) as counted:
        loss = next_token_loss(model, *pair)
    assert allocations(lambda: next_token_loss(model, *pair))[-1] == counted.bytes + loss.nbytes


@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_loop_adds_to_the_allocators_peak_is_what_it_adds_to_the_kept_bytes(loop: str) -> None:
    model, pair = model_and_batch(6)
    microbatches = split(*pair, 3)
    right, other = (watch(model, microbatches, each).peak for each in (rules.token_mean, LOOPS[loop]))
    rules.token_mean(model, microbatches)
    added = max(allocations(lambda: LOOPS[loop](model, microbatches))) - max(
        allocations(lambda: rules.token_mean(model, microbatches))
    )
    assert added == pytest.approx(other - right, abs=200)  # some losses, a few bytes each


def test_checkpointing_lowers_the_allocators_peak_too() -> None:
    peaks = {}
    for checkpointing in (False, True):
        model, pair = model_and_batch(4, checkpointing)
        counted = watch(model, [pair], rules.token_mean).peak
        rules.token_mean(model, [pair])
        peaks[checkpointing] = max(allocations(lambda m=model, p=pair: rules.token_mean(m, [p]))), counted  # type: ignore[misc]
    (plain, plain_kept), (cheap, cheap_kept) = peaks[False], peaks[True]
    assert cheap_kept < 0.3 * plain_kept and cheap < 0.4 * plain
    assert plain_kept < plain < 1.2 * plain_kept and cheap_kept < cheap < 1.6 * cheap_kept  # gradients on the way


# The counter.


def test_a_graph_that_is_dropped_or_retained_is_counted_as_long_as_it_lives() -> None:
    x = torch.ones(100, dtype=torch.float64, requires_grad=True)
    with Kept(x) as counted:
        y = (2 * x).exp().sum()
        assert counted.bytes == 800
        y.backward(retain_graph=True)
        assert counted.bytes == 800
        z = (3 * x).exp().sum()
        assert counted.bytes == counted.peak == 1600
    del y
    assert (counted.bytes, counted.peak) == (800, 1600)
    del z
    gc.collect()
    assert (counted.bytes, counted.peak) == (0, 1600)


def test_views_of_one_storage_count_once_and_until_the_last_is_released() -> None:
    x = torch.ones(100, requires_grad=True)
    with Kept(x) as counted:
        y = 2 * x
        one, other = y[:10].exp().sum(), (y * y).sum()
        assert counted.bytes == 400 + 40
        del other
        assert counted.bytes == 40
        del one
    assert counted.bytes == 0 and y is not None


def test_an_error_inside_leaves_no_hooks() -> None:
    x = torch.ones(10, requires_grad=True)
    with pytest.raises(ZeroDivisionError), Kept(x) as counted:
        _ = (2 * x).exp() / (1 // 0)
    y = (2 * x).exp()
    assert counted.bytes == 0 and y.requires_grad


def test_the_gradients_are_the_same_bits_under_the_counter() -> None:
    for checkpointing in (False, True):
        model, microbatches = Net(3, 32, checkpointing), split(*batch(3, 4), 2)
        watch(model, microbatches, rules.token_mean)
        found = flat(gradient(model))
        rules.rule("token-mean").run(model, microbatches)
        assert torch.equal(found, flat(gradient(model))) and found.any()


def test_the_time_of_a_microbatch_ends_at_another_ones_forward() -> None:
    model, microbatches = Net(0, 8), split(*batch(0, 6, 8), 2)
    one = by_hand(3, 8, 8)
    assert watch(model, microbatches, summed_loss) == Timeline((one, 2 * one), (one, 0))
    assert watch(model, microbatches, rules.token_mean) == Timeline((one, one), (0, 0))
    smaller = cut(batch(0, 4, 8), 3)
    assert watch(model, smaller, rules.token_mean).highest == (by_hand(3, 8, 8), by_hand(1, 8, 8))
    assert watch(model, microbatches, lambda *_: None) == Timeline((0,), (0,))
    by_word: Any = lambda model, microbatches: [model(tokens=tokens) for tokens, _ in microbatches]  # noqa: E731
    assert watch(model, microbatches, by_word).peak > 0


def test_watching_clears_old_gradients() -> None:
    model, pair = model_and_batch(1)
    watch(model, [pair], lambda *_: None)
    assert all(p.grad is None for p in model.parameters())


# Against the size of a microbatch.


def last(**values: Any) -> Sweep:
    *_, found = kept(**values)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_linear_in_b_and_independent_of_k(dtype: str, checkpointing: bool) -> None:
    final = last(dtype=dtype, checkpointing=checkpointing)
    assert [row.microbatch for row in final.rows] == [1, 2, 4, 8, 16]
    assert [row.accumulation_steps for row in final.rows] == [16, 8, 4, 2, 1]
    assert final.steps_matter == 0 and final.residual < 0.01
    assert abs(final.intercept) < 0.01 * final.slope
    assert final.rows[-1].window / final.rows[0].window == pytest.approx(16, rel=0.01)


def test_the_line_is_the_slope_that_is_counted_by_hand() -> None:
    final = last(sequences=12, length=16, dtype="float64")
    assert [(row.microbatch, row.accumulation_steps) for row in final.rows] == [
        (1, 12),
        (2, 6),
        (4, 3),
        (8, 2),
        (12, 1),
    ]
    assert [row.window for row in final.rows] == [by_hand(b, 16, 8) for b in (1, 2, 4, 8, 12)]
    assert final.slope == pytest.approx(by_hand(9, 16, 8) - by_hand(8, 16, 8), rel=1e-3)
    line = [final.slope * row.microbatch + final.intercept for row in final.rows]
    off = [abs(at - row.window) / row.window for at, row in zip(line, final.rows, strict=True)]
    assert final.residual == pytest.approx(max(off)) and 0 < final.residual < 0.01
    assert sum(at - row.window for at, row in zip(line, final.rows, strict=True)) == pytest.approx(0, abs=1e-3)


def test_twice_the_tokens_are_twice_the_bytes_and_half_the_type_is_half() -> None:
    assert last(length=64).slope / last(length=32).slope == pytest.approx(2, rel=0.01)
    assert last(dtype="float64").slope / last().slope == pytest.approx(2, rel=0.01)
    assert last(dtype="bfloat16").slope / last().slope == pytest.approx(0.5, rel=0.02)
    assert last(checkpointing=True).slope / last().slope == pytest.approx(0.27, abs=0.02)


def test_more_kept_by_a_window_than_by_one_microbatch_would_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "token_mean", summed_loss)
    final = last(sequences=4)
    assert final.steps_matter == pytest.approx(3, rel=0.01)
    assert [row.alone for row in final.rows] == [by_hand(b, 32, 4) for b in (1, 2, 4)]


def test_a_sweep_grows_row_by_row() -> None:
    found = list(kept(sequences=3))
    assert [len(each.rows) for each in found] == [1, 2, 3]
    assert [each.progress for each in found] == pytest.approx([1 / 3, 2 / 3, 1])
    assert math.isnan(found[0].slope) and found[1].residual < 1e-12


# Part by part.


@pytest.mark.parametrize(("optimizer", "numbers", "counts"), [
    ("SGD", 0, False), ("SGD with momentum", 1, False), ("Adam", 2, True), ("AdamW", 2, True),
])  # fmt: skip
def test_parts_by_hand(optimizer: str, numbers: int, counts: bool) -> None:
    step = parts(optimizer=optimizer)
    weights, tensors = 128 * 32 + 32 * 32 + 4 * 12 * 32**2, 2 + 4 * 4
    for each in (step.full, step.cut):
        assert each.parameters == each.gradients == 8 * weights
        assert each.state == numbers * 8 * weights + 4 * tensors * counts  # Adam counts its steps, once a tensor
        assert each.total == each.parameters + each.gradients + each.state + each.kept
    assert (step.full.kept, step.cut.kept) == (by_hand(8, 32, 8), by_hand(2, 32, 8))
    assert (step.full.name, step.cut.name) == ("full batch", "4 microbatches")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("b", [1, 2, 3, 8])
def test_microbatches_leave_the_full_batchs_gradient(b: int, checkpointing: bool) -> None:
    step = parts(microbatch=b, checkpointing=checkpointing, seed=5)
    assert step.equal and step.relative_error < 1e-14 < step.tolerance.value < 1e-11
    assert (b == 8) == (step.relative_error == 0)


def test_the_gradient_is_torchs_own() -> None:
    (tokens, labels), model = batch(2, 6), Net(2, 32)
    logits = model(tokens)[:, :-1].flatten(0, 1)
    F.cross_entropy(logits, labels[:, 1:].flatten()).backward()
    right = flat(gradient(model))
    for checkpointing in (False, True):
        other = Net(2, 32, checkpointing)
        watch(other, cut((tokens, labels), 2), rules.token_mean)
        found = distance(flat(gradient(other)), right).relative_error
        assert found <= rounding(2, 32, cut((tokens, labels), 2)).value


@pytest.mark.parametrize("word", ["mean-of-means", "sum-of-means", "last-microbatch-only"])
def test_a_wrong_gradient_is_beyond_the_tolerance(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "token_mean", rules.rule(word).loop)
    for found in (parts(), classic(microbatch=2)):
        assert not found.equal and found.relative_error > 0.01


def test_each_of_the_three_loops_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOOPS, "summed loss", rules.rule("sum-of-means").loop)
    comparison = classic()
    assert not comparison.equal and comparison.relative_error > 1
    monkeypatch.undo()
    made = graphs.Net
    monkeypatch.setattr(graphs, "Net", lambda seed, length, checkpointing=False: made(seed + checkpointing, length))
    assert classic().relative_error > 0.1


def test_size_counts_a_storage_once() -> None:
    x = torch.zeros(10, dtype=torch.float64)
    assert (size([]), size([x, x.view(2, 5), x[3:]]), size([x, x.clone()])) == (0, 80, 160)


# The classic mistake.


@pytest.mark.parametrize("K", [1, 2, 5, 8])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_keeps_what_is_predicted(loop: str, K: int) -> None:
    comparison = classic(loop=loop, accumulation_steps=K, length=8)
    one = by_hand(1, 8, 8)
    times = {"retained graph": min(K, 2), "logged loss": 1}.get(loop, K)
    if loop == "logged forward" and K == 1:
        times = 1  # its second forward runs when the first graph is released
    assert comparison.other.peak == times * one and comparison.ratio == times
    assert comparison.right == Timeline((one,) * K, (0,) * K)
    assert comparison.equal and comparison.relative_error <= comparison.tolerance.value < 1e-11


def test_the_summed_loss_saves_nothing() -> None:
    comparison = classic(microbatch=2, accumulation_steps=6)
    one = by_hand(2, 32, 8)
    assert comparison.other == Timeline(tuple(one * m for m in range(1, 7)), (*(one * m for m in range(1, 6)), 0))
    assert comparison.full == by_hand(12, 32, 8) == pytest.approx(comparison.other.peak, rel=1e-4)


def test_checkpointing_keeps_the_inputs_of_the_blocks_and_one_block_at_a_time() -> None:
    comparison = classic()
    whole, block = by_hand(1, 32, 8, blocks=4), by_hand(1, 32, 8, blocks=4) - by_hand(1, 32, 8, blocks=3)
    stream, end = 8 * 32 * 32, by_hand(1, 32, 8, blocks=0)
    assert comparison.checkpointed.peak == max(4 * stream + end, 3 * stream + block)  # one input belongs to both
    assert comparison.checkpointed.left == (0,) * 4 and comparison.checkpointed.peak < 0.3 * whole


def test_a_loop_that_lets_nothing_go_is_seen_at_the_end_of_each_microbatch() -> None:
    found = classic(loop="retained graph").other
    one = by_hand(1, 32, 8)
    assert found == Timeline((one, 2 * one, 2 * one, 2 * one), (one, one, one, 0))
    found = classic(loop="logged forward").other
    assert found == Timeline(tuple(one * m for m in (1, 2, 3, 4)), (one, 2 * one, 3 * one, 0))


# The device.


def test_without_a_gpu_there_is_no_allocator_to_ask() -> None:
    result = peak()
    if not torch.cuda.is_available():
        assert not result.allocator and all(math.isnan(each) for each in result.allocated)
        assert result.kept == (by_hand(8, 32, 4), by_hand(2, 32, 4))
    assert result.names == ("full batch", "4 microbatches")


def test_the_allocators_peak_is_counted_from_what_it_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def answer(word: str, value: int) -> Callable[[object], int]:
        return lambda _: calls.append(word) or value  # type: ignore[func-returns-value]

    for word, value in (("memory_allocated", 1000), ("reset_peak_memory_stats", 0), ("max_memory_allocated", 4500)):
        monkeypatch.setattr(torch.cuda, word, answer(word, value))
    ran: list[list[Batch]] = []
    model, pair = model_and_batch(1)
    monkeypatch.setattr(rules, "token_mean", lambda _, microbatches: ran.append(microbatches) or calls.append("run"))
    assert allocated(model, [pair], torch.device("cuda")) == 3500
    assert calls[-4:] == ["memory_allocated", "reset_peak_memory_stats", "run", "max_memory_allocated"]
    assert ran[-1] == [pair] and all(p.grad is None for p in model.parameters())


# What may be asked.


@pytest.mark.parametrize("run", QUICK)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_what_is_declared_runs_the_same_twice(run: Callable[..., Any], data: st.DataObject) -> None:
    values = {**data.draw(settings_of(run)), "length": data.draw(st.sampled_from([8, 9, 16]))}
    before = torch.get_rng_state()
    try:
        assert repr(run(**values)) == repr(run(**values))
    except LabError as refused:
        assert run(**{**values, "microbatch": int(str(refused).rpartition("try ")[2])})
    assert torch.equal(torch.get_rng_state(), before)


@given(settings_of(kept))
@settings(max_examples=4, deadline=None)
def test_any_sweep_ends_and_is_linear(values: dict[str, Any]) -> None:
    final = last(**{**values, "length": min(16, values.get("length", 16))})
    assert final.progress == 1 and final.steps_matter < 0.01 and final.residual < 0.02


def test_a_microbatch_larger_than_the_batch_is_refused_with_a_remedy() -> None:
    for run in (parts, peak):
        with pytest.raises(LabError, match="microbatch = 9 is more than the 8 sequences there are: try 8"):
            run(microbatch=9)
    assert [len(tokens) for tokens, _ in cut(batch(0, 8), 8)] == [8]


def test_every_optimizer_is_torchs_own() -> None:
    weight: Tensor = nn.Parameter(torch.ones(3))
    names = [type(make([weight])).__name__ for make in OPTIMIZERS.values()]
    assert names == ["SGD", "SGD", "Adam", "AdamW"] and memory.classic is classic
