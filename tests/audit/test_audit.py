"""The audit over the whole corpus, what it leaves behind, and what it says to bad arguments."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad

import labkit.cadence  # its rules
from labkit import accumulation, check, rules
from labkit.__main__ import main
from labkit.audit import Report, audit, inspect, probe
from labkit.audit.judge import ORDER
from labkit.cadence.stepping import Average, Training
from labkit.corpus import batch, split
from labkit.errors import LabError
from labkit.nets import IGNORE, Transformer, next_token_loss, valid_tokens
from tests.audit.steps import Step, steps

STEPS = steps()
RIGHT = [step for step in STEPS if not step.faults and not step.cannot_tell]
Build = Callable[[], tuple[nn.Module, Callable[[list[Any]], object]]]


def audited(step: Step) -> Report:
    return audit(
        step.build,
        step.microbatches,
        step.loss_sum,
        concat=step.concat,
        windows=step.windows,
        objective=step.objective,
    )


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_verdict_of_every_step(step: Step) -> None:
    report = audited(step)
    if step.cannot_tell:
        assert report.faults in step.readings and report.cannot_tell, report.explain()
    else:
        assert set(report.faults) == set(step.faults), report.explain()
    assert report.verdict == (report.faults[0] if report.faults else step.objective)
    assert report.right == (report.verdict == step.objective and not report.faults)
    for fault in report.details:
        assert fault.said.endswith(".") and fault.said in report.explain() and fault.word in report.explain()
    json.loads(report.to_json())


def test_a_judge_that_always_says_the_same_is_worth_nothing() -> None:
    """What is in the corpus: enough right ones, enough faults, every word at least twice."""
    words = [word for step in STEPS for word in step.faults]
    assert len(RIGHT) >= 30 and sum(bool(step.faults) for step in STEPS) >= 60
    for word in set(ORDER) - {"token-mean"}:
        assert words.count(word) >= 2, word


# The same, with everything drawn at random.

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
CADENCE = ("step-per-microbatch", "schedule-per-microbatch", "ema-per-microbatch", "schedule-per-process")


def loss_sum(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return next_token_loss(model, *microbatch, "sum"), valid_tokens(microbatch[1])


def of_rule(word: str, seed: int, dtype: torch.dtype, make: Callable[[Any], torch.optim.Optimizer]) -> Build:
    """A step by a rule of the table, whatever its topic."""

    def build() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model = Transformer(seed=seed, length=25, dtype=dtype)
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        training = Training(optimizer, scheduler, Average(model.parameters(), 0.99), world_size=2)
        rule = rules.rule(word)

        def once(microbatches: list[Any]) -> None:
            rule.run(model, microbatches)
            optimizer.step()
            scheduler.step()

        def cadence(microbatches: list[Any]) -> None:
            share = sum(valid_tokens(labels) for _, labels in microbatches) / len(microbatches)
            rule.loop(lambda each: next_token_loss(model, *each, "sum") / share, microbatches, training)

        return model, cadence if rule.topic == "cadence" else once

    return build


@settings(max_examples=40)
@given(
    st.sampled_from((*accumulation.WINDOW, "once-per-window", *CADENCE)),
    st.integers(3, 6),
    st.integers(0, 9999),
    st.sampled_from((torch.float32, torch.float64)),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.integers(1, 3),
)
def test_any_rule_with_any_optimizer(
    word: str, K: int, seed: int, dtype: torch.dtype, optimizer: str, windows: int
) -> None:
    tokens, labels = batch(seed, 2 * K, 24, shortest=4, text="made")
    report = audit(
        of_rule(word, seed, dtype, OPTIMIZERS[optimizer]), split(tokens, labels, K), loss_sum, windows=windows
    )
    if rules.rule(word).right:
        assert report.right, report.explain()
    elif "unknown" not in report.faults:  # counts that happen to be alike
        assert report.faults == (word,), report.explain()
    else:
        assert "look the same here" in report.explain() or len(set(report.counts)) < K


@pytest.mark.parametrize("word", accumulation.COUNTS)
def test_the_weights_of_a_report_are_those_of_the_algebra(word: str) -> None:
    microbatches = probe(100)
    report = audit(of_rule(word, 0, torch.float64, OPTIMIZERS["SGD"]), microbatches, loss_sum)
    assert report.token_weights == pytest.approx(accumulation.token_weights(report.counts, word).tolist(), rel=1e-9)
    assert report.counts == tuple(valid_tokens(labels) for _, labels in microbatches)
    each = torch.tensor(report.token_weights).repeat_interleave(2).tolist()  # two rows a microbatch
    assert report.sequence_weights == pytest.approx(each, rel=1e-6)


def test_a_mean_of_sequences_weighs_its_rows() -> None:
    report = audit(of_rule("sequence-means", 0, torch.float64, OPTIMIZERS["SGD"]), probe(100), loss_sum)
    rows = [int((row[1:] != IGNORE).sum()) for _, labels in probe(100) for row in labels]
    assert report.sequence_weights == pytest.approx([sum(rows) / (len(rows) * n) for n in rows], rel=1e-9)


def divided_by(count: Callable[[Any, Any], float], clip: float = math.inf) -> Build:
    """Every mean or sum divided by a number of its own, then clipped once, in its place."""

    def build() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model = Transformer(seed=0, length=33, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(microbatches: list[Any]) -> None:
            optimizer.zero_grad()
            for tokens, labels in microbatches:
                (next_token_loss(model, tokens, labels, "sum") / count(labels, microbatches)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

        return model, step

    return build


def test_without_padding_all_labels_are_those_before_the_shift() -> None:
    full = split(*batch(0, 6, 24, shortest=24, text="made"), 3)
    report = audit(divided_by(lambda _, all_: sum(labels.numel() for _, labels in all_)), full, loss_sum)
    assert report.faults == ("unshifted-count",)


@pytest.mark.parametrize("seed", range(20, 32))
def test_a_label_0_is_no_padding(seed: int) -> None:
    microbatches = probe(32, accumulation=5, length=22, seed=seed)
    build = divided_by(lambda _, all_: sum(labels[:, 1:].numel() for _, labels in all_))
    assert audit(build, microbatches, loss_sum).faults == ("padded-count",)


def test_a_tail_is_told_behind_a_clip_that_bites() -> None:
    build = divided_by(lambda labels, all_: valid_tokens(labels) * (len(all_) + 3), clip=0.01)
    report = audit(build, probe(100), loss_sum)
    assert report.faults == ("tail-divided-by-k",) and "4 means were divided by 7" in report.explain()


# Steps without an optimizer of torch's, or with one that is none of the usual.

Made = Callable[[nn.Module], Callable[[list[Any]], object]]


def right_losses(model: nn.Module, microbatches: list[Any]) -> list[Tensor]:
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    return [next_token_loss(model, tokens, labels, "sum") / N for tokens, labels in microbatches]


def lbfgs(model: nn.Module) -> Callable[[list[Any]], object]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(microbatches: list[Any]) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            losses = right_losses(model, microbatches)
            for loss in losses:
                loss.backward()
            return sum(loss.item() for loss in losses)

        optimizer.step(closure)

    return step


def maximised(model: nn.Module) -> Callable[[list[Any]], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)

    def step(microbatches: list[Any]) -> None:
        optimizer.zero_grad()
        for loss in right_losses(model, microbatches):
            (-loss).backward()
        optimizer.step()

    return step


def by_hand(model: nn.Module) -> Callable[[list[Any]], object]:
    def step(microbatches: list[Any]) -> None:
        model.zero_grad()
        for loss in right_losses(model, microbatches):
            loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad

    return step


def by_hand_and_cleared_in_the_loop(model: nn.Module) -> Callable[[list[Any]], object]:
    def step(microbatches: list[Any]) -> None:
        for loss in right_losses(model, microbatches):
            model.zero_grad()
            loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad()

    return step


def averaged_by_copy(model: nn.Module) -> Callable[[list[Any]], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = [torch.zeros_like(p) for p in model.parameters()]

    def step(microbatches: list[Any]) -> None:
        for loss in right_losses(model, microbatches):
            loss.backward()
            with torch.no_grad():
                for mean, p in zip(average, model.parameters(), strict=True):
                    mean.copy_(0.99 * mean + 0.01 * p)
        optimizer.step()
        optimizer.zero_grad()

    return step


def norms_logged(model: nn.Module) -> Callable[[list[Any]], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(microbatches: list[Any]) -> None:
        for loss in right_losses(model, microbatches):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()

    return step


def swapped_by_their_bits(model: nn.Module) -> Callable[[list[Any]], object]:
    """As optimizers do it that keep two sets of weights without a third."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    others = [p.detach().clone() for p in model.parameters()]

    def swap() -> None:
        for p, other in zip(model.parameters(), others, strict=True):
            one, two = p.detach().view(torch.uint8), other.view(torch.uint8)
            one.bitwise_xor_(two)
            two.bitwise_xor_(one)
            one.bitwise_xor_(two)

    def step(microbatches: list[Any]) -> None:
        for loss in right_losses(model, microbatches):
            loss.backward()
        swap()
        swap()
        optimizer.step()
        optimizer.zero_grad()

    return step


def scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> Made:
    """A schedule that steps others inside, or itself in its making."""

    def made(model: nn.Module) -> Callable[[list[Any]], object]:
        def step(microbatches: list[Any]) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = make(optimizer)
            optimizer.zero_grad()
            for loss in right_losses(model, microbatches):
                loss.backward()
            optimizer.step()
            scheduler.step()

        return step

    return made


def clipped_alone_and_averaged(model: nn.Module) -> Callable[[list[Any]], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(microbatches: list[Any]) -> None:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for tokens, labels in microbatches:
            optimizer.zero_grad()
            next_token_loss(model, tokens, labels, "mean").backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad / len(microbatches)
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total
        optimizer.step()

    return step


def divided_twice_and_unscaled_after_the_first(model: nn.Module) -> Callable[[list[Any]], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(microbatches: list[Any]) -> None:
        optimizer.zero_grad()
        for at, loss in enumerate(right_losses(model, microbatches)):
            scaler.scale(loss / len(microbatches)).backward()
            if at == 0:
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return step


LR = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: LR.OneCycleLR(o, 0.1, total_steps=50),
    "in sequence": lambda o: LR.SequentialLR(o, [LR.LinearLR(o), LR.ConstantLR(o)], [2]),
    "in a chain": lambda o: LR.ChainedScheduler([LR.LinearLR(o), LR.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_schedules_steps_once(name: str) -> None:
    def build() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model = Transformer(seed=1, length=25, dtype=torch.float64)
        return model, scheduled(SCHEDULES[name])(model)

    report = audit(build, probe(100), loss_sum)
    assert report.right and report.schedule_steps == 1, report.explain()


def test_a_backward_inside_a_backward_is_one_pass() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Transformer):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding[tokens] + self.position[: tokens.shape[1]]
            return checkpoint(self.blocks[0], x, use_reentrant=True) @ self.embedding.T

    def build() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model = Checkpointed(seed=1, length=25, dtype=torch.float64)
        return model, by_hand(model)

    report = audit(build, probe(100), loss_sum)
    assert report.right and report.backward_passes == 4, report.explain()


def test_two_steps_in_a_window_of_two() -> None:
    build = of_rule("step-per-microbatch", 0, torch.float64, OPTIMIZERS["SGD"])
    assert audit(build, probe(100, accumulation=2), loss_sum).faults == ("step-per-microbatch",)


@pytest.mark.parametrize(
    "count",
    [
        lambda labels, all_: 2 * valid_tokens(labels),
        lambda labels, all_: sum(valid_tokens(each) for _, each in all_) / 2,
        lambda labels, all_: sum(valid_tokens(each) for _, each in all_) / 1.7,
    ],
)
def test_a_factor_of_no_rule_gets_no_word(count: Callable[[Any, Any], float]) -> None:
    report = audit(divided_by(count), probe(100), loss_sum)
    assert report.faults == ("unknown",) and "a factor that no rule gives" in report.explain()


def sequence_means_averaged_in_each_microbatch_first(model: nn.Module) -> Callable[[list[Any]], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(microbatches: list[Any]) -> None:
        for tokens, labels in microbatches:
            losses = next_token_loss(model, tokens, labels, "none").sum(1)
            means = losses / (labels[:, 1:] != IGNORE).sum(1)
            (means.mean() / len(microbatches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def decayed_by_hand_and_by_the_optimizer(model: nn.Module) -> Callable[[list[Any]], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)

    def step(microbatches: list[Any]) -> None:
        optimizer.zero_grad()
        for loss in right_losses(model, microbatches):
            loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p *= 0.99
        optimizer.step()

    return step


@pytest.mark.parametrize(
    ("made", "faults"),
    [
        (clipped_alone_and_averaged, ("mean-of-means", "clip-per-microbatch")),
        (divided_twice_and_unscaled_after_the_first, ("double-division", "unscale-early")),
        (lbfgs, ()),
        (maximised, ()),
        (by_hand, ()),
        (by_hand_and_cleared_in_the_loop, ("last-microbatch-only",)),
        (averaged_by_copy, ("ema-per-microbatch",)),
        (norms_logged, ()),
        (swapped_by_their_bits, ()),
        (decayed_by_hand_and_by_the_optimizer, ("decay-per-microbatch",)),
        (sequence_means_averaged_in_each_microbatch_first, ("sequence-means",)),
    ],
)
def test_unusual_steps(made: Made, faults: tuple[str, ...]) -> None:
    def build() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model = Transformer(seed=1, length=25, dtype=torch.float64)
        return model, made(model)

    (tokens, labels), *others = probe(100)
    microbatches = [(tokens[:1], labels[:1]), *others]  # of unequal numbers of sequences
    assert audit(build, microbatches, loss_sum, windows=2).faults == faults


class Called(nn.Module):
    """A model that is called with weights of one's own."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.call = lambda tokens: functional_call(model, weights, (tokens,))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.call(tokens)


def transformed(reduction: str, dtype: torch.dtype, adam: bool = False) -> Build:
    """Gradients from a function transform, which no hook sees, and weights moved by hand."""

    def build() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model = Transformer(seed=1, length=25, dtype=dtype)

        def loss(weights: dict[str, Tensor], microbatch: Any, count: int) -> Tensor:
            return next_token_loss(Called(model, weights), *microbatch, reduction) / count

        def step(microbatches: list[Any]) -> None:
            count = sum(valid_tokens(labels) for _, labels in microbatches) if reduction == "sum" else len(microbatches)
            weights = {name: p.detach() for name, p in model.named_parameters()}
            found = [grad(loss)(weights, each, count) for each in microbatches]
            with torch.no_grad():
                for name, p in model.named_parameters():
                    total = torch.stack([each[name] for each in found]).sum(0)
                    p -= 0.01 * (total / (total.abs() + 1e-8) if adam else total)

        return model, step

    return build


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("reduction", "faults"), [("sum", ()), ("mean", ("mean-of-means",))])
def test_gradients_that_no_hook_sees_are_read_off_the_weights(
    reduction: str, faults: tuple[str, ...], dtype: torch.dtype
) -> None:
    report = audit(transformed(reduction, dtype), probe(100), loss_sum, windows=2)
    assert report.faults == faults and not report.backward_passes, report.explain()
    assert "the gradient, where only the movement of the weights is seen" in report.explain()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_way_that_is_no_weighted_sum_is_not_called_right(reduction: str) -> None:
    report = audit(transformed(reduction, torch.float64, adam=True), probe(100), loss_sum, windows=2)
    assert report.faults == ("unknown",) and "is no weighted sum" in report.explain()


@pytest.mark.parametrize(("word", "faults"), [("sum", ()), ("mean", ("mean-of-means",))])
def test_a_float32_loss_of_float64_weights_has_the_digits_of_float32(word: str, faults: tuple[str, ...]) -> None:
    def build() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model = Transformer(seed=1, length=25, dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        rounded = nn.Sequential(model, Single())

        def step(microbatches: list[Any]) -> None:
            count = sum(valid_tokens(labels) for _, labels in microbatches) if word == "sum" else len(microbatches)
            for each in microbatches:
                (next_token_loss(rounded, *each, word) / count).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    report = audit(build, probe(100), loss_sum, windows=2)
    assert report.faults == faults and report.tolerance > 1e-6, report.explain()


class Single(nn.Module):
    """The same in float32."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits.float()


# The command line.

MODULE = """
import torch
from labkit.audit import probe
from labkit.nets import Transformer, next_token_loss, valid_tokens
microbatches = probe(100)
def loss_sum(model, each):
    return next_token_loss(model, *each, "sum"), valid_tokens(each[1])
def build():
    model = Transformer(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(microbatches):
        optimizer.zero_grad()
        N = sum(valid_tokens(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (next_token_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()
    return model, step
"""


@pytest.mark.parametrize(
    ("changed", "options", "status", "said"),
    [
        (("", ""), (), 0, "verdict: token-mean"),
        (('"sum") / N', '"mean") / 4'), (), 1, "verdict: mean-of-means"),
        (('"sum") / N', '"mean") / 4'), ("--objective", "mean-of-means"), 0, "verdict: mean-of-means"),
        (('"sum") / N', '"mean") / 4'), ("--json",), 1, '"verdict": "mean-of-means"'),
        (("optimizer.zero_grad()", "pass"), ("--windows", "2"), 1, "verdict: stale-gradient"),
        (("optimizer.step()", "1 / 0"), (), 2, "no verdict: the step raises ZeroDivisionError"),
        (("def loss_sum", "def other"), (), 2, "has no 'loss_sum': try"),
        (("import torch", "import torch, nowhere"), (), 2, "raises ModuleNotFoundError: No module named 'nowhere'"),
        (("import torch", "import ("), (), 2, "raises SyntaxError"),
    ],
)
def test_the_exit_status(
    changed: tuple[str, str], options: tuple[str, ...], status: int, said: str, tmp_path: Any, capsys: Any
) -> None:
    path = tmp_path / f"step_{status}_{len(said)}.py"
    path.write_text(MODULE.replace(*changed))
    assert main(["audit", f"{path}:build", *options]) == status
    assert said in capsys.readouterr().out


# What it leaves behind.


def state_of_the_world() -> list[Any]:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    return [
        sys.getprofile(),
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        len(_global_optimizer_pre_hooks),
        len(_global_optimizer_post_hooks),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_touched_is_put_back(fails: bool) -> None:
    built: list[nn.Module] = []

    def build() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model, step = of_rule("token-mean", 0, torch.float32, OPTIMIZERS["Adam"])()
        built.append(model)

        def failing(microbatches: list[Any]) -> None:
            step(microbatches)
            torch.rand(3), random.random(), numpy.random.rand()
            if fails:
                raise ZeroDivisionError("in the step")

        return model, failing

    before = state_of_the_world()
    if fails:
        with pytest.raises(LabError, match="the step raises ZeroDivisionError: in the step: try"):
            audit(build, probe(100), loss_sum)
    else:
        audit(build, probe(100), loss_sum)
    assert state_of_the_world() == before
    for model in built:
        assert not model._forward_pre_hooks and not any(p._backward_hooks for p in model.parameters())


def test_the_step_runs_unchanged() -> None:
    build, microbatches, seen = of_rule("mean-of-means", 3, torch.float32, OPTIMIZERS["AdamW"]), probe(100), []

    def watched() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model, step = build()
        seen.append(model)
        return model, step

    audit(watched, microbatches, loss_sum)
    model, step = build()
    step(microbatches)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), seen[0].parameters(), strict=True))


def test_another_profiler_goes_on_afterwards() -> None:
    def other(*_: Any) -> None:
        pass

    sys.setprofile(other)
    try:
        audit(of_rule("token-mean", 0, torch.float64, OPTIMIZERS["SGD"]), probe(100), loss_sum)
        assert sys.getprofile() is other
    finally:
        sys.setprofile(None)


# What it says.


def test_the_objective_is_the_callers() -> None:
    build = of_rule("sequence-means", 0, torch.float64, OPTIMIZERS["SGD"])
    assert audit(build, probe(100), loss_sum).faults == ("sequence-means",)
    meant = audit(build, probe(100), loss_sum, objective="sequence-mean")
    assert meant.right and meant.verdict == "sequence-mean"
    other = audit(
        of_rule("token-mean", 0, torch.float64, OPTIMIZERS["SGD"]), probe(100), loss_sum, objective="mean-of-means"
    )
    assert other.faults == ("token-mean",) and "is no mean-of-means" in other.explain()


def test_the_report_has_what_was_counted() -> None:
    def joined(microbatches: list[Any]) -> Any:
        return tuple(torch.cat(each) for each in zip(*microbatches, strict=True))

    for word, count, schedule in (("once-per-window", 1, 1), ("adam-count-per-microbatch", 4, 1)):
        build = of_rule(word, 0, torch.float64, OPTIMIZERS["Adam"])
        for windows in (1, 2):
            report = audit(build, probe(100), loss_sum, windows=windows, concat=joined)
            assert (report.adam_count, report.schedule_steps, report.optimizer_steps) == (count, schedule, 1)
            assert report.second_run == 0 and report.one_forward < 1e-12
    report = audit(of_rule("token-mean", 0, torch.float64, OPTIMIZERS["SGD"]), probe(100), loss_sum)
    assert math.isnan(report.adam_count) and math.isnan(report.one_forward)


@pytest.mark.parametrize("word", [word for word in accumulation.WINDOW if word != "token-mean-once"])
def test_the_checker_of_loops_and_the_audit_use_the_same_word(word: str) -> None:
    verdict = check.accumulate(rules.rule(word).loop)
    report = audit(of_rule(word, 0, torch.float64, OPTIMIZERS["SGD"]), probe(100), loss_sum)
    assert verdict.passed == report.right
    assert report.right or f"({report.verdict})" in verdict.sentence


def test_what_cannot_be_told_is_said() -> None:
    tokens, labels = batch(0, 4, 24, shortest=24, text="made")
    report = audit(of_rule("mean-of-means", 0, torch.float64, OPTIMIZERS["SGD"]), split(tokens, labels, 4), loss_sum)
    assert report.right and "mean-of-means would look the same" in report.explain()


def test_the_report_explains_itself() -> None:
    report = audit(of_rule("mean-of-means", 0, torch.float64, OPTIMIZERS["SGD"]), probe(100), loss_sum)
    said = report.explain()
    assert "The step is no token-mean: its gradient is " in said and "The fix: count the valid tokens N" in said
    assert repr(report).startswith("mean-of-means\nweight × N of each microbatch: ")
    stored = json.loads(report.to_json())
    assert stored["verdict"] == "mean-of-means" and stored["details"][0]["fix"]


def nothing_valid() -> list[Any]:
    return [(tokens, torch.full_like(labels, IGNORE)) for tokens, labels in probe(100)]


GOOD = of_rule("token-mean", 0, torch.float64, OPTIMIZERS["SGD"])


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((GOOD, [], loss_sum), {}, "0 microbatches make no step: try"),
        ((GOOD, probe(100), loss_sum), {"windows": 0}, "windows = 0 is outside 1 … 100: try 1"),
        (
            (GOOD, probe(100), loss_sum),
            {"objective": "tokenmean"},
            "objective = 'tokenmean' is none of .*try 'token-mean'",
        ),
        ((lambda: 3, probe(100), loss_sum), {}, "build\\(\\) gives a int and no model with its step: try"),
        ((GOOD, probe(100), lambda model, each: 3), {}, "loss_sum returns a int and no pair of sum and count: try"),
        ((GOOD, nothing_valid(), loss_sum), {}, "the microbatches have 0 valid tokens: try"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(LabError, match=said):
        audit(*arguments, **options)


@given(st.integers(2, 12), st.integers(8, 40), st.integers(0, 99))
@settings(max_examples=20)
def test_a_probe_tells(K: int, length: int, seed: int) -> None:
    microbatches = probe(50, accumulation=K, length=length, seed=seed)
    counts = [valid_tokens(labels) for _, labels in microbatches]
    assert len(microbatches) == K and min(counts) > 0 and len(set(counts)) > 1
    assert all(int(labels[0, 0]) != IGNORE for _, labels in microbatches)


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (3, {}, "source = 3 tokens are too few"),
        (["a", "bc"], {}, "source = 2 examples, too few for 4 microbatches: try accumulation=2"),
        (["a", "b"], {}, "source = 2 examples, too few for 4 microbatches: try 4 or more of different counts above 0"),
        ([], {}, "source = 0 examples, too few for 4 microbatches: try 4 or more of different counts above 0"),
        (["a", "", "", "", "bcd", "xx"], {}, "= 3 of 6 examples with a count above 0, too few .* try accumulation=3"),
        (["", "abc", ""], {"accumulation": 2}, "= 1 of 3 examples with a count above 0, .* try 2 or more of different"),
        ([""] * 5, {}, "source = 0 of 5 examples with a count above 0, too few for 4 microbatches: try 4 or more"),
        (["ab"] * 9, {}, "source has 9 examples of one count only, 2, which tell no mean from a sum: try examples of"),
        (["ab", "", "cd", "ef", "gh"], {}, "source has 4 examples of one count only, 2,"),
        (100, {"accumulation": 1}, "accumulation = 1 is outside 2 … 64: try 2"),
    ],
)
def test_a_source_that_cannot_tell_is_refused(source: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(LabError, match=said):
        probe(source, **options)


def test_the_remedy_for_too_few_examples_is_true() -> None:
    assert probe(["a", "", "", "", "bcd", "xx"], accumulation=3, count=len) == ["a", "xx", "bcd"]
    assert probe(["a", "bc"], accumulation=2) == ["a", "bc"]


# What is in a model.


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("fixed", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Says dropout( here, and draws nothing by it."""
        self.seen += 1
        return x + self.fixed * torch.randn_like(x)


@pytest.mark.parametrize(
    ("module", "kinds"),
    [
        (nn.BatchNorm2d(3), ["looks at the batch", "keeps state"]),
        (nn.BatchNorm1d(3).eval(), []),
        (nn.BatchNorm1d(3, track_running_stats=False).eval(), ["looks at the batch"]),
        (nn.BatchNorm1d(3, momentum=0.0), ["looks at the batch"]),
        (nn.InstanceNorm2d(3), []),
        (nn.InstanceNorm2d(3, track_running_stats=True), ["keeps state"]),
        (nn.GroupNorm(1, 3), []),
        (nn.LayerNorm(3), []),
        (nn.Dropout(0.1), ["draws random numbers"]),
        (nn.Dropout(0.0), []),
        (nn.Dropout(0.1).eval(), []),
        (nn.RReLU(), ["draws random numbers"]),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), ["draws random numbers"]),
        (nn.LSTM(2, 2), []),
        (nn.MultiheadAttention(4, 2, dropout=0.1), ["draws random numbers"]),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), ["keeps state"]),
        (Noisy(), ["draws random numbers", "keeps state"]),
        (Transformer(), []),
        (Transformer(dropout=0.1), ["draws random numbers"]),
    ],
)
def test_layers_that_accumulation_must_know(module: nn.Module, kinds: list[str]) -> None:
    found = inspect(module)
    assert sorted({each.kind for each in found}) == sorted(kinds)
    assert all(each.means and each.layer for each in found)


def test_a_float64_tolerance_is_no_float32_tolerance() -> None:
    for dtype, digits in ((torch.float64, 1e-8), (torch.float32, 1e-3)):
        report = audit(of_rule("token-mean", 0, dtype, OPTIMIZERS["SGD"]), probe(100), loss_sum)
        assert report.relative_error <= report.tolerance < digits and math.isfinite(report.residual)


assert labkit.cadence


def test_a_compiled_wrapper_of_the_model_is_watched_like_the_model() -> None:
    def build() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model = Transformer(seed=1, length=25)
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(microbatches: list[Any]) -> None:
            optimizer.zero_grad()
            for tokens, labels in microbatches:
                next_token_loss(compiled, tokens, labels, "mean").backward()
            optimizer.step()

        return model, step

    assert audit(build, probe(100), loss_sum).faults == ("sum-of-means",)
