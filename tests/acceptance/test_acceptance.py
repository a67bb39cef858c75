"""The acceptance test: each gate against an independent computation, on clocks that are made."""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import labkit.__main__ as command
from labkit import LabError
from labkit.acceptance import Gate, Record, accept
from labkit.acceptance.candidates import IDEAS, Clock, Pair, acceptance, cut, network, traces
from labkit.acceptance.record import GATES
from labkit.acceptance.side import Trace
from labkit.acceptance.state import verdict
from labkit.acceptance.traces import bands, nudge
from labkit.decision import decide
from labkit.declare import parameters
from labkit.tolerance import gamma
from tests.lab_in_browser import ROOT
from tests.strategies import forbidden

torch.set_num_threads(1)
EXAMPLES = ROOT / "examples" / "acceptance"


def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Written out anew: the summed loss of next tokens."""
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def whole(microbatches: Any) -> tuple[Tensor, Tensor]:
    tokens, labels = zip(*microbatches, strict=True)
    return torch.cat(tokens), torch.cat(labels)


def valid(labels: Tensor) -> int:
    return int((labels[:, 1:] != -100).sum())


class Side:
    """A plain float64 side: a token mean with SGD, with a hook for whatever is to be wrong."""

    def __init__(self, spoil: Callable[..., None] = lambda *_: None, time: float = 1.0, **changes: Any) -> None:
        self.spoil, self.time, self.changes, self.clock = spoil, time, changes, Clock()

    def __call__(self) -> Any:
        model = self.changes.get("model", lambda: network(0, torch.float64))()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.changes.get("lr", 0.3), momentum=0.5)
        calls = itertools.count()

        def step(microbatches: Any) -> None:
            N = sum(valid(labels) for _, labels in microbatches)
            for tokens, labels in microbatches:
                (loss(model, tokens, labels) / N).backward()
            self.clock.tick(self.time)
            if self.spoil(model, optimizer, next(calls)) != "skip":
                optimizer.step()
            optimizer.zero_grad()

        return model, step


MICROBATCHES = cut(1, 2, 0)
FAST = {"seconds": 0.0, "windows": 4}


def judged(base: Side, candidate: Side, microbatches: Any = MICROBATCHES, **options: Any) -> Record:
    candidate.clock = base.clock
    given = {"invariant": "systems", "clock": base.clock, **FAST, **options}
    return accept(base, candidate, microbatches, Pair.loss_sum, **given)


@functools.cache
def tried(candidate: str = "twice the microbatch", **values: Any) -> Record:
    """The lab's experiment, each setting once."""
    return acceptance(candidate=candidate, **values)


def outcomes(record: Record) -> list[str]:
    return [gate.outcome for gate in record.gates]


# The eight candidates of the lab.

EXPECTED = {
    "twice the microbatch": ("adopt", ["passed"] * 4),
    "mean of means": ("reject", ["passed", "failed", "not run", "not run"]),
    "float32 model": ("cannot tell", ["passed", "cannot tell", "cannot tell", "passed"]),
    "bfloat16 sum": ("reject", ["passed", "failed", "not run", "not run"]),
    "dropped tail": ("reject", ["failed", "not run", "not run", "not run"]),
    "new trainer": ("reject", ["passed", "passed", "failed", "not run"]),
    "fused kernel": ("reject", ["passed", "passed", "passed", "failed"]),
    "larger batch": ("reject", ["failed", "not run", "not run", "not run"]),
}


@pytest.mark.parametrize("candidate", IDEAS)
def test_each_candidate_meets_its_own_gate(candidate: str) -> None:
    record = tried(candidate=candidate)
    assert (record.verdict, outcomes(record)) == EXPECTED[candidate]
    assert [gate.name for gate in record.gates] == list(GATES)


