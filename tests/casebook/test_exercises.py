"""Diagnoses and repairs as learners give them, right and wrong, and the sentence that each of them gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from labkit import casebook, check, rules
from labkit.casebook.exercises import CLIPPED, SCHEDULED
from labkit.casebook.symptoms import SHOWN
from labkit.nets import next_token_loss, valid_tokens

torch.set_num_threads(1)
KEY = {seed: [each.word for each in casebook.symptoms(seed)] for seed in range(4)}


def place(word: str) -> tuple[int, int]:
    """A seed and a place where that word is the right answer."""
    return next((seed, KEY[seed].index(word)) for seed in KEY if word in KEY[seed])


def told(true: str, answer: object) -> str:
    """The sentence on one wrong answer among right ones."""
    seed, at = place(true)
    verdict = check.diagnosis([answer if n == at else word for n, word in enumerate(KEY[seed])], seed=seed)  # type: ignore[misc]
    assert not verdict.passed and sum(ok for _, ok in verdict.checks) == 4 and not verdict.checks[at][1]
    assert verdict.sentence.startswith(f"Symptom {at + 1}: "), verdict
    return verdict.sentence


@pytest.mark.parametrize("seed", KEY)
def test_the_right_words_pass_as_list_tuple_and_by_number(seed: int) -> None:
    for answers in (KEY[seed], tuple(KEY[seed]), dict(enumerate(KEY[seed], 1))):
        assert check.diagnosis(answers, seed=seed).passed
    assert {word for words in KEY.values() for word in words} == set(SHOWN)


WORDS: list[tuple[str, object, str]] = [
    ("mean-of-means", "sum-of-means", "under sum-of-means the weights × N would be "),
    ("mean-of-means", "token-mean", "under token-mean the weights × N would be 1, 1, 1"),
    ("mean-of-means", "tail-divided-by-k", ": a tail is divided by more than it has"),
    ("double-division", "mean-of-means", "under mean-of-means the weights × N would be "),
    ("double-division", "tail-divided-by-k", "weight × count is the same for all, N over the declared K; it is "),
    ("tail-divided-by-k", "mean-of-means", "under mean-of-means the weights × N would be "),
    ("schedule-per-microbatch", "token-mean", "The weights are those of token-mean, and something else is off."),
    ("schedule-per-microbatch", "adam-count-per-microbatch", "that happened once. Look here: the schedule stepped "),
    ("adam-count-per-microbatch", "schedule-per-microbatch", "that happened once. Look here: Adam counted "),
    ("adam-count-per-microbatch", "moments-per-microbatch", "the optimizer would step "),
    ("clip-per-microbatch", "step-per-microbatch", "that happened once. Look here: a clip was called "),
    ("clip-per-microbatch", "clip-running-sum", "clip-running-sum is not what these numbers show. Look here: a clip"),
    ("last-microbatch-only", "double-division", "and they are 0, 0"),
    ("last-microbatch-only", "decay-per-microbatch", "leaves no trace in these numbers, and they are not those of a"),
    ("last-microbatch-only", "padded-count", "padded-count is not what these numbers show. Look here: the weights × N"),
    ("sum-of-means", "mean of means", "there is no rule 'mean of means': try 'mean-of-means'."),
    ("sum-of-means", 3, "3 is no word: try 'mean-of-means'."),
]


@pytest.mark.parametrize(("true", "answer", "words"), WORDS)
def test_a_wrong_word_is_told_what_speaks_against_it(true: str, answer: object, words: str) -> None:
    assert words in told(true, answer)


def test_the_numbers_against_a_word_are_those_of_its_algebra() -> None:
    seed, at = place("mean-of-means")
    symptom = casebook.symptoms(seed)[at]
    would = ", ".join(f"{sum(symptom.counts) / n:.3g}" for n in symptom.counts)
    assert f"would be {would}, and they are" in told("mean-of-means", "sum-of-means")
    tail, place_of_tail = place("tail-divided-by-k")
    counts = casebook.symptoms(tail)[place_of_tail].counts
    said = told("mean-of-means", "tail-divided-by-k")
    assert f"the means are divided by {len(symptom.counts)}, and the window has {len(symptom.counts)}" in said
    found = casebook.symptoms(tail)[place_of_tail].report.token_weights
    assert [w * n for w, n in zip(found, counts, strict=True)] == pytest.approx(
        [sum(counts) / (len(counts) + 2)] * len(counts)
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["", "mean-of-means", "nothing", 1, None, *SHOWN]), min_size=5, max_size=5))
def test_any_five_answers_are_judged_one_by_one(answers: list[Any]) -> None:
    verdict = check.diagnosis(answers)
    assert [ok for _, ok in verdict.checks] == [a == b for a, b in zip(answers, KEY[0], strict=True)]
    assert verdict.passed == (answers == KEY[0]) and "Look here: ." not in verdict.sentence


def test_every_rule_of_the_table_gets_a_sentence() -> None:
    rules.rule("overflow-disagreement")
    for word in rules.every():
        for true in SHOWN:
            if word != true:
                assert len(told(true, word)) > 40


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ("mean-of-means", "This is a str: give a list of 5 words."),
        (3, "This is a int"),
        (["mean-of-means"], "These are 1 answers, and there are 5 symptoms."),
        ({1: "a", 2: "b"}, "There is no answer to symptom 3: give a word for each of 1 to 5."),
    ],
)
def test_what_is_no_answer_is_told(answers: Any, words: str) -> None:
    verdict = check.diagnosis(answers)
    assert not verdict.passed and words in verdict.sentence and len(verdict.checks) == 5


# The repair.

Step = Callable[..., Any]
Loss = Callable[..., Tensor]


def total(microbatches: Any) -> int:
    return sum(valid_tokens(labels) for _, labels in microbatches)


def share(model: Any, tokens: Tensor, labels: Tensor, window: Any) -> Tensor:
    return next_token_loss(model, tokens, labels) / total(window)


def shipped(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "mean") / 4
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        scheduler.step()
    optimizer.step()
    optimizer.zero_grad()


def count_first(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    for tokens, labels in microbatches:
        share(model, tokens, labels, microbatches).backward()
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def divide_last(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    optimizer.zero_grad()
    N = 0
    for tokens, labels in microbatches:
        next_token_loss(model, tokens, labels).backward()
        N += valid_tokens(labels)
    for p in model.parameters():
        p.grad /= N
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()


def clip_by_hand(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
    optimizer.zero_grad()
    losses = [share(model, tokens, labels, microbatches) for tokens, labels in microbatches]
    torch.stack(losses).sum().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad *= (0.5 / norm).clamp(max=1.0)
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize("step", [count_first, divide_last, clip_by_hand])
def test_a_mended_step_passes_however_it_is_written(step: Step) -> None:
    verdict = check.repaired(step)
    assert verdict.passed and all(ok for _, ok in verdict.checks), verdict
    assert verdict.sentence.startswith("Right: one step on the token mean")


def step_of(
    loss: Loss = share, clip: str = "after", schedule: str = "after", zero: bool = True, limit: float = 0.5
) -> Step:
    def step(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
        def at(place: str) -> None:
            if clip == place:
                clip_grad_norm_(model.parameters(), limit)
            if schedule == place:
                scheduler.step()

        for tokens, labels in microbatches:
            loss(model, tokens, labels, microbatches).backward()
            at("in")
        at("before")
        if clip == "after":
            clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        if schedule == "after":
            scheduler.step()
        if clip == "late":
            clip_grad_norm_(model.parameters(), limit)
        if zero:
            optimizer.zero_grad()

    return step


WEIGHTS, EMPTY, TAIL = "unequal microbatches", "a microbatch without a target", "a window that K does not fill"
ALL = {WEIGHTS, TAIL, EMPTY, CLIPPED, SCHEDULED}
SHIPPED_STEPS: list[tuple[Step, set[str], list[str]]] = [
    (shipped, ALL, ["mean-of-means: ", "clip-per-microbatch: ", "schedule-per-microbatch: The schedule stepped four"]),
    (
        step_of(lambda m, t, y, w: next_token_loss(m, t, y, "mean") / 4),
        {WEIGHTS, TAIL, EMPTY},
        ["mean-of-means: The microbatches got 3.5, 1.27, 0.824, 0.583 times their right weight. The fix: count the"],
    ),
    (
        step_of(lambda m, t, y, w: next_token_loss(m, t, y, "mean")),
        {WEIGHTS, TAIL, EMPTY},
        ["sum-of-means: The microbatches got 14, 5.09, 3.29, 2.33 times"],
    ),
    (step_of(lambda m, t, y, w: next_token_loss(m, t, y)), {WEIGHTS, TAIL, EMPTY}, ["token-sum: The gradient is 56"]),
    (
        step_of(lambda m, t, y, w: share(m, t, y, w) / len(w)),
        {WEIGHTS, TAIL, EMPTY},
        ["double-division: The gradient is 0.25 times the right one."],
    ),
    (step_of(clip="in"), {WEIGHTS, TAIL, EMPTY, CLIPPED}, ["clip-per-microbatch: ", "move clip_grad_norm_ behind"]),
    (step_of(clip=""), {CLIPPED}, ["A gradient of length 1.93 was stepped with, and 0.5 is allowed; no clip was"]),
    (step_of(clip="late"), {CLIPPED}, ["A gradient of length 1.93", "a clip was called once. Clip once, after the"]),
    (step_of(limit=5.0), {CLIPPED}, ["A gradient of length 1.93 was stepped with, and 0.5 is allowed"]),
    (step_of(limit=0.1), {CLIPPED}, ["The longest gradient that was stepped with has length 0.1: clip at 0.5."]),
    (step_of(schedule="in"), {SCHEDULED}, ["schedule-per-microbatch: The schedule stepped four times in one window"]),
    (step_of(schedule=""), {SCHEDULED}, ["The schedule never stepped: call scheduler.step() once"]),
    (step_of(schedule="before"), {SCHEDULED}, ["The schedule stepped before the optimizer: its first learning rate"]),
    (step_of(zero=False), {WEIGHTS, TAIL, EMPTY}, ["stale-gradient: Window 2 still holds the gradient"]),
    (lambda model, optimizer, scheduler, microbatches: None, ALL, ["no-step: No optimizer made a step"]),
    (lambda model, optimizer, scheduler, microbatches: 1 / 0, ALL, ["No verdict: the step raises ZeroDivisionError"]),
    (lambda model: None, ALL, ["Your function takes (model), and is called with (model, optimizer, scheduler, micro"]),
    (3, ALL, ["This is a int and no function"]),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("step", "failing", "words"), SHIPPED_STEPS)
def test_what_is_still_wrong_is_named(step: Step, failing: set[str], words: list[str]) -> None:
    verdict = check.repaired(step)
    assert {name for name, ok in verdict.checks if not ok} == failing and not verdict.passed, verdict
    for each in words:
        assert each in verdict.sentence, verdict.sentence


def test_a_mean_of_each_by_its_share_fails_only_on_the_empty_microbatch() -> None:
    def by_share(m: Any, t: Tensor, y: Tensor, w: Any) -> Tensor:
        losses = next_token_loss(m, t, y.clamp(min=0), "none")
        mask = y[:, 1:] != -100
        return (losses * mask).sum() / mask.sum() * (valid_tokens(y) / total(w))

    verdict = check.repaired(step_of(by_share))
    assert {name for name, ok in verdict.checks if not ok} == {EMPTY}, verdict
    assert verdict.sentence.startswith("In the check “a microbatch without a target” non-finite: ")


def test_an_endless_step_ends_and_random_numbers_are_left_alone() -> None:
    def endless(model: Any, optimizer: Any, scheduler: Any, microbatches: Any) -> None:
        while True:
            pass

    state = torch.get_rng_state()
    assert "was still running" in check.repaired(endless, seconds=1.5).sentence
    assert torch.equal(torch.get_rng_state(), state)
