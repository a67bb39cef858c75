"""Loops and formulas as learners write them, right and wrong, and the sentence that each of them gets."""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from labkit import check, rules
from labkit.accumulation.exercises import WINDOWS, _cost, _window
from labkit.accumulation.exercises.loops import DIVIDED, NAMED, THEN, WHICH, Part, predict
from labkit.accumulation.exercises.loops import Loop as Decisions
from labkit.corpus import Batch, made, window
from labkit.denominators import counts
from labkit.exercise.verdict import Verdict
from labkit.nets import IGNORE, next_token_loss, valid_tokens

torch.set_num_threads(1)

Microbatches = Sequence[Batch]
Loop = Callable[[Any, Any], Any]

# The first hidden window holds four microbatches of 30, 33, 11 and 60 targets: N = 134.


def total(microbatches: Microbatches) -> int:
    return sum(valid_tokens(labels) for _, labels in microbatches)


# Right loops, each written in another way.


def each_over_n(model: nn.Module, microbatches: Microbatches) -> None:
    N = total(microbatches)
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels, "sum") / N).backward()


def divided_at_the_end(model: nn.Module, microbatches: Microbatches) -> None:
    N = 0
    for tokens, labels in microbatches:
        logits = model(tokens)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        loss.backward()
        N += valid_tokens(labels)
    for p in model.parameters():
        p.grad /= N


def one_backward(model: nn.Module, microbatches: Microbatches) -> Tensor:
    loss = sum(next_token_loss(model, tokens, labels, "sum") for tokens, labels in microbatches) / total(microbatches)
    loss.backward(retain_graph=True)
    return loss


def one_batch(model: nn.Module, microbatches: Microbatches) -> None:
    tokens, labels = (torch.cat(each) for each in zip(*microbatches, strict=True))
    next_token_loss(model, tokens, labels, "mean").backward()


def assigned(model: nn.Module, microbatches: Microbatches) -> None:
    N = total(microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels) / N
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = g if p.grad is None else p.grad + g


def counted_by_a_mask(model: nn.Module, microbatches: Microbatches) -> None:
    N = torch.stack([(labels[:, 1:] != IGNORE).sum() for _, labels in microbatches]).sum()
    for tokens, labels in microbatches:
        mask = (labels[:, 1:] != IGNORE).float()
        losses = next_token_loss(model, tokens, labels.clamp(min=0), "none")
        ((losses * mask).sum() / N).backward()


def buffers(model: nn.Module, microbatches: Microbatches) -> None:
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    for tokens, labels in microbatches:
        model.zero_grad()
        next_token_loss(model, tokens, labels).backward()
        for kept, p in zip(sums, model.parameters(), strict=True):
            kept += p.grad
    for kept, p in zip(sums, model.parameters(), strict=True):
        p.grad.copy_(kept / total(microbatches))


def means_by_share(model: nn.Module, microbatches: Microbatches) -> None:
    N = sum((labels[:, 1:] != IGNORE).sum() for _, labels in microbatches)
    for tokens, labels in microbatches:
        if n := (labels[:, 1:] != IGNORE).sum():
            (next_token_loss(model, tokens, labels, "mean") * (n / N)).backward()


RIGHT: list[Loop] = [
    each_over_n,
    divided_at_the_end,
    one_backward,
    one_batch,
    assigned,
    counted_by_a_mask,
    buffers,
    means_by_share,
    rules.token_mean,
    rules.token_mean_once,
]


def on_one_line(verdict: Verdict) -> str:
    """What is read, wherever its lines break."""
    return " ".join(str(verdict).split())


@pytest.mark.parametrize("loop", RIGHT)
def test_a_right_loop_passes_however_it_is_written(loop: Loop) -> None:
    start = time.process_time()
    verdict = check.accumulate(loop)
    assert verdict.passed and all(ok for _, ok in verdict.checks), verdict
    assert on_one_line(verdict).startswith("5 of 5 checks Right: in every window a valid token weighs 1/N; ")
    assert time.process_time() - start < 2