@pytest.mark.parametrize("candidate", IDEAS)
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_large_batch_is_never_adopted(candidate: str, noise: float) -> None:
    record = tried(candidate=candidate, invariant="large-batch", noise=noise)
    assert record.verdict != "adopt" and record.gates[0].outcome == "cannot tell"
    assert "quality run" in record.gates[0].said
    if record.verdict == "cannot tell":
        assert any("several seeds" in each for each in record.not_proved)


def test_nothing_is_proved_beyond_what_was_seen() -> None:
    record = tried(updates=3)
    said = " ".join(record.not_proved)
    assert "training converges" in said
    for words in ("another physical microbatch", "quality run over several seeds", "3 updates", "faster elsewhere"):
        assert words in said
    assert "faster elsewhere" not in " ".join(tried(candidate="mean of means").not_proved)


def test_a_noisy_clock_cannot_tell_and_a_margin_decides() -> None:
    assert tried(noise=0.3).verdict == "cannot tell"
    assert tried(noise=0.01, margin=0.3).verdict == "reject", "1.25 times is below 1.3"
    assert tried(noise=0, margin=0.24).verdict == "adopt" and tried(noise=0, margin=0.26).verdict == "reject"


# Gate by gate.


def test_numbers_of_equality_are_those_of_a_plain_loop() -> None:
    pair = Pair("mean of means")
    record = tried(candidate="mean of means")
    model = network(0, torch.float64)
    tokens, labels = whole(pair.microbatches)
    right = torch.autograd.grad(loss(model, tokens, labels) / valid(labels), list(model.parameters()))
    means = [
        torch.autograd.grad(loss(model, t, y) / valid(y) / len(pair.microbatches), list(model.parameters()))
        for t, y in pair.microbatches
    ]
    flat = torch.cat([p.flatten() for p in right])
    wrong = sum(torch.cat([p.flatten() for p in each]) for each in means)
    assert record.gradient_difference == pytest.approx(float((wrong - flat).norm() / flat.norm()), rel=1e-9)
    assert record.delta_difference == pytest.approx(record.gradient_difference, rel=1e-9), "SGD moves by the gradient"
    assert "mean-of-means" in record.gates[1].said and record.candidate.faults == ("mean-of-means",)


def test_the_tolerance_is_derived_from_what_is_added() -> None:
    record = tried()
    pair = Pair("twice the microbatch")
    model = network(0, torch.float64)
    rows = [torch.autograd.grad(loss(model, t, y), list(model.parameters())) for t, y in pair.microbatches]
    norms = [math.hypot(*(float(p.norm()) for p in row)) for row in rows]
    total = math.hypot(*(float(sum(parts).norm()) for parts in zip(*rows, strict=True)))
    # 60 valid tokens and 3 microbatches are added; fan-ins 8, 8, 1, 8, 8 of embedding, hidden layer, its bias, head
    fan_in = sum(p.shape[-1] for p in model.parameters())
    expected = 2 * gamma(60 + 3 + 2 * fan_in, torch.float64) * sum(norms) / total
    assert record.gradient_tolerance == pytest.approx(expected, rel=1e-9, abs=0) and "n = " in record.derivation
    assert 0 <= record.gradient_difference < record.gradient_tolerance < 1e-12


