"""Changes of a step on a clock whose times are declared: what is faster, in what, and what can be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.corpus import batch
from labkit.declare import parameters
from labkit.errors import LabError
from labkit.fit import distance, flat, gradient
from labkit.nets import IGNORE, Transformer, next_token_loss, valid_tokens
from labkit.throughput import compared, timing
from labkit.throughput.compared import by_length, decision, positions, resize, tokens, trim
from tests.strategies import forbidden
from tests.virtual import set_clock

CPU = torch.device("cpu")
A, P, STEP = 2.0**-10, 2.0**-18, 2.0**-11


def last(run: Any, **values: Any) -> Any:
    *_, found = run(**values)
    return found


def lengths(pair: Any) -> list[int]:
    return [sum(int(label) != IGNORE for label in row) for row in pair[1]]


def test_trimming_drops_padding_and_nothing_else() -> None:
    pair = batch(4, 8, 64)
    shorter = trim((torch.nn.functional.pad(pair[0], (0, 9)), torch.nn.functional.pad(pair[1], (0, 9), value=IGNORE)))
    assert shorter[0].shape[1] == max(lengths(pair)) and valid_tokens(shorter[1]) == valid_tokens(pair[1])
    assert torch.equal(shorter[0], pair[0][:, : shorter[0].shape[1]])


@pytest.mark.parametrize("length", [8, 20, 64, 100, 128])
def test_a_fixed_length_cuts_or_pads(length: int) -> None:
    pair = batch(4, 8, 64)
    sized = resize(pair, length)
    assert sized[0].shape == sized[1].shape == (8, length)
    assert lengths(sized) == [min(n, length) for n in lengths(pair)]
    assert torch.equal(sized[0][:, :20], pair[0][:, :length][:, :20])


def test_sorted_rows_are_the_same_rows() -> None:
    pair = batch(4, 32, 64)
    again = by_length(pair)
    assert lengths(again) == sorted(lengths(pair))
    assert sorted(map(tuple, again[0].tolist())) == sorted(map(tuple, pair[0].tolist()))


def test_sorting_leaves_the_gradient_as_it_is() -> None:
    pair, model = batch(4, 32, 64), Transformer(seed=0, length=64, dtype=torch.float64)
    found = []
    for rows in ([pair], [trim(each) for each in timing.cut(by_length(pair), 8, CPU)]):
        model.zero_grad()
        for x, y in rows:
            (next_token_loss(model, x, y) / valid_tokens(pair[1])).backward()
        found.append(flat(gradient(model)).clone())
    assert distance(*found).relative_error < 1e-12


@pytest.mark.parametrize("length", [8, 16, 64, 128])
@pytest.mark.parametrize("b", [1, 8, 32])
def test_three_throughputs_of_a_fixed_length_are_those_of_the_clock(
    monkeypatch: pytest.MonkeyPatch, length: int, b: int
) -> None:
    set_clock(monkeypatch, A, 0.0, STEP, per_position=P)
    found = last(tokens, length=length, microbatch=b, repeats=3)
    n = lengths(batch(0, 32, 64))
    was = sum(b * max(n[at : at + b]) for at in range(0, 32, b))
    assert found.positions == (was, 32 * length)
    assert found.valid == (sum(n) - 32, sum(min(each, length) for each in n) - 32)
    before, after = (32 / b * A + P * each + STEP for each in found.positions)
    assert found.seconds == pytest.approx((before, after)) and found.steps.median == pytest.approx(before / after)
    assert found.gain(found.positions).median == pytest.approx(before / after * 32 * length / was)
    assert found.gain(found.valid).median == pytest.approx(before / after * found.valid[1] / found.valid[0])
    assert found.gain((1, 1)) == found.steps and found.steps.count == 3


def test_a_faster_step_holds_fewer_valid_tokens_and_padding_looks_like_work(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, A, 0.0, STEP, per_position=P)
    cut, padded, ordered = last(tokens), last(tokens, length=128), last(tokens, change="sorted")
    assert cut.steps.median > 1 > cut.gain(cut.valid).median
    assert padded.gain(padded.positions).median > 1 > padded.gain(padded.valid).median
    assert ordered.valid[0] == ordered.valid[1] and ordered.gain(ordered.valid).median > 1
    assert ordered.positions[1] < ordered.positions[0]


def test_a_ratio_needs_both_steps_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch)
    looks = list(tokens(repeats=3))
    assert [each.steps.count for each in looks] == [0, 1, 1, 2, 2, 3]
    assert [each.progress for each in looks] == pytest.approx([(k + 1) / 6 for k in range(6)])


def test_positions_count_the_padding() -> None:
    assert positions(timing.cut(batch(0, 8, 16), 4, CPU)) == 128
    assert compared.valid(timing.cut(batch(0, 8, 16), 4, CPU)) == valid_tokens(batch(0, 8, 16)[1])


@pytest.mark.parametrize("runs", [3, 9])
def test_the_same_setting_twice_is_never_faster_on_a_steady_clock(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    clock = set_clock(monkeypatch)
    found = last(decision, before=4, after=32, same=True, runs=runs)
    assert found.microbatches == (4, 4) and set(clock.given) == {4}
    assert found.decision.verdict == "not faster" and found.decision.ratio == 1
    assert len(found.before) == len(found.after) == runs


def test_the_ratio_of_two_settings_is_that_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch, A, 2.0**-13, STEP)
    found = last(decision, before=4, after=32)
    steps = [64 // b * (A + 2.0**-13 * b) + STEP for b in (4, 32)]
    assert found.decision.ratio == pytest.approx(steps[0] / steps[1]) and found.decision.verdict == "faster"
    assert found.before == pytest.approx((64 * 31 / steps[0],) * 3)
    old, new = ([4] * 16) * compared.STEPS, ([32] * 2) * compared.STEPS
    assert clock.given == 2 * old + 2 * new + 2 * (old + new)  # in turn, and the first run of each warms up


@pytest.mark.parametrize(("margin", "verdict"), [(0.0, "faster"), (0.2, "not faster")])
def test_the_declared_margin_decides(monkeypatch: pytest.MonkeyPatch, margin: float, verdict: str) -> None:
    set_clock(monkeypatch, A, 2.0**-10, STEP)  # 4 → 8: ratio (16 + 64 + 1/2) / (8 + 64 + 1/2) = 1.11
    found = last(decision, before=4, after=8, margin=margin)
    assert found.decision.ratio == pytest.approx(80.5 / 72.5)
    assert found.decision.verdict == verdict and found.decision.margin == margin


def test_noise_forbids_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch)
    for done, found in enumerate(decision(before=4, after=8)):
        clock.factor = (1.0, 3.0, 3.0, 1.0, 1.0, 3.0)[done] if found else 1.0
    assert found.decision and found.decision.verdict == "cannot tell"


def test_nothing_is_decided_before_three_runs_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch)
    assert [each.decision is None for each in decision(runs=4)] == [True] * 5 + [False] * 3


@pytest.mark.parametrize(("run", "name"), [(tokens, "microbatch"), (decision, "before"), (decision, "after")])
def test_a_size_that_is_no_power_of_two_is_refused(monkeypatch: pytest.MonkeyPatch, run: Any, name: str) -> None:
    set_clock(monkeypatch)
    with pytest.raises(LabError, match=f"^{name} = 6 is no power of two: try 4$"):
        next(run(**{name: 6}))
    next(run(**{name: 4}))


@given(st.data(), st.sampled_from([tokens, decision]))
def test_values_outside_the_declaration_are_refused(data: st.DataObject, run: Any) -> None:
    name = data.draw(st.sampled_from(sorted(parameters(run))))
    with pytest.raises(LabError, match=name.replace("_", " ")):
        parameters(run)[name].check(data.draw(forbidden(parameters(run)[name])))