def test_a_number_in_float32_on_the_way_is_told_and_accepted() -> None:
    def single(model: nn.Module, microbatches: Microbatches) -> None:
        share = 1 / torch.tensor(total(microbatches), dtype=torch.float32)
        for tokens, labels in microbatches:
            (next_token_loss(model, tokens, labels) * share).backward()

    verdict = check.accumulate(single)
    assert verdict.passed and "as of a number in float32 on the way" in verdict.sentence


# Wrong loops. What they have in common: a loss from the microbatch and the window, and a backward.


def loop_of(loss: Callable[[nn.Module, Tensor, Tensor, int, Microbatches], Tensor]) -> Loop:
    def loop(model: nn.Module, microbatches: Microbatches) -> None:
        for i, (tokens, labels) in enumerate(microbatches):
            loss(model, tokens, labels, i, microbatches).backward()

    return loop


def masked_mean(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    mask = labels[:, 1:] != IGNORE
    return (next_token_loss(model, tokens, labels.clamp(min=0), "none") * mask).sum() / mask.sum()


def fixed_k(model: nn.Module, microbatches: Microbatches) -> None:
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels, "mean") / 4).backward()


def first_only(model: nn.Module, microbatches: Microbatches) -> None:
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels) / total(microbatches)).backward()
        return


def backward_after_the_loop(model: nn.Module, microbatches: Microbatches) -> None:
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels) / total(microbatches)
    loss.backward()


def zero_grad_in_the_loop(model: nn.Module, microbatches: Microbatches) -> None:
    for tokens, labels in microbatches:
        model.zero_grad()
        next_token_loss(model, tokens, labels, "mean").backward()


def tokens_of_the_last(model: nn.Module, microbatches: Microbatches) -> None:
    for tokens, labels in microbatches:
        next_token_loss(model, tokens, labels).backward()
    for p in model.parameters():
        p.grad /= valid_tokens(labels)


def running_n(model: nn.Module, microbatches: Microbatches) -> None:
    n = 0
    for tokens, labels in microbatches:
        n += valid_tokens(labels)
        (next_token_loss(model, tokens, labels) / max(n, 1)).backward()


def running_total(model: nn.Module, microbatches: Microbatches) -> None:
    loss: Any = 0
    for tokens, labels in microbatches:
        loss = loss + next_token_loss(model, tokens, labels) / total(microbatches)
        loss.backward(retain_graph=True)


def divided_in_the_loop(model: nn.Module, microbatches: Microbatches) -> None:
    for tokens, labels in microbatches:
        next_token_loss(model, tokens, labels, "mean").backward()
        for p in model.parameters():
            p.grad /= len(microbatches)


def without_the_last(model: nn.Module, microbatches: Microbatches) -> None:
    for i in range(len(microbatches) - 1):
        (next_token_loss(model, *microbatches[i]) / total(microbatches)).backward()
    if len(microbatches) == 1:
        (next_token_loss(model, *microbatches[0]) * 0).backward()


def clipped(model: nn.Module, microbatches: Microbatches) -> None:
    each_over_n(model, microbatches)
    clip_grad_norm_(model.parameters(), 1.0)


def full_only(model: nn.Module, microbatches: Microbatches) -> None:
    full = [each for each in microbatches if valid_tokens(each[1])]
    for tokens, labels in full:
        (next_token_loss(model, tokens, labels, "mean") / len(full)).backward()


