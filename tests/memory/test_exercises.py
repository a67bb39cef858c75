"""Loops that keep too much and formulas that forget a part, and the sentence that each of them gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit import check, rules
from labkit.corpus import Batch
from labkit.exercise.verdict import Verdict
from labkit.memory import OPTIMIZERS, graphs, step
from labkit.memory.exercises import CAUSES, COPIES, ITEM, KEPT, STEPS, TRAINING_BYTES, _usage, _window
from labkit.nets import next_token_loss, valid_tokens

torch.set_num_threads(1)

Microbatches = Sequence[Batch]
Loop = Callable[[Any, Any], Any]


def total(microbatches: Microbatches) -> int:
    return sum(valid_tokens(labels) for _, labels in microbatches)


def on_one_line(verdict: Verdict) -> str:
    """What is read, wherever its lines break."""
    return " ".join(str(verdict).split())


# Right loops, each written in another way.


def logits_by_name(model: nn.Module, microbatches: Microbatches) -> None:
    N = total(microbatches)
    for tokens, labels in microbatches:
        logits = model(tokens)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / N
        loss.backward()


def assigned(model: nn.Module, microbatches: Microbatches) -> None:
    N = total(microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels) / N
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = g if p.grad is None else p.grad + g


def logged_in_numbers(model: nn.Module, microbatches: Microbatches) -> list[float]:
    N, log = total(microbatches), []
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels) / N
        loss.backward()
        log.append(loss.item())
        with torch.no_grad():
            log.append(next_token_loss(model, tokens, labels, "mean").item())
    return log


def row_by_row(model: nn.Module, microbatches: Microbatches) -> None:
    N = total(microbatches)
    for tokens, labels in microbatches:
        for x, y in zip(tokens.split(1), labels.split(1), strict=True):
            (next_token_loss(model, x, y) / N).backward()


def checkpointed(model: nn.Module, microbatches: Microbatches) -> None:
    N = total(microbatches)
    for tokens, labels in microbatches:
        loss: Any = checkpoint(lambda x, y: next_token_loss(model, x, y) / N, tokens, labels, use_reentrant=False)
        loss.backward()


RIGHT: list[Loop] = [
    *(logits_by_name, assigned, logged_in_numbers, row_by_row, checkpointed),
    *(graphs.logged_loss, rules.token_mean, rules.token_mean_once),
]


@pytest.mark.parametrize("loop", RIGHT)
def test_a_lean_loop_passes_however_it_is_written(loop: Loop) -> None:
    verdict = check.accumulate_memory(loop)
    assert verdict.passed, verdict
    assert on_one_line(verdict).startswith("4 of 4 checks Right: the gradient of the full batch, and never more than")


# Loops with the right gradient that keep too much.


def losses_in_a_list(model: nn.Module, microbatches: Microbatches) -> None:
    losses = [next_token_loss(model, tokens, labels) for tokens, labels in microbatches]
    (torch.stack(losses).sum() / total(microbatches)).backward()


def one_gradient_at_the_end(model: nn.Module, microbatches: Microbatches) -> None:
    loss = sum(next_token_loss(model, tokens, labels) for tokens, labels in microbatches) / total(microbatches)
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        p.grad = g


def one_batch(model: nn.Module, microbatches: Microbatches) -> None:
    tokens, labels = (torch.cat(each) for each in zip(*microbatches, strict=True))
    next_token_loss(model, tokens, labels, "mean").backward()


def retained_and_logged(model: nn.Module, microbatches: Microbatches) -> None:
    N, log = total(microbatches), []
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels) / N
        loss.backward(retain_graph=True)
        log.append(loss)


def graph_of_the_gradient(model: nn.Module, microbatches: Microbatches) -> None:
    N = total(microbatches)
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels) / N).backward(create_graph=True)


def in_pairs(model: nn.Module, microbatches: Microbatches) -> None:
    N, waiting = total(microbatches), []
    for tokens, labels in microbatches:
        waiting.append(next_token_loss(model, tokens, labels) / N)
        if len(waiting) == 2:
            sum(waiting).backward()  # type: ignore[union-attr]
            waiting = []
    if waiting:
        sum(waiting).backward()  # type: ignore[union-attr]


def outputs_in_a_list(model: nn.Module, microbatches: Microbatches) -> None:
    N, outputs = total(microbatches), []
    for tokens, labels in microbatches:
        logits = model(tokens)[:, :-1]
        F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="sum").div(N).backward()
        outputs.append(logits)


def detached_outputs(model: nn.Module, microbatches: Microbatches) -> None:
    N, outputs = total(microbatches), []
    for tokens, labels in microbatches:
        logits = model(tokens)[:, :-1]
        F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="sum").div(N).backward()
        outputs.append(logits.detach())


def retained_in_the_end(model: nn.Module, microbatches: Microbatches) -> Tensor:
    N = total(microbatches)
    for m, (tokens, labels) in enumerate(microbatches):
        loss = next_token_loss(model, tokens, labels) / N
        loss.backward(retain_graph=m == len(microbatches) - 1)
    return loss


ENDS = "Eight forwards, then one backward(), and until then every graph is kept: 8 times what one microbatch"
WRONG: dict[str, tuple[Loop, int, list[str]]] = {
    "the summed loss": (graphs.summed_loss, 2, [ENDS, "fix: call backward() on each loss before the next forward"]),
    "losses in a list": (losses_in_a_list, 2, [ENDS]),
    "one autograd.grad": (one_gradient_at_the_end, 2, [ENDS]),
    "all forwards first": (
        graphs.all_forwards_first,
        2,
        ["Eight forwards come before the first backward(): 8 times", "fix: call backward() on each loss before"],
    ),
    "one batch": (
        one_batch,
        2,
        ["One forward for eight microbatches, so that they stand in one graph: 8 times", "a forward and a backward"],
    ),
    "a forward for the log": (
        graphs.logged_forward,
        2,
        ["16 forwards and eight backward(), and a loss that gets no backward keeps", ": 8 times", "loss.item()"],
    ),
    "retain_graph and a list": (
        retained_and_logged,
        2,
        ["Eight forwards and eight backward(), and yet no graph goes, since", ": 8 times", "leave retain_graph"],
    ),
    "create_graph": (graph_of_the_gradient, 1, ["no graph goes, since retain_graph or create_graph", ".grad holds"]),
    "retain_graph": (
        graphs.retained_graph,
        3,
        ["The graph of one microbatch is still there while the next is built", ": 2 times", "fix: leave retain_graph"],
    ),
    "in pairs": (in_pairs, 3, ["Eight forwards and four backward(), so that several graphs wait for each: 2 times"]),
    "outputs in a list": (
        outputs_in_a_list,
        3,
        ["The graphs go, but the model's outputs stay", "what one microbatch needs", "as large when it is detached"],
    ),
    "detached outputs in a list": (detached_outputs, 3, ["The graphs go, but the model's outputs stay"]),
    "retained at the end": (
        retained_in_the_end,
        3,
        ["When your function returns, a graph is still kept by what it returns", ": 1 times", "return a number"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_loop_that_keeps_too_much_gets_the_sentence_meant_for_it(name: str) -> None:
    loop, passes, words = WRONG[name]
    verdict = check.accumulate_memory(loop)
    assert not verdict.passed and verdict.checks[0][1], verdict
    assert sum(ok for _, ok in verdict.checks) == passes, verdict
    for each in words:
        assert each in verdict.sentence, (each, verdict.sentence)


def mean_of_means_summed(model: nn.Module, microbatches: Microbatches) -> None:
    losses = [next_token_loss(model, tokens, labels, "mean") for tokens, labels in microbatches]
    torch.stack(losses).nanmean().backward()


@pytest.mark.parametrize(("loop", "passes", "words"), [
    (rules.mean_of_means, 3, ["(mean-of-means)", "The fix: count the valid tokens N"]),
    (rules.sum_of_means, 3, ["four means were added and never divided (sum-of-means)"]),
    (rules.last_microbatch_only, 3, ["Only the last of four microbatches is"]),
    (mean_of_means_summed, 1, ["four means were added and divided by", "Eight forwards, then one backward()"]),
    (lambda model, microbatches: None, 0, ["There is no gradient in .grad: the model was never called"]),
    (lambda model, microbatches: model(microbatches[0][0]).item(), 0, ["raises RuntimeError"]),
    (lambda model: None, 0, ["Your function takes (model), and is called with (model, microbatches)."]),
    (None, 0, ["This is a NoneType and no function"]),
])  # fmt: skip
def test_a_wrong_gradient_is_told_first(loop: Any, passes: int, words: list[str]) -> None:
    verdict = check.accumulate_memory(loop)
    assert not verdict.passed and sum(ok for _, ok in verdict.checks) == passes, verdict
    for each in words:
        assert each in verdict.sentence, (each, verdict.sentence)
    if passes == 3:
        assert "one microbatch needs" not in verdict.sentence


def test_an_endless_loop_is_called_once() -> None:
    calls: list[object] = []

    def endless(model: nn.Module, microbatches: Microbatches) -> None:
        calls.append(model)
        while True:
            pass

    verdict = check.accumulate_memory(endless, seconds=0.2)
    assert (
        len(calls) == 1 and not any(ok for _, ok in verdict.checks) and "still running after 0.2 s" in verdict.sentence
    )


def test_what_is_printed_and_changed_is_told() -> None:
    def chatty(model: nn.Module, microbatches: Microbatches) -> None:
        print("hello")
        rules.token_mean(model, microbatches)

    assert check.accumulate_memory(chatty).printed == "hello"


def test_the_windows_hold_equal_microbatches() -> None:
    for K in STEPS:
        _, microbatches = _window(K)
        assert [tokens.shape for tokens, _ in microbatches] == [(2, 16)] * K


def test_no_cause_is_left_without_a_loop() -> None:
    held = [_usage(loop, 8, 5.0) for loop, *_ in WRONG.values()]
    found = {next(at for at, cause in enumerate(CAUSES) if cause.holds(each)) for each in held}
    assert found == set(range(len(CAUSES)))


def test_what_a_lean_loop_holds_is_one_microbatch() -> None:
    for loop in RIGHT[:3]:
        held = _usage(loop, 8, 5.0)
        assert (held.peak, held.rest, held.error) == (1, 0, "")


# The bytes of a step.


def one_line(parameters: int, itemsize: int, optimizer: str, kept: int, b: int, K: int) -> int:
    return parameters * itemsize * (2 + {"SGD": 0, "momentum": 1, "Adam": 2}[optimizer]) + kept * b


def part_by_part(parameters: int, itemsize: int, optimizer: str, kept: int, b: int, K: int) -> int:
    weights = gradients = parameters * itemsize
    state = 2 * weights if optimizer == "Adam" else weights if optimizer == "momentum" else 0
    return weights + gradients + state + b * kept


def in_torch(parameters: int, itemsize: int, optimizer: str, kept: int, b: int, K: int) -> Tensor:
    numbers = torch.tensor([1, 1, optimizer != "SGD", optimizer == "Adam"])
    return (numbers * parameters * itemsize).sum() + sum(kept for _ in range(b))


@pytest.mark.parametrize("function", [one_line, part_by_part, in_torch])
def test_right_bytes_pass_however_they_are_written(function: Callable[..., Any]) -> None:
    assert check.training_bytes(function).passed


def wrong(copies: Callable[[int, int], float], held: Callable[[int, int, int], float]) -> Callable[..., float]:
    states = {"SGD": 0, "momentum": 1, "Adam": 2}
    return lambda p, size, optimizer, kept, b, K: p * size * copies(states[optimizer], K) + held(kept, b, K)


SLIPS: dict[str, tuple[Callable[..., Any], str]] = {
    "times K": (wrong(lambda s, K: 2 + s, lambda k, b, K: k * b * K), "gives 9800, and 8600 is right: K microbatches"),
    "no gradients": (wrong(lambda s, K: 1 + s, lambda k, b, K: k * b), "right: the gradients, one number for each"),
    "no state": (wrong(lambda s, K: 2, lambda k, b, K: k * b), "right: the optimizer's state is not counted."),
    "Adam once": (wrong(lambda s, K: 2 + (s > 0), lambda k, b, K: k * b), "right: Adam keeps two numbers for each"),
    "K gradients": (wrong(lambda s, K: 1 + K + s, lambda k, b, K: k * b), "right: a gradient was counted for each"),
    "weights alone": (wrong(lambda s, K: 1, lambda k, b, K: k * b), "right: only the weights are counted beside"),
    "one sequence": (wrong(lambda s, K: 2 + s, lambda k, b, K: k), "right: kept is for one sequence, and a"),
    "divided by K": (wrong(lambda s, K: 2 + s, lambda k, b, K: k * b / K), "right: what is kept was divided by K."),
    "nothing kept": (wrong(lambda s, K: 2 + s, lambda k, b, K: 0), "right: what is kept for backward is not counted."),
    "no itemsize": (lambda p, size, o, k, b, K: one_line(p, 1, o, k, b, K), "gives 2600, and 8600 is right: itemsize"),
    "itemsize twice": (lambda p, size, o, k, b, K: one_line(p, size, o, k * size, b, K), "kept is in bytes already"),
    "bits": (lambda p, size, o, k, b, K: one_line(p, 8 * size, o, k, b, K), "right: bits were counted, not bytes."),
    "two slips": (
        wrong(lambda s, K: 1 + s, lambda k, b, K: k * b * K),
        "the gradients, one number for each weight, are not counted; K microbatches were counted as if all",
    ),
    "no slip": (wrong(lambda s, K: 7 + s, lambda k, b, K: k * b), "none of the usual slips gives these numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_gets_the_sentence_meant_for_it(name: str) -> None:
    function, words = SLIPS[name]
    verdict = check.training_bytes(function)
    assert not verdict.passed and words in verdict.sentence, verdict


def test_no_two_slips_give_the_same_numbers() -> None:
    single = {words: wrong for words, wrong in TRAINING_BYTES.wrong.items() if ";" not in words}
    assert len(single) == 1 + sum(len(table) - 1 for table in (COPIES, ITEM, KEPT))
    rows = [tuple(wrong(*case) for case in TRAINING_BYTES.cases.values()) for wrong in single.values()]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(("optimizer", "word"), [("SGD", "SGD"), ("SGD with momentum", "momentum"), ("Adam", "Adam")])
def test_the_formula_is_what_a_real_step_holds(optimizer: str, word: str) -> None:
    model, microbatches = _window(4)
    found = step(model, OPTIMIZERS[optimizer](model.parameters()), microbatches)
    weights = sum(p.numel() for p in model.parameters())
    told = TRAINING_BYTES.right(weights, 8, word, found.kept / 2, 2, 4)
    counts = 4 * len(list(model.parameters())) * (word == "Adam")
    assert told + counts == pytest.approx(found.total, rel=1e-12)