@pytest.mark.parametrize(("factor", "outcome"), [(1e-15, "passed"), (1e-11, "failed"), (1e-3, "failed")])
def test_a_gradient_that_is_off_by_more_than_rounding_is_another_update(factor: float, outcome: str) -> None:
    def spoil(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= 1 + factor

    record = judged(Side(), Side(spoil, time=0.5))
    assert record.gates[1].outcome == outcome
    if factor == 1e-11:
        assert record.gradient_difference == pytest.approx(factor, rel=1e-2)
        assert "this is another update" in record.gates[1].said and record.verdict == "reject"


def test_equal_gradients_and_another_move_is_another_update() -> None:
    record = judged(Side(), Side(lr=0.3003, time=0.5))
    assert record.gradient_difference == 0 and record.delta_difference == pytest.approx(1e-3, rel=1e-6)
    assert outcomes(record)[1:] == ["failed", "not run", "not run"]


def test_another_gradient_is_another_update_though_the_move_is_the_same() -> None:
    def grown(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= 1 + 1e-11

    record = judged(Side(), Side(grown, lr=0.3 / (1 + 1e-11), time=0.5))
    assert record.delta_difference <= record.delta_tolerance and record.gates[1].outcome == "failed"


def test_a_clip_is_looked_at_from_before() -> None:
    def clip(model: nn.Module, *_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    record = judged(Side(clip), Side(clip, time=0.5), candidate_microbatches=cut(1, 4, 0))
    assert record.verdict == "adopt"
    record = judged(Side(), Side(clip, time=0.5))
    assert record.gradient_difference == 0 and record.delta_difference > 0.9, "only the move shows it"
    assert record.verdict == "reject"


def test_what_rounding_explains_of_a_move() -> None:
    base, bound = Side(), 0.0
    record = judged(base, Side(time=0.5))
    model = network(0, torch.float64)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    tokens, labels = whole(MICROBATCHES)
    gradient = torch.autograd.grad(loss(model, tokens, labels) / valid(labels), list(model.parameters()))
    move = 0.3 * math.hypot(*(float(p.norm()) for p in gradient))
    bound = record.gradient_tolerance + 4 * 2.0**-53 * float(weights.norm()) / move
    assert record.delta_tolerance == pytest.approx(bound, rel=1e-6, abs=0), "SGD passes a relative error on as it is"


# The first gate.


def test_other_examples_are_seen_though_they_are_as_many() -> None:
    other = [(tokens.flip(0) + (tokens > 0), labels.where(labels < 0, labels + 1)) for tokens, labels in MICROBATCHES]
    record = judged(Side(), Side(), candidate_microbatches=other)
    assert record.verdict == "reject" and "other examples" in record.gates[0].said
    shuffled = list(reversed(MICROBATCHES))
    assert judged(Side(), Side(time=0.5), candidate_microbatches=shuffled).verdict == "adopt"


def test_a_step_for_each_microbatch_is_another_cadence() -> None:
    def eager(model: nn.Module, optimizer: Any, _: int) -> None:
        optimizer.step()

    record = judged(Side(), Side(eager))
    assert "the optimizer steps twice where the base's steps once" in record.gates[0].said


def test_a_cut_of_the_base_is_looked_at_too() -> None:
    record = judged(Side(), Side(time=0.5), candidate_microbatches=MICROBATCHES[:-1])
    assert record.base.tokens == 60 and record.candidate.tokens == 51
    assert "holds 51 valid tokens, the base's 60" in record.gates[0].said
    assert "holds 103 valid tokens, the base's 60" in tried(candidate="larger batch").gates[0].said


# What is in the way of a check.


def test_random_layers_are_named_and_leave_it_open() -> None:
    def model() -> nn.Module:
        model = network(0, torch.float64)
        model.insert(1, nn.Dropout(0.5))  # type: ignore[operator]
        return model

    record = judged(Side(model=model), Side(model=model, time=0.5))
    assert record.verdict == "cannot tell" and record.base.random_layers == ("1 (Dropout)",)
    assert "in the base 1 (Dropout) draw random numbers: turn them off" in record.gates[1].said
    assert outcomes(record) == ["passed", "cannot tell", "cannot tell", "passed"]


def test_noise_that_no_layer_explains_leaves_it_open() -> None:
    def noisy(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad += 1e-3 * torch.rand_like(p)

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(0, torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y + 0.1 * getattr(torch, "rand" + "n_like")(y)

    record = judged(Side(model=Noisy), Side(model=Noisy))
    assert "the base is random" in record.gates[1].said and record.verdict != "adopt"


def test_a_layer_that_looks_at_the_batch_is_named_where_it_makes_another_update() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(0, torch.float64)
            self.norm = nn.BatchNorm1d(16, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.inner(x))
            return y

    record = judged(Side(model=Normed), Side(model=Normed), candidate_microbatches=cut(1, 4, 0))
    assert record.verdict == "reject" and "norm (BatchNorm1d) looks at the batch" in record.gates[1].said
    assert judged(Side(model=Normed), Side(model=Normed, time=0.5)).verdict == "adopt", "the same cut is the same step"


def test_a_base_that_is_wrong_itself_comes_first() -> None:
    pair = Pair("mean of means")
    options = {"invariant": "systems", "clock": pair.clock, **FAST}
    record = accept(pair.candidate, pair.base, pair.microbatches, pair.loss_sum, **options)
    assert record.verdict == "cannot tell" and "the base itself is wrong, mean-of-means" in record.gates[1].said
    assert outcomes(record) == ["passed", "cannot tell", "not run", "not run"]
    record = accept(pair.candidate, pair.candidate, pair.microbatches, pair.loss_sum, **options)
    assert record.verdict == "reject"


def test_a_precision_without_a_bound_is_no_test() -> None:
    model = lambda: network(0, torch.bfloat16)  # noqa: E731
    record = judged(Side(model=model), Side(model=model, time=0.5))
    assert "build both sides in float64" in record.gates[1].said and record.verdict == "cannot tell"
    assert record.gradient_tolerance > 0.01 and record.gradient_difference == 0


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_right_candidate_passes_whatever_the_optimizer(optimizer: str, dtype: torch.dtype) -> None:
    def build() -> Any:
        model = network(1, dtype)
        kind = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)

        def step(microbatches: Any) -> None:
            N = sum(valid(labels) for _, labels in microbatches)
            for tokens, labels in microbatches:
                (loss(model, tokens, labels) / N).backward()
            kind.step()
            kind.zero_grad()

        return model, step

    options = {"invariant": "systems", "candidate_microbatches": cut(1, 4, 0), "seconds": 0.0, "windows": 6}
    record = accept(build, build, MICROBATCHES, Pair.loss_sum, clock=itertools.count().__next__, **options)
    assert outcomes(record)[:3] == ["passed"] * 3, record


# The third gate.


def test_traces_are_those_of_a_plain_training() -> None:
    record = judged(Side(), Side(time=0.5))
    model = network(0, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    tokens, labels = whole(MICROBATCHES)
    losses, norms = [], []
    for _ in range(5):
        optimizer.zero_grad()
        mean = loss(model, tokens, labels) / valid(labels)
        mean.backward()
        losses.append(mean.item())
        norms.append(math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)))
        optimizer.step()
    assert record.base.losses == pytest.approx(losses, rel=1e-12)
    assert record.base.norms == pytest.approx(norms, rel=1e-12)
    assert record.base.losses == record.candidate.losses and record.loss_difference == 0


def test_a_fault_that_begins_later_fails_in_the_traces() -> None:
    def late(model: nn.Module, _: Any, call: int) -> None:
        for p in model.parameters():
            if call == 2:
                assert p.grad is not None
                p.grad *= 1.001

    record = judged(Side(), Side(late))
    assert outcomes(record) == ["passed", "passed", "failed", "not run"]
    assert "after update 3 the losses differ" in record.gates[2].said
    assert record.candidate.losses[:3] == record.base.losses[:3]


def test_more_skipped_updates_fail_and_fewer_do_not() -> None:
    skip = Side(lambda model, optimizer, call: "skip" if call == 3 else None)  # type: ignore[arg-type,return-value]
    record = judged(Side(), skip)
    assert record.candidate.skipped == 1 and record.base.skipped == 0
    assert record.gates[2].outcome == "failed" and "skipped one of 4 updates, the base 0" in record.gates[2].said
    record = judged(skip, Side())
    assert "skipped" not in record.gates[2].said.partition(";")[0] and record.gates[2].outcome == "failed", (
        "they differ"
    )


def test_a_loss_that_is_not_finite_fails() -> None:
    def burst(model: nn.Module, _: Any, call: int) -> None:
        if call == 3:
            with torch.no_grad():
                next(model.parameters()).fill_(math.nan)

    record = judged(Side(), Side(burst))
    assert record.gates[2].outcome == "failed" and "not finite" in record.gates[2].said
    json.loads(record.to_json(), parse_constant=pytest.fail)


def test_where_rounding_grows_to_what_training_does_nothing_is_told() -> None:
    pair = Pair("twice the microbatch", rate=10.0, dtype=torch.float32)
    options = {"invariant": "systems", "clock": pair.clock, "seconds": 0.0, "windows": 12}
    cuts = {"candidate_microbatches": pair.candidate_microbatches}
    record = accept(pair.base, pair.candidate, pair.microbatches, pair.loss_sum, **cuts, **options)
    assert record.gates[2].outcome == "cannot tell" and "take fewer windows" in record.gates[2].said
    record = accept(pair.base, pair.candidate, pair.microbatches, pair.loss_sum, **cuts, **{**options, "windows": 3})
    assert record.gates[2].outcome == "passed", "the remedy works"


def test_a_band_is_the_largest_distance_so_far_and_the_rounding_of_the_number() -> None:
    trace = lambda *losses: Trace(losses, losses, torch.zeros(1), 0)  # noqa: E731
    found = bands(trace(4.0, 3.0, 2.0, 1.0), [trace(4.0, 3.5, 2.0, 1.0), trace(4.0, 3.0, 2.25, 1.0)], 0.125)
    assert found.losses == (0.5, 0.5 + 0.375, 0.5 + 0.25, 0.5 + 0.125) and found.norms == found.losses


def test_a_nudge_moves_every_microbatch_by_its_share_and_leaves_no_hook() -> None:
    model, gradients = network(0, torch.float64), []
    for inside in (False, True):
        with nudge(0.125, 5)(model) if inside else nudge(0.0, 0)(model):
            loss(model, *MICROBATCHES[0]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    right, moved = gradients
    ratio = (moved / right)[right != 0]
    assert (
        set(ratio.mul(2**20).round().div(2**20).tolist()) == {0.875, 1.125}
        and 0.4 < float((ratio > 1).double().mean()) < 0.6
    )
    assert (moved[right == 0] == 0).all()
    loss(model, *MICROBATCHES[0]).backward()
    assert torch.equal(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), right)


def test_a_step_that_cannot_be_moved_has_no_band() -> None:
    def build() -> Any:
        model = network(0, torch.float64)

        def step(microbatches: Any) -> None:
            copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
            names = [name for name, _ in model.named_parameters()]
            tokens, labels = whole(microbatches)
            called = lambda x: torch.func.functional_call(model, dict(zip(names, copies, strict=True)), (x,))  # noqa: E731
            mean = loss(called, tokens, labels) / valid(labels)  # type: ignore[arg-type]
            with torch.no_grad():
                for p, g in zip(model.parameters(), torch.autograd.grad(mean, copies), strict=True):
                    p -= 0.1 * g

        return model, step

    record = accept(
        build, build, MICROBATCHES, Pair.loss_sum, invariant="systems", clock=itertools.count().__next__, **FAST
    )
    assert record.verdict != "adopt" and record.loss_band == ()


# The fourth gate.


def test_throughput_is_tokens_over_time_and_both_sides_take_turns() -> None:
    order: list[str] = []
    sides = {name: Side(lambda *_, name=name: order.append(name), time=time) for name, time in (("A", 2.0), ("B", 0.5))}
    record = judged(sides["A"], sides["B"], runs=4, seconds=0.0)
    assert "".join(order).endswith("ABAB" + "ABABABAB"), "two to get warm, then the runs"
    assert record.base.seconds == (2.0,) * 4 and record.base.throughputs == (30.0,) * 4
    assert record.candidate.throughputs == (120.0,) * 4 and (record.ratio, record.updates_per_run) == (4.0, 1)
    assert record.verdict == "adopt" and record.runs == 4


def test_a_run_is_as_long_as_the_faster_side_needs_for_its_seconds() -> None:
    record = judged(Side(time=2.0), Side(time=0.5), seconds=1.6)
    assert record.updates_per_run == 4 and record.base.seconds == (8.0,) * 3
    assert record.base.throughputs == (30.0,) * 3


def test_the_decision_is_that_of_decide() -> None:
    record = tried(noise=0.1, runs=5, margin=0.1)
    found = decide(record.base.throughputs, record.candidate.throughputs, 0.1)
    assert (record.ratio, record.low, record.high, record.margin) == (found.ratio, found.low, found.high, 0.1)
    assert found.explain() == record.gates[3].said
    assert record.ratio == statistics.median(record.candidate.throughputs) / statistics.median(record.base.throughputs)


def test_a_wrong_step_is_not_timed() -> None:
    def clock() -> float:
        raise AssertionError("no clock is read before the other gates are passed")

    pair = Pair("mean of means")
    record = accept(
        pair.base, pair.candidate, pair.microbatches, pair.loss_sum, invariant="systems", clock=clock, windows=2
    )
    assert record.verdict == "reject" and record.base.throughputs == () and math.isnan(record.ratio)


def test_a_clock_that_stands_still_is_refused() -> None:
    with pytest.raises(LabError, match="try one that advances"):
        judged(Side(time=0.0), Side(time=0.0))


# The verdict and the record.


@pytest.mark.parametrize("outcomes", list(itertools.product(["passed", "failed", "cannot tell"], repeat=4)))
def test_one_failure_rejects_and_one_doubt_leaves_it_open(outcomes: tuple[str, ...]) -> None:
    word = verdict([Gate(name, outcome, "") for name, outcome in zip(GATES, outcomes, strict=True)])
    expected = "reject" if "failed" in outcomes else "cannot tell" if "cannot tell" in outcomes else "adopt"
    assert word == expected


@pytest.mark.parametrize("candidate", IDEAS)
def test_a_record_comes_back_from_json(candidate: str) -> None:
    record = tried(candidate=candidate)
    text = record.to_json()
    json.loads(text, parse_constant=pytest.fail)
    again = Record.from_json(text)
    assert again.to_json() == text and again.explain() == record.explain()
    assert again.passed == record.passed and again.base.tokens == record.base.tokens


def test_a_record_holds_what_is_needed_to_repeat_it() -> None:
    record = tried(updates=3, runs=4, margin=0.05)
    side = record.candidate
    assert (record.base.microbatches, side.microbatches) == ((2, 2, 1), (4, 1))
    assert (record.base.accumulation, side.accumulation) == (3, 2)
    assert side.counts == (51, 9) and side.denominator == pytest.approx(60) and side.dtype == "float64"
    assert side.parameters == sum(p.numel() for p in network(0, torch.float64).parameters())
    assert (record.windows, record.runs, record.margin, record.replicas, record.threads) == (3, 4, 0.05, 1, 1)
    assert len(record.seeds) == 4 and record.versions["torch"] == torch.__version__ and record.machine
    assert set(record.versions) == {"python", "torch", "labkit"} and side.device == "cpu"
    assert len(side.losses) == len(record.loss_band) == 4 and len(side.throughputs) == 4
    assert math.isnan(tried(candidate="mean of means").candidate.denominator)


def test_reasons_are_the_gates_that_decide() -> None:
    assert len(acceptance().reasons) == 4
    (reason,) = tried(candidate="dropped tail").reasons
    assert reason.startswith("invariant: the candidate's update holds 51")
    assert [each.partition(":")[0] for each in tried(candidate="float32 model").reasons] == ["equality", "traces"]
    lines = tried(candidate="new trainer").explain().splitlines()
    assert [line[0] for line in lines[1:5]] == ["✓", "✓", "✗", "–"] and lines[5] == "What this does not prove:"


# What is refused.


def test_the_invariant_has_no_default() -> None:
    with pytest.raises(TypeError, match="invariant"):
        accept(Side(), Side(), MICROBATCHES, Pair.loss_sum)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"invariant": "system"}, "try 'systems'"),
        ({"windows": 0}, "windows = 0 is outside"),
        ({"runs": 2}, "runs = 2 is outside 3"),
        ({"margin": -0.1}, "margin = -0.1 is outside"),
        ({"margin": math.nan}, "is not a number"),
        ({"seconds": -1}, "seconds = -1"),
        ({"objective": "mean"}, "objective = 'mean'"),
        ({"candidate_microbatches": []}, "the candidate: 0 microbatches"),
    ],
)
def test_bad_settings_get_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError, match=words.replace("'", ".")):
        judged(Side(), Side(), **options)


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (lambda: 3, "the candidate: build.. gives a int"),
        (lambda: 1 / 0, "the candidate raises ZeroDivisionError"),
        (Side(model=lambda: network(1, torch.float64)), "starts from weights that are .* % off: try the same seed"),
        (Side(model=lambda: nn.Embedding(128, 128, dtype=torch.float64)), "the candidate trains 16,384 numbers in 1"),
        (Side(lambda *_: 1 / 0), "the candidate: the step raises ZeroDivisionError"),  # type: ignore[arg-type,return-value]
        (None, "the candidate raises TypeError"),
    ],
)
def test_a_candidate_that_cannot_be_judged_gets_a_sentence(candidate: Any, words: str) -> None:
    with pytest.raises(LabError, match=words):
        accept(Side(), candidate, MICROBATCHES, Pair.loss_sum, invariant="systems", **FAST)