WRONG: dict[str, tuple[Loop, int, list[str]]] = {
    "mean of means": (
        rules.mean_of_means,
        2,
        ["single tokens weigh 0.56 to 3.05 times", "four means were added and divided by 4", "(mean-of-means)"],
    ),
    "sum of means": (
        rules.sum_of_means,
        0,
        ["is 4.00 times the full batch's", "2.23 to 12.18", "four means were added and never divided (sum-of-means)"],
    ),
    "token sum": (
        rules.token_sum,
        0,
        ["is 134.00 times the full batch's: four sums were added and never divided (token-sum)"],
    ),
    "divided twice": (
        rules.double_division,
        0,
        ["is 0.25 times the full batch's: four sums, each over N = 134,", "and divided by 4", "(double-division)"],
    ),
    "zero_grad in the loop": (
        rules.last_microbatch_only,
        0,
        [
            "Only the last of four",
            "1.00 times",
            "backward() ran four times (last-microbatch-only)",
            "fix: zero_grad once",
        ],
    ),
    "zero_grad in the loop of means": (
        zero_grad_in_the_loop,
        0,
        [
            "Only the last of four",
            "with 2.23 times",
            "ran four times; besides, four means were added and never divided",
        ],
    ),
    "backward after the loop": (
        backward_after_the_loop,
        0,
        ["Only the last of four", "with 1.00 times", "backward() ran once", "fix: call backward() on each loss"],
    ),
    "running index": (
        loop_of(lambda model, x, y, i, _: next_token_loss(model, x, y, "mean") / (i + 1)),
        0,
        ["is 2.08 times the full batch's", "four means were added, each divided by its place in the loop (i + 1)"],
    ),
    "padded count": (
        rules.padded_count,
        2,
        ["is 0.48 times the full batch's: four sums, each over 279, a count with the padding in it", "(padded-count)"],
    ),
    "counted without looking at -100": (
        loop_of(lambda model, x, y, i, all_: next_token_loss(model, x, y) / sum(y.numel() for _, y in all_)),
        0,
        ["is 0.47 times the full batch's: four sums, each over 288, the size of all label tensors"],
    ),
    "means over the padding": (
        loop_of(lambda model, x, y, i, all_: next_token_loss(model, x, y, "none").mean() / len(all_)),
        2,
        ["four means over targets and padding were added and divided by 4"],
    ),
    "unshifted count": (
        rules.unshifted_count,
        0,
        ["is 0.94 times the full batch's: four sums, each over 143, the labels before the shift", "(unshifted-count)"],
    ),
    "sequence means": (
        rules.sequence_means,
        2,
        ["weigh 0.48 to 3.72 times", "mean of each sequence", "divided by 9, the number of sequences (sequence-means)"],
    ),
    "K fixed in the code": (
        fixed_k,
        0,
        ["four means were added and divided by 4 in every window, whatever it holds (tail-divided-by-k)"],
    ),
    "a constant": (
        loop_of(lambda model, x, y, i, _: next_token_loss(model, x, y) / 100),
        0,
        ["is 1.34 times the full batch's: four sums were added and divided by 100 in every window"],
    ),
    "a mean of its own": (
        loop_of(lambda model, x, y, i, all_: masked_mean(model, x, y) / len(all_)),
        2,
        [
            "(mean-of-means)",
            "“a microbatch without a valid target” the gradient is not finite: a mean over 0 targets is",
        ],
    ),
    "0/0 alone": (
        loop_of(lambda model, x, y, i, all_: masked_mean(model, x, y) * valid_tokens(y) / total(all_)),
        4,
        ["In the check “a microbatch without a valid target” the gradient is not finite"],
    ),
    "a count of 0": (
        loop_of(lambda model, x, y, i, all_: next_token_loss(model, x, y) * (1 / valid_tokens(y)) / len(all_)),
        2,
        ["(mean-of-means)", "without a valid target” line 1 of <lambda>", "raises ZeroDivisionError: division by zero"],
    ),
    "means of those that are full": (
        full_only,
        2,
        ["four means were added and divided by 4, the microbatches that have a target"],
    ),
    "first only": (first_only, 0, ["Only the first of four", "with 1.00 times", "backward() ran once", "no return or"]),
    "all but the last": (without_the_last, 0, ["All but the last of four", "with 1.00 times", "ran three times"]),
    "tokens of the last": (
        tokens_of_the_last,
        0,
        ["is 2.23 times the full batch's: four sums, each over 60, the tokens of the last microbatch alone"],
    ),
    "running N": (
        running_n,
        0,
        ["four sums, each over the tokens seen so far and not over N = 134"],
    ),
    "batch size": (
        loop_of(lambda model, x, y, i, all_: next_token_loss(model, x, y) / sum(len(x) for x, _ in all_)),
        0,
        ["is 14.89 times the full batch's: four sums were added and divided by 9, the number of sequences"],
    ),
    "means over N": (
        loop_of(lambda model, x, y, i, all_: next_token_loss(model, x, y, "mean") / total(all_)),
        0,
        ["four means were added and divided by N = 134"],
    ),
    "backward on the running total": (
        running_total,
        0,
        ["(1.00 to 4.00 for single ones)", "the first four times: backward() ran on the running total"],
    ),
    ".grad divided in the loop": (
        divided_in_the_loop,
        0,
        ["four means were added, and .grad was divided by 4 after every backward()"],
    ),
    "wrong sign": (
        loop_of(lambda model, x, y, i, all_: -next_token_loss(model, x, y) / total(all_)),
        0,
        ["is -1.00 times the full batch's", "multiplied by -1 in every window"],
    ),
    "clipped": (
        clipped,
        0,
        ["has the length 1.00 in every window, the full batch's 1.95 to 3.79: it was clipped inside"],
    ),
    "no shift": (
        loop_of(
            lambda model, x, y, i, all_: (
                F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / total(all_)
            )
        ),
        0,
        ["judges the logits at t by the label at t", "the shift is missing"],
    ),
    "padding as a target": (
        loop_of(lambda model, x, y, i, all_: next_token_loss(model, x, y.clamp(min=0)) / total(all_)),
        2,
        ["Your loss judges the padding too, as if its label were 0"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loop_gets_the_sentence_meant_for_it(name: str) -> None:
    loop, passes, words = WRONG[name]
    verdict = check.accumulate(loop)
    assert not verdict.passed and sum(ok for _, ok in verdict.checks) == passes, verdict
    assert on_one_line(verdict).startswith(f"{passes} of 5 checks {' '.join(verdict.sentence.split())} ")
    for each in words:
        assert each in verdict.sentence, (each, verdict.sentence)


def test_the_numbers_are_those_of_the_first_window() -> None:
    assert [valid_tokens(labels) for _, labels in _window(*WINDOWS[0][1:])] == [30, 33, 11, 60]


# The tables.

# Targets of two microbatches: of 1 and 2 in the first, padded to 2, and of 1 in the second. N = 4, K = 2, B = 3.
BY_HAND: list[tuple[dict[str, Part], dict[str, list[float]]]] = [
    (
        WHICH,
        {"all": [1, 1, 1], "last": [0, 0, 1], "first": [1, 1, 0], "but last": [1, 1, 0], "but first": [0, 0, 1]},
    ),
    (
        DIVIDED,
        {
            **{"N": [4, 4, 4], "1": [1, 1, 1], "n": [3, 3, 1], "PADDED": [5, 5, 5], "padded": [4, 4, 1]},
            **{"SIZE": [8, 8, 8], "size": [6, 6, 2], "LABELS": [7, 7, 7], "labels": [5, 5, 2], "seen": [3, 3, 4]},
            **{"last": [1, 1, 1], "first": [3, 3, 3], "s": [1, 2, 1], "s b": [2, 4, 1], "b": [2, 2, 1]},
        },
    ),
    (
        THEN,
        {
            **{"": [1, 1, 1], "K": [1 / 2] * 3, "i": [1, 1, 1 / 2], "N": [1 / 4] * 3, "B": [1 / 3] * 3},
            **{
                "full": [1 / 2] * 3,
                "total": [2, 2, 1],
                "grad K": [1 / 4, 1 / 4, 1 / 2],
                "grad N": [1 / 16, 1 / 16, 1 / 4],
            },
        },
    ),
]


@pytest.mark.parametrize(("table", "by_hand"), BY_HAND)
def test_every_row_of_the_tables_is_what_is_counted_by_hand(
    table: dict[str, Part], by_hand: dict[str, list[float]]
) -> None:
    f = counts(made([[[8], [3, 2]], [[1]]]))
    assert list(table) == list(by_hand)
    for key, part in table.items():
        assert part.value(f).tolist() == by_hand[key], key


def test_an_empty_microbatch_is_counted_by_its_padding_alone() -> None:
    f = counts(made([[[]], [[3, 2]]]))
    assert (f.K.item(), f.full.item(), f.first.item(), f.PADDED.item(), f.LABELS.item()) == (2, 1, 0, 3, 3)


def weighted(loop: Decisions) -> Loop:
    """A loop that gives every sequence the weight that the tables predict, and so stands for all that do the same."""

    def run(model: nn.Module, microbatches: Microbatches) -> None:
        f = counts(microbatches)
        weights = iter((predict(loop, f) / f.N).tolist())
        for tokens, labels in microbatches:
            valid = (labels[:, 1:] != IGNORE).sum(1) > 0
            each = torch.tensor([next(weights) if ok else 0.0 for ok in valid])
            (next_token_loss(model, tokens, labels, "none").sum(1) * each).sum().backward()

    return run


ONE_DECISION = [
    *(("all", divided, "") for divided in list(DIVIDED)[1:]),
    *(("all", "N", then) for then in THEN if then not in ("", "N")),
    *((which, "N", "") for which in list(WHICH)[1:]),
]


@pytest.mark.parametrize("loop", [*ONE_DECISION, ("all", "n", "i"), ("but first", "n", "K"), ("last", "1", "B")])
def test_every_row_of_the_tables_is_told_in_its_words(loop: Decisions) -> None:
    sentence = check.accumulate(weighted(loop)).sentence
    which, divided, then = loop
    parts = [WHICH[which], DIVIDED[divided], THEN[then]]
    for part in parts if which == "all" else parts[:1]:
        words = part.words.partition("{")[0].strip(" ,")
        assert words in sentence, (words, sentence)


def test_no_two_loops_that_are_equally_simple_have_the_same_weights_everywhere() -> None:
    f = counts(*(_window(*row[1:]) for row in WINDOWS))
    found = {loop: predict(loop, f) for loop in itertools.product(["all"], DIVIDED, THEN)}
    for one, other in itertools.combinations(found, 2):
        if _cost(one) == _cost(other):
            assert not torch.allclose(found[one], found[other], rtol=1e-6), (one, other)


@pytest.mark.parametrize("loop", [loop for loop in NAMED if loop[2] != "always"])
def test_a_loop_that_has_a_rule_has_the_weights_of_that_rule(loop: Decisions) -> None:
    for row in WINDOWS:
        microbatches = _window(*row[1:])
        w = window(microbatches)
        weights = rules.rule(NAMED[loop]).sequence_weights(w)[w.sequences > 0]
        assert torch.allclose(predict(loop, counts(microbatches)), weights, rtol=1e-14)


@given(st.lists(st.integers(10, 300), min_size=6, max_size=6))
@settings(max_examples=12, deadline=None)
def test_weights_without_a_name_are_told_as_they_are(hundredths: list[int]) -> None:
    weights = [1.25, 0.5, *(each / 100 for each in hundredths)]  # no loop of the tables begins like that

    def loop(model: nn.Module, microbatches: Microbatches) -> None:
        for weight, (tokens, labels) in zip(weights, microbatches, strict=False):
            (next_token_loss(model, tokens, labels) * weight / total(microbatches)).backward()

    sentence = check.accumulate(loop).sentence
    assert sentence.startswith("The microbatches of 30, 33, 11 and 60 tokens got 1.25, 0.50, ")
    assert sentence.endswith(
        f"{weights[2]:.2f} and {weights[3]:.2f} times the right weight: a loop that has no name here."
    )


def test_weights_of_single_sequences_and_what_is_no_sum_of_gradients() -> None:
    def by_sequence(model: nn.Module, microbatches: Microbatches) -> None:
        for tokens, labels in microbatches:
            weight = torch.arange(len(tokens)) + 1.0
            ((next_token_loss(model, tokens, labels, "none").sum(1) * weight).sum() / total(microbatches)).backward()

    def decayed(model: nn.Module, microbatches: Microbatches) -> None:
        each_over_n(model, microbatches)
        for p in model.parameters():
            p.grad += 0.1 * p.data

    sentence = check.accumulate(by_sequence).sentence
    assert "The sequences of" in sentence and "1.00, 2.00, 3.00, 1.00, 2.00" in sentence
    sentence = check.accumulate(decayed).sentence
    assert "no weighted sum of the microbatches' gradients" in sentence and "% of its length" in sentence


def test_a_weight_near_one_is_told_to_more_digits() -> None:
    def close(model: nn.Module, microbatches: Microbatches) -> None:
        for tokens, labels in microbatches:
            (next_token_loss(model, tokens, labels) / (total(microbatches) + 0.001)).backward()

    assert "got 0.999993, 0.999993, 0.999993 and 0.999993 times" in check.accumulate(close).sentence


@pytest.mark.parametrize(
    ("only_last", "denominator", "told"),
    [
        (False, lambda N: N / 0.37, "got 0.37, 0.37, 0.37 and 0.37 times"),  # the same number in every window?
        (True, lambda N: 62, "got 0, 0, 0 and 2.16 times"),  # its targets and padding, or labels unshifted?
    ],
)
def test_what_one_window_cannot_tell_apart_gets_no_name(
    only_last: bool, denominator: Callable[[int], float], told: str
) -> None:
    windows: list[Microbatches] = []

    def loop(model: nn.Module, microbatches: Microbatches) -> None:
        windows.append(microbatches)
        if len(windows) > 1:
            raise KeyError("second")
        for tokens, labels in microbatches[3 * only_last :]:
            (next_token_loss(model, tokens, labels) / denominator(total(microbatches))).backward()

    sentence = check.accumulate(loop).sentence
    assert f"{told} the right weight: a loop that has no name here. In the check" in sentence, sentence
    assert "KeyError: 'second'" in sentence


def test_a_first_gradient_that_is_not_finite_is_all_that_is_told() -> None:
    windows: list[Microbatches] = []

    def loop(model: nn.Module, microbatches: Microbatches) -> None:
        windows.append(microbatches)
        for tokens, labels in microbatches:
            (next_token_loss(model, tokens, labels) * (float("nan") if len(windows) == 1 else 1)).backward()

    assert check.accumulate(loop).sentence == "The gradient is not finite."


def test_an_endless_loop_is_called_once() -> None:
    calls: list[object] = []

    def endless(*arguments: object) -> None:
        calls.append(arguments)
        while True:
            pass

    verdict = check.accumulate(endless, seconds=0.2)
    assert len(calls) == 1 and [ok for _, ok in verdict.checks] == [False] * 5


# What a loop may not do, and what stops it.


def changes_weights(model: nn.Module, microbatches: Microbatches) -> None:
    each_over_n(model, microbatches)
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad


def changes_labels(model: nn.Module, microbatches: Microbatches) -> None:
    for _, labels in microbatches:
        labels[:, 0] = IGNORE
    each_over_n(model, microbatches)


def freezes(model: nn.Module, microbatches: Microbatches) -> None:
    each_over_n(model, microbatches)
    next(model.parameters()).requires_grad_(False)


def evaluates(model: nn.Module, microbatches: Microbatches) -> None:
    model.eval()
    each_over_n(model, microbatches)


def on_a_copy(model: nn.Module, microbatches: Microbatches) -> None:
    each_over_n(copy.deepcopy(model), microbatches)


def cleared(model: nn.Module, microbatches: Microbatches) -> None:
    each_over_n(model, microbatches)
    model.zero_grad()


def zeroed(model: nn.Module, microbatches: Microbatches) -> None:
    each_over_n(model, microbatches)
    model.zero_grad(set_to_none=False)


def forgets_backward(model: nn.Module, microbatches: Microbatches) -> None:
    sum(next_token_loss(model, tokens, labels) for tokens, labels in microbatches) / total(microbatches)


def returns_the_loss(model: nn.Module, microbatches: Microbatches) -> Tensor:
    return sum(next_token_loss(model, tokens, labels) for tokens, labels in microbatches) / total(microbatches)


def some_weights(model: nn.Module, microbatches: Microbatches) -> None:
    each_over_n(model, microbatches)
    next(model.parameters()).grad = None


def yields(model: nn.Module, microbatches: Microbatches) -> Any:
    yield each_over_n(model, microbatches)


async def awaits(model: nn.Module, microbatches: Microbatches) -> None:
    each_over_n(model, microbatches)


def without_grad(model: nn.Module, microbatches: Microbatches) -> None:
    with torch.no_grad():
        each_over_n(model, microbatches)


def item(model: nn.Module, microbatches: Microbatches) -> None:
    loss = sum(next_token_loss(model, tokens, labels).item() for tokens, labels in microbatches)
    torch.tensor(loss).backward()


def backward_twice(model: nn.Module, microbatches: Microbatches) -> None:
    loss: Any = 0
    for tokens, labels in microbatches:
        loss = loss + next_token_loss(model, tokens, labels)
        loss.backward()


def not_reduced(model: nn.Module, microbatches: Microbatches) -> None:
    for tokens, labels in microbatches:
        next_token_loss(model, tokens, labels, "none").backward()


def huge(model: nn.Module, microbatches: Microbatches) -> None:
    torch.empty(10**12)


def leaves_python(model: nn.Module, microbatches: Microbatches) -> None:
    sys.exit()


def for_ever(model: nn.Module, microbatches: Microbatches) -> None:
    while True:
        each_over_n(model, microbatches)


def infinite(model: nn.Module, microbatches: Microbatches) -> None:
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels) * float("inf")).backward()


FAULTS: dict[Any, str] = {
    changes_weights: "Your function changes the model's weights",
    changes_labels: "Your function changes the microbatches",
    freezes: "Your function switches requires_grad off",
    evaluates: "Your function leaves the model in eval mode",
    on_a_copy: "There is no gradient in .grad: the model was never called, though a copy",
    cleared: "There is no gradient in .grad: backward() ran four times, and .grad was cleared after it",
    zeroed: "The gradient is zero: backward() ran four times",
    forgets_backward: "There is no gradient in .grad: backward() was never called on a loss of this model",
    returns_the_loss: "There is no gradient in .grad: your function returns a Tensor and calls no backward()",
    some_weights: "1 of 6 weight tensors have no gradient",
    yields: "Nothing in your function ran: with yield or async",
    awaits: "Nothing in your function ran: with yield or async",
    without_grad: "does not require grad and does not have a grad_fn (the loss is cut off from the weights",
    item: "Line 3 of item, `torch.tensor(loss).backward()`, raises RuntimeError: element 0",
    backward_twice: "Line 5 of backward_twice, `loss.backward()`, raises RuntimeError: Trying to backward through",
    not_reduced: "the loss is still one number per token: add them up before backward()",
    huge: "Line 2 of huge, `torch.empty(10**12)`, raises RuntimeError: can't allocate memory",
    leaves_python: "Line 2 of leaves_python, `sys.exit()`, raises SystemExit (it tries to end Python",
    for_ever: "was still running after 0.5 s, and was stopped: does a loop there end?",
    infinite: "The gradient is not finite.",
    max: "Your function raises TypeError: ",
    None: "This is a NoneType and no function: hand over the function itself",
    (lambda model: None): "Your function takes (model), and is called with (model, microbatches)",
}


@pytest.mark.parametrize("function", FAULTS)
def test_a_fault_is_told_in_one_sentence(function: Any) -> None:
    verdict = check.accumulate(function, seconds=0.5 if function is for_ever else 5)
    assert not verdict.passed and [ok for _, ok in verdict.checks] == [False] * 5
    assert FAULTS[function] in verdict.sentence


def test_what_is_printed_and_changed_beside_a_right_gradient_is_told() -> None:
    def loud(model: nn.Module, microbatches: Microbatches) -> None:
        for i in range(100_000):
            print("loss", i)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float16)
        each_over_n(model, microbatches)

    state = torch.get_rng_state()
    verdict = check.accumulate(loud)
    assert verdict.passed and torch.get_default_dtype() == torch.float32 and torch.equal(torch.get_rng_state(), state)
    assert verdict.sentence.endswith(
        "(It also changed torch's random numbers and torch's default dtype; that was put back.)"
    )
    assert "Your function printed:\nloss 0\nloss 1\n" in str(verdict) and "(100,000 lines, " in str(verdict)
    assert len(str(verdict)) < 1000


