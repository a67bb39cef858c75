"""What half precision loses, the scaler's search, and coupled ranks, against casts, exact counting and plain SGD."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from labkit.clipping import scaling
from labkit.clipping.overflow_across_ranks import Drift, coupled_step, half_a_step, owners, ranks
from labkit.clipping.scaling import Overflows, half_loss, next_scale, overflow, underflow
from labkit.corpus import batch, split
from labkit.errors import LabError
from labkit.fit import flat, gradient
from labkit.nets import Transformer, next_token_loss, valid_tokens
from tests.strategies import settings_of

torch.set_num_threads(1)


def exact_gradient(N: int, seed: int = 0) -> Tensor:
    tokens, labels = batch(seed, 8)
    model = Transformer(seed=seed, dtype=torch.float64)
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / N
    return flat(torch.autograd.grad(loss, list(model.parameters())))


# Underflow.


@pytest.mark.parametrize(("dtype", "smallest", "largest"), [("float16", -24, 16), ("bfloat16", -133, 128)])
def test_the_window_of_the_type(dtype: str, smallest: int, largest: int) -> None:
    entries = underflow(dtype=dtype)
    assert entries.smallest == smallest and entries.largest == pytest.approx(largest, abs=0.01)
    number = getattr(torch, dtype)
    assert torch.tensor(2.0**smallest, dtype=number) > 0 == torch.tensor(2.0 ** (smallest - 2)).to(number)
    assert torch.tensor(2.0**entries.largest, dtype=torch.float64).to(number).isfinite()


def test_the_sizes_are_those_of_the_exact_gradient() -> None:
    found, G = underflow(scale_exponent=3, tokens_exponent=20), exact_gradient(2**20) * 8
    entries = G[G != 0].abs()
    for size, share in zip(found.sizes.tolist(), found.share.tolist(), strict=True):
        inside = ((entries >= 2.0**size) & (entries < 2.0 ** (size + 1))).double().mean()
        assert share == pytest.approx(100 * float(inside), rel=1e-4, abs=1e-9)
    assert float(found.share.sum()) == pytest.approx(100, rel=1e-4)
    assert found.median == pytest.approx(float(entries.median().log2()))


def test_what_is_lost_is_what_is_zero_in_half_precision() -> None:
    found, G = underflow(), exact_gradient(2**22)
    model = Transformer()
    (half_loss(model, *batch(0, 8)) / 2**22).backward()
    lost = (flat(gradient(model)) == 0)[G != 0]
    assert found.zero == pytest.approx(100 * float(lost.double().mean())) and 20 < found.zero < 25
    assert float(found.lost.sum()) == pytest.approx(found.zero, rel=1e-4) and found.infinite == 0
    for name, p in model.named_parameters():
        if name.startswith("blocks") and p.grad is not None:  # from matmuls alone: whole numbers of the smallest one
            assert torch.equal((p.grad * 2.0**24).round(), p.grad * 2.0**24) and bool((p.grad == 0).any())
    assert float(found.lost[found.sizes > -18].sum()) < 0.01 * found.zero


def test_a_scale_in_the_middle_loses_nothing_and_one_too_large_overflows() -> None:
    shares = [(found.zero, found.infinite) for e in range(0, 25, 4) if (found := underflow(scale_exponent=e))]
    zeros = [zero for zero, _ in shares]
    assert zeros == sorted(zeros, reverse=True) and zeros[0] > 20 and zeros[-3:] == [0, 0, 0]
    assert all(infinite == 0 for _, infinite in shares)
    large = underflow(scale_exponent=24, tokens_exponent=8)
    assert large.infinite > 50 and math.isnan(large.relative_error)
    assert float(large.lost.sum()) == pytest.approx(large.infinite + large.zero, rel=1e-4)


@pytest.mark.parametrize("tokens_exponent", [8, 22])
def test_bfloat16_gains_nothing_from_a_scale(tokens_exponent: int) -> None:
    found = [underflow(dtype="bfloat16", scale_exponent=e, tokens_exponent=tokens_exponent) for e in (0, 8, 16, 24)]
    assert all(each.zero == each.infinite == 0 for each in found)
    assert len({each.relative_error for each in found}) == 1 and 1e-3 < found[0].relative_error < 2**-7
    best = underflow(scale_exponent=16, tokens_exponent=22)
    assert 4 < found[0].relative_error / best.relative_error < 16, "float16 has three bits more"


@pytest.mark.parametrize("e", [0, 5, 12])
def test_scale_and_n_matter_only_as_their_quotient(e: int) -> None:
    one, other = underflow(scale_exponent=e, tokens_exponent=12), underflow(scale_exponent=e + 3, tokens_exponent=15)
    assert one.zero == other.zero and torch.equal(one.share, other.share)


# The scaler.


@given(st.integers(0, 20), st.booleans(), st.integers(1, 6), st.lists(st.booleans(), max_size=30))
@settings(max_examples=50)
def test_the_next_scale_is_torchs(exponent: int, first: bool, interval: int, rest: list[bool]) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**exponent, growth_interval=interval)
    scale, good = 2.0**exponent, 0
    for bad in [first, *rest]:
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.tensor([math.inf if bad else 1.0])
        scaler.step(optimizer)
        scaler.update()
        after = next_scale(scale, bad, good, interval)
        good = 0 if bad or after != scale else good + 1
        scale = after
        assert scaler.get_scale() == scale


def last(run: Callable[..., Any] = overflow, **values: Any) -> Overflows:
    *_, found = run(**values)
    assert isinstance(found, Overflows)
    return found


@pytest.mark.parametrize("interval", [1, 3, 8])
def test_the_right_scale_follows_from_the_skipped_steps(interval: int) -> None:
    final = last(growth_interval=interval, scale_exponent=19, updates=30)
    scale, good = 2.0**19, 0
    for exponent, skipped in zip(final.scale.tolist(), final.skips.tolist(), strict=True):
        assert exponent == math.log2(scale)
        after = next_scale(scale, bool(skipped), good, interval)
        good = 0 if after != scale else good + 1
        scale = after
    assert final.right_skipped == int(final.skips.sum()) > 0 and final.done == final.updates == 30


def test_every_skipped_step_is_an_overflow_of_float16() -> None:
    final = last(scale_exponent=20, updates=20)
    model = Transformer(seed=0)
    for step in range(20):
        tokens, labels = zip(*split(*batch(1_000_003 + step, 4), 4), strict=True)
        N = sum(map(valid_tokens, labels))
        model.zero_grad()
        for each in zip(tokens, labels, strict=True):
            (half_loss(model, *each) / N * 2.0 ** float(final.scale[step])).backward()
        finite = bool(flat(gradient(model)).isfinite().all())
        assert bool(final.skips[step]) != finite
        with torch.no_grad():
            for p in model.parameters():
                if finite and p.grad is not None:
                    p -= 0.3 * p.grad / 2.0 ** float(final.scale[step])


@pytest.mark.parametrize("K", [2, 4, 8])
def test_counted_in_microbatches_it_grows_k_times_as_fast_and_skips_more(K: int) -> None:
    final = last(accumulation_steps=K, growth_interval=8, scale_exponent=4, updates=40)
    quick = (final.scale_per_microbatch - 4)[: 80 // K]
    assert quick.tolist() == [K * step // 8 for step in range(len(quick))], "before any overflow: a doubling in 8"
    assert final.scale[:40].tolist() == [4 + step // 8 for step in range(40)]
    far = last(accumulation_steps=K, updates=60)
    assert far.wrong_skipped > (2 if K > 2 else 1) * far.right_skipped


def test_one_microbatch_makes_no_difference() -> None:
    final = last(accumulation_steps=1, updates=20, scale_exponent=20, growth_interval=2)
    assert torch.equal(final.scale, final.scale_per_microbatch) and final.right_skipped == final.wrong_skipped > 0


def test_a_window_that_overflows_everywhere_halves_the_scale_k_times() -> None:
    final = last(updates=20, scale_exponent=24)
    assert final.scale[:2].tolist() == [24, 23] and final.scale_per_microbatch[:2].tolist() == [24, 20]


def test_results_come_one_by_one_and_the_answer_is_counted() -> None:
    results = list(overflow(updates=20))
    assert [each.progress for each in results] == pytest.approx([n / 20 for n in range(1, 21)])
    assert results[3].scale[4:].isnan().all() and not results[3].scale[:4].isnan().any()
    assert [each.wrong_skipped for each in results] == results[-1].skips_per_microbatch.cumsum(0).tolist()
    assert "half_training" not in vars(results[0]) and scaling.Window


# Coupled ranks.


def test_ranks_that_agree_are_plain_sgd_that_leaves_one_step_out() -> None:
    model, twin = Transformer(dtype=torch.float64), Transformer(dtype=torch.float64)
    group = owners(model, 2.0**10)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(6):
        microbatches = split(*batch(step, 4), 2)
        coupled_step(model, microbatches, group, agree=True, spoiled=group[step % 2] if step == 2 else None)
        if step == 2:
            continue
        optimizer.zero_grad()
        tokens, labels = batch(step, 4)
        (next_token_loss(twin, tokens, labels) / valid_tokens(labels)).backward()
        optimizer.step()
    off = flat(model.parameters()) - flat(twin.parameters())
    assert float(off.norm()) < 1e-12 and [rank.scaler.get_scale() for rank in group] == [512, 512]


def test_without_agreement_one_rank_steps_alone() -> None:
    model = Transformer(dtype=torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    half_a_step(model, split(*batch(0, 4), 2))
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, False, True, True, True]


@pytest.mark.parametrize(("on", "factor"), [("first", 2.0), ("last", 0.5)])
@pytest.mark.parametrize("at", [1, 5, 20])
def test_the_distance_begins_with_the_overflow_and_the_scales_stay_apart(on: str, factor: float, at: int) -> None:
    drift = ranks(overflow_on=on, overflow_at=at)
    assert drift.distance[: at - 1].tolist() == [0] * (at - 1) and (drift.distance[at - 1 :] > 0).all()
    skipped, stepped = (drift.first, drift.last) if on == "first" else (drift.last, drift.first)
    assert float(skipped[at - 1]) == 0 < float(stepped[at - 1])
    assert drift.factor == factor
    mine, other = (drift.scale_first, drift.scale_last) if on == "first" else (drift.scale_last, drift.scale_first)
    assert mine.tolist() == [16.0] * (at - 1) + [15.0] * (21 - at) and other.tolist() == [16.0] * 20
    assert drift.distance.tolist() == pytest.approx(((drift.first**2 + drift.last**2) ** 0.5).tolist())


def test_after_an_overflow_the_first_ranks_gradient_is_twice_too_large() -> None:
    model = Transformer(dtype=torch.float64)
    group, microbatches = owners(model, 2.0**10), split(*batch(0, 4), 2)
    coupled_step(model, microbatches, group, agree=False, spoiled=group[0])
    right = Transformer(dtype=torch.float64)
    right.load_state_dict(model.state_dict())
    coupled_step(model, microbatches, group, agree=False)
    tokens, labels = batch(0, 4)
    (next_token_loss(right, tokens, labels) / valid_tokens(labels)).backward()
    ratios = [float(g.norm() / r.norm()) for g, r in zip(gradient(model), gradient(right), strict=True)]
    assert ratios == pytest.approx([2, 2, 2, 1, 1, 1])


def test_the_distance_by_hand_at_the_step_of_the_overflow() -> None:
    drift = ranks(overflow_at=1, updates=20)
    model = Transformer(dtype=torch.float64)
    tokens, labels = batch(1_000_003 + 1, 2)
    (next_token_loss(model, tokens, labels) / valid_tokens(labels)).backward()
    step = 0.1 * float(flat(gradient(model)[3:]).norm())
    assert float(drift.distance[0]) == pytest.approx(100 * step / way(1), rel=1e-9)


def way(skipped: int) -> float:
    """How far 20 steps of plain SGD without one of them go."""
    model = Transformer(dtype=torch.float64)
    start, optimizer = flat(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 21):
        if step == skipped:
            continue
        tokens, labels = batch(1_000_003 + step, 2)
        optimizer.zero_grad()
        (next_token_loss(model, tokens, labels) / valid_tokens(labels)).backward()
        optimizer.step()
    return float((flat(model.parameters()) - start).norm())


def test_agreement_keeps_the_ranks_together() -> None:
    drift = ranks(agree=True, overflow_on="last")
    assert drift.distance.abs().max() == 0 and drift.factor == 1
    assert torch.equal(drift.scale_first, drift.scale_last) and float(drift.scale_last[-1]) == 15


def test_an_overflow_after_the_end_is_refused_with_a_remedy() -> None:
    with pytest.raises(LabError, match="overflow at = 21 is after the last of 20 steps: try 20"):
        ranks(overflow_at=21)
    assert isinstance(ranks(overflow_at=20), Drift)


@pytest.mark.parametrize("run", [underflow, ranks])
@given(data=st.data())
@settings(max_examples=8)
def test_what_is_declared_runs_the_same_twice(run: Any, data: st.DataObject) -> None:
    values, before = data.draw(settings_of(run)), torch.get_rng_state()
    try:
        assert repr(run(**values)) == repr(run(**values))
    except LabError as refused:
        assert run(**{**values, "overflow_at": int(str(refused).rpartition("try ")[2])})
    assert torch.equal(torch.get_rng_state(), before)


def test_a_training_runs_the_same_twice() -> None:
    assert repr(last(updates=20, seed=3)) == repr(last(updates=20, seed=3))