def test_a_step_that_raises_late_gets_a_sentence() -> None:
    def late(model: nn.Module, _: Any, call: int) -> None:
        if call == 3:
            raise RuntimeError("out of data")

    with pytest.raises(LabError, match="the step raises RuntimeError: out of data"):
        judged(Side(), Side(late))


def test_random_state_and_hooks_are_put_back() -> None:
    before = torch.random.get_rng_state()
    acceptance(candidate="new trainer")
    assert torch.equal(before, torch.random.get_rng_state())
    assert acceptance().to_json() == acceptance().to_json(), "same parameters and seed, same result"


# The two trainings of the lab.


@pytest.mark.parametrize("candidate", IDEAS)
def test_followed_is_what_the_gate_compares(candidate: str) -> None:
    found = traces(candidate=candidate, updates=4)
    assert found.difference == tuple(abs(a - b) for a, b in zip(found.base, found.candidate, strict=True))
    outside = [at for at, (d, most) in enumerate(zip(found.difference, found.band, strict=True)) if d > most]
    assert found.outside == len(outside) and found.first == (outside[0] if outside else 0)
    record = tried(candidate=candidate, updates=4)
    if record.loss_band:
        assert (found.base, found.candidate, found.band) == (
            record.base.losses,
            record.candidate.losses,
            record.loss_band,
        )
    expected = {"twice the microbatch": 0, "fused kernel": 0, "new trainer": 3}
    assert found.outside == expected.get(candidate, 4)