def test_a_slow_loop_that_is_right_up_to_its_deadline_does_not_pass() -> None:
    def slow(model: nn.Module, microbatches: Microbatches) -> None:
        time.sleep(0.2)
        each_over_n(model, microbatches)

    verdict = check.accumulate(slow, seconds=0.5)
    assert 0 < sum(ok for _, ok in verdict.checks) < 5 and "`time.sleep(0.2)`, was still running" in verdict.sentence


def test_an_interrupt_is_the_learners_own() -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for judge in (check.accumulate, check.token_mean):
        with pytest.raises(KeyboardInterrupt):
            judge(interrupted)


ACTIONS: list[Callable[[Any, Any], Any]] = [
    each_over_n,
    rules.sum_of_means,
    zeroed,
    lambda model, _: model.zero_grad(),
    lambda model, _: [setattr(p, "grad", torch.full_like(p, float("nan"))) for p in model.parameters()],
    lambda model, _: [setattr(p, "grad", torch.ones_like(p)) for p in model.parameters()],
    lambda model, _: [setattr(p, "grad", None) for p in list(model.parameters())[1:]],
    lambda model, _: delattr(model, "embedding"),
    lambda model, _: model.float(),
    lambda model, _: model.register_parameter("position", None),
    lambda model, _: setattr(model, "forward", None),
    lambda model, microbatches: microbatches.clear(),
    lambda model, microbatches: microbatches[0][1].resize_(1, 1),
    lambda model, microbatches: microbatches.append(microbatches[0]),
    lambda model, microbatches: microbatches[0] + 1,
    lambda model, _: 1 / 0,
    lambda model, _: sys.exit(3),
    lambda model, _: torch.set_grad_enabled(False),
    lambda model, _: print("x" * 10_000),
    lambda model, _: sys.setrecursionlimit(10_000),
]


@given(st.lists(st.sampled_from(ACTIONS), max_size=4), st.sampled_from([None, 3, "text", float("nan"), object()]))
@settings(max_examples=40, deadline=None)
def test_whatever_a_function_does_there_is_a_verdict(actions: list[Loop], value: object) -> None:
    def garbage(*arguments: Any) -> object:
        for action in actions:
            action(*arguments)
        return value

    before = torch.is_grad_enabled(), torch.get_default_dtype(), sys.getrecursionlimit(), sys.stdout
    for judge in (check.accumulate, check.token_mean):
        verdict = judge(garbage)
        assert len(verdict.checks) == 5 and verdict.passed == all(ok for _, ok in verdict.checks)
        assert verdict.sentence.endswith((".", "?", ")")) and len(str(verdict)) < 1500
    assert before == (torch.is_grad_enabled(), torch.get_default_dtype(), sys.getrecursionlimit(), sys.stdout)