def test_in_float32_the_band_is_wider_and_a_float32_model_lies_inside() -> None:
    wide, narrow = (traces(candidate="float32 model", updates=4, precision=p) for p in ("float32", "float64"))
    assert wide.outside == 0 and narrow.outside == 4 and wide.telling and narrow.telling
    assert 1e7 < wide.tolerance / narrow.tolerance < 1e10
    assert not traces(candidate="twice the microbatch", precision="float32", learning_rate=10, updates=16).telling


@settings(max_examples=25)
@given(st.data(), st.sampled_from([acceptance, traces]))
def test_bad_values_of_the_lab_are_refused(data: st.DataObject, run: Any) -> None:
    declared = data.draw(st.sampled_from(list(parameters(run).values())))
    value = data.draw(forbidden(declared))
    with pytest.raises(LabError):
        declared.check(value)


# The command line.


class Turns:
    """A clock by which the base takes 2 s and the candidate 1 s."""

    def __init__(self) -> None:
        self.now, self.read = 0.0, 0

    def __call__(self) -> float:
        self.now += (0.0, 2.0, 0.0, 1.0)[self.read % 4]
        self.read += 1
        return self.now


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: object) -> tuple[int, str]:
        clocked = lambda *args, **rest: accept(*args, clock=Turns(), seconds=0.0, **rest)  # noqa: E731
        monkeypatch.setattr(command, "accept", clocked)
        status = command.main(["accept", *map(str, arguments)])
        return status, capsys.readouterr().out

    return run


Ran = Callable[..., tuple[int, str]]


@pytest.mark.parametrize(
    ("name", "status", "word"), [("adopted", 0, "adopt"), ("rejected", 1, "reject"), ("cannot_tell", 2, "cannot tell")]
)
def test_the_examples_get_one_verdict_each(ran: Ran, name: str, status: int, word: str, tmp_path: Path) -> None:
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 50
    out = tmp_path / "record.json"
    found, said = ran(path, "--windows", 2, "--runs", 4, "--margin", 0.2, "--out", out)
    assert found == status and said.startswith(f"{word}: ")
    record = Record.from_json(out.read_text())
    assert (record.verdict, record.windows, record.runs, record.margin) == (word, 2, 4, 0.2)
    found, said = ran(path, "--json", "--windows", 2)
    assert found == status and json.loads(said)["verdict"] == word and json.loads(said)["runs"] == 3


def test_there_are_three_examples() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"adopted", "rejected", "cannot_tell"}


def test_a_file_may_say_how_long(ran: Ran, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text((EXAMPLES / "rejected.py").read_text() + "\nwindows, runs, margin = 3, 5, 0.1\n")
    record = json.loads(ran(path, "--json")[1])
    assert (record["windows"], record["runs"], record["margin"]) == (3, 5, 0.1)
    assert json.loads(ran(path, "--json", "--margin", 0)[1])["margin"] == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base = candidate = loss_sum = print\nmicrobatches = [1]\n", "has no 'invariant'"),
        ("base = loss_sum = print\nmicrobatches = [1]\ninvariant = 'systems'\n", "has no 'candidate'"),
        ("base = candidate = loss_sum = print\ninvariant = 'systems'\n", "has no 'microbatches'"),
        (
            "base = candidate = loss_sum = print\ninvariant = 'all'\nmicrobatches = [1]\n",
            "invariant = 'all' is none of",
        ),
        ("base = candidate = loss_sum = print\ninvariant = 'systems'\nmicrobatches = []\n", "0 microbatches"),
        (
            "base = 3\ncandidate = loss_sum = print\ninvariant = 'systems'\nmicrobatches = [1]\n",
            "the base raises TypeError",
        ),
        ("1 / 0\n", "raises ZeroDivisionError"),
    ],
)
def test_bad_files_get_no_verdict_and_one_sentence(ran: Ran, text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    status, said = ran(path)
    assert status == 2 and said.startswith("no verdict: ") and words in said and said.count("\n") == 1


def test_bad_options_get_no_verdict(ran: Ran, tmp_path: Path) -> None:
    assert ran(EXAMPLES / "rejected.py", "--runs", 1) == (2, "no verdict: runs = 1 is outside 3 … 1000 runs: try 3\n")
    status, said = ran(EXAMPLES / "rejected.py", "--out", tmp_path / "none" / "record.json", "--windows", 1)
    assert status == 2 and "cannot be written" in said
    assert ran(tmp_path / "nowhere.py")[0] == 2
