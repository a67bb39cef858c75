"""Steps and throughputs as learners write them, right and wrong, the sentence that each gets, and the score."""

from __future__ import annotations

import itertools
import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from labkit import check, corpus
from labkit.nets import IGNORE, next_token_loss, valid_tokens
from labkit.throughput import exercises
from labkit.throughput.exercises import CHECKS, LENGTH, MOST, ROWS, TOKENS_PER_SECOND, plain_step, rows_of, speed_score

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs suffice where no one looks at the time."""
    monkeypatch.setattr(speed_score, "RUNS", 3)


def eights(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    optimizer.zero_grad()
    for x, y in zip(tokens.split(8), labels.split(8), strict=True):
        (next_token_loss(model, x, y) / valid_tokens(labels)).backward()
    optimizer.step()


def sorted_and_cut(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    N, lengths = valid_tokens(labels), (labels != IGNORE).sum(1)
    for rows in lengths.argsort(descending=True).split(8):
        longest = int(lengths[rows].max())
        (next_token_loss(model, tokens[rows, :longest], labels[rows, :longest]) / N).backward()
    optimizer.step()
    optimizer.zero_grad()


def by_hand(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    """Inputs without their last column, sums first and one division of the gradient at the end."""
    for p in model.parameters():
        p.grad = None
    for at in range(0, len(tokens), 5):
        logits, targets = model(tokens[at : at + 5, :-1]), labels[at : at + 5, 1:]
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum").backward()
    for p in model.parameters():
        p.grad /= (labels[:, 1:] != IGNORE).sum()
    optimizer.step()


@pytest.mark.parametrize("function", [plain_step, eights, sorted_and_cut, by_hand])
def test_a_right_step_however_it_is_written(function: Any) -> None:
    verdict = check.train_step(function)
    assert verdict.passed and len(verdict.checks) == 4, verdict
    assert verdict.sentence.startswith("Right. Score: ") and "times the valid tokens/s of one row" in verdict.sentence


def loop(
    loss: Any, *, b: int = 8, rows: slice = slice(None), width: int = LENGTH, each: Any = None, first: Any = None
) -> Any:
    """A step with one thing changed."""

    def step(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
        (first or optimizer.zero_grad)()
        parts = list(zip(tokens[rows, :width].split(b), labels[rows, :width].split(b), strict=True))
        for x, y in parts:
            f = SimpleNamespace(model=model, x=x, y=y, N=valid_tokens(labels), K=len(parts), labels=labels)
            loss(f).backward()
            if each:
                each(optimizer)
        optimizer.step()

    return step


def token_mean(f: Any) -> Any:
    return next_token_loss(f.model, f.x, f.y) / f.N


def mean(f: Any) -> Any:
    return next_token_loss(f.model, f.x, f.y, "mean")


def one_backward(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    optimizer.zero_grad()
    parts = zip(tokens.split(8), labels.split(8), strict=True)
    (sum(next_token_loss(model, x, y) for x, y in parts) / valid_tokens(labels)).backward()
    optimizer.step()


def last_backward(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    optimizer.zero_grad()
    for x, y in zip(tokens.split(8), labels.split(8), strict=True):
        loss = next_token_loss(model, x, y) / valid_tokens(labels)
        if len(y) == 8 and torch.equal(y, labels[-8:]):
            loss.backward()
    optimizer.step()


def dropped(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    optimizer.zero_grad()
    for at in range(ROWS // 6):
        x, y = tokens[6 * at : 6 * at + 6], labels[6 * at : 6 * at + 6]
        (next_token_loss(model, x, y) / valid_tokens(labels)).backward()
    optimizer.step()


def clipped(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    optimizer.zero_grad()
    for x, y in zip(tokens.split(8), labels.split(8), strict=True):
        (next_token_loss(model, x, y) / valid_tokens(labels)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def no_step(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    optimizer.step = lambda: None
    eights(model, optimizer, tokens, labels)


def changes_labels(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    labels[:, 1] = IGNORE
    eights(model, optimizer, tokens, labels)


def other_tokens(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    eights(model, optimizer, tokens.flip(1), labels)


def twice(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    next_token_loss(model, tokens[:8], labels[:8])
    eights(model, optimizer, tokens, labels)


def unpacks(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    for _x, _y in tokens:
        pass


def endless(model: Any, optimizer: Any, tokens: Any, labels: Any) -> None:
    while True:
        pass


WRONG: list[tuple[Any, list[str]]] = [
    (
        loop(lambda f: mean(f) / f.K),
        ["The microbatches got 1.35, 0.819, 1.09, 0.894 times their right weight (mean-of-means)", "count the valid"],
    ),
    (loop(mean), ["5.41, 3.27, 4.34, 3.58 times their right weight (sum-of-means)"]),
    (loop(lambda f: next_token_loss(f.model, f.x, f.y)), ["812 times the right one (token-sum)"]),
    (loop(lambda f: token_mean(f) / f.K), ["0.25 times the right one (double-division)"]),
    (
        loop(lambda f: next_token_loss(f.model, f.x, f.y) / f.labels[:, 1:].numel()),
        ["Every sum was divided by 2016, padding and all (padded-count)"],
    ),
    (
        loop(lambda f: next_token_loss(f.model, f.x, f.y) / (f.labels != IGNORE).sum()),
        ["divided by 844, the labels before the shift (unshifted-count)"],
    ),
    (loop(token_mean, b=16), ["16 rows went through the model at once, and the memory holds 8."]),
    (loop(mean, b=ROWS), ["32 rows went through the model at once, and the memory holds 8."]),
    (
        one_backward,
        ["32 rows wait for a backward() at once", "call backward() on each loss before the next forward"],
    ),
    (last_backward, ["0, 0, 0, 1 times their right weight", "The fix: call backward() in the loop, on each loss"]),
    (
        loop(token_mean, each=lambda optimizer: optimizer.step()),
        ["The optimizer stepped five times in one window (step-per-microbatch)"],
    ),
    (
        loop(token_mean, each=lambda optimizer: optimizer.zero_grad()),
        ["cleared between the last backward and the step"],
    ),
    (loop(token_mean, first=lambda: None), ["Window 2 still holds the gradient of the window before"]),
    (no_step, ["No optimizer made a step, and no weight moved (no-step)"]),
    (clipped, ["The gradient was clipped inside: leave that out here."]),
    (loop(token_mean, width=20), ["Row 2 has 25 tokens, and 20 went through the model: cut only padding."]),
    (loop(token_mean, rows=slice(1, None)), ["1 of 32 rows never went through the model, the first is row 0"]),
    (dropped, ["2 of 32 rows never went through the model, the first is row 30", "a short microbatch is left"]),
    (twice, ["Row 0 went through the model two times, and once is enough."]),
    (other_tokens, ["A row went through the model that is none of the batch"]),
    (changes_labels, ["Your function changes tokens or labels, and the next epoch sees them again."]),
    (lambda model, optimizer, tokens, labels: None, ["The model was never called: give rows to model"]),
    (unpacks, ["Line 2 of unpacks", "ValueError: too many values to unpack"]),
    (lambda model: None, ["Your function takes (model), and is called with (model, optimizer, tokens, labels)."]),
    (7, ["This is a int and no function"]),
]


@pytest.mark.parametrize(("function", "words"), WRONG)
def test_a_wrong_step_is_named(function: Any, words: list[str]) -> None:
    verdict = check.train_step(function)
    assert not verdict.passed and "Score" not in verdict.sentence, verdict
    for each in words:
        assert each in verdict.sentence, verdict.sentence


def test_the_checks_that_hold_are_those_that_do() -> None:
    def held(function: Any) -> list[bool]:
        found = check.train_step(function).checks
        assert [name for name, _ in found] == list(CHECKS)
        return [ok for _, ok in found]

    assert held(loop(mean)) == [True, True, False, True]
    assert held(loop(token_mean, b=16)) == [True, False, True, True]
    assert held(loop(token_mean, first=lambda: None)) == [True, True, True, False]
    assert held(loop(token_mean, width=20)) == [False, True, False, False]


def test_an_endless_step_is_stopped() -> None:
    verdict = check.train_step(endless, seconds=0.3)
    assert not verdict.passed and "was still running after 0.3 s" in verdict.sentence


def test_a_hint_says_what_is_left_to_gain() -> None:
    assert "A forward may take 8 rows, and yours took 1 on average." in check.train_step(plain_step).sentence
    lengths = (corpus.batch(399, ROWS, LENGTH, text="made")[1] != IGNORE).sum()
    padding = 100 * (1 - int(lengths) / (ROWS * LENGTH))
    assert f"{padding:.3g} % of what your model computes is padding: cut it" in check.train_step(eights).sentence
    assert check.train_step(sorted_and_cut).sentence.endswith(").")


def test_rows_are_known_again_cut_or_padded_and_in_any_order() -> None:
    tokens, labels = corpus.batch(2, ROWS, LENGTH, text="made")
    lengths = (labels != IGNORE).sum(1)
    order = lengths.argsort()[:MOST]
    assert rows_of(tokens[order, : int(lengths[order].max())], tokens, lengths) == order.tolist()
    assert rows_of(F.pad(tokens[:3], (0, 4), value=9), tokens, lengths) == [0, 1, 2]
    assert rows_of(tokens[:2] + 1, tokens, lengths) == [-1, -1]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((100, 101, 99), (400, 410, 390), "Score: faster, 4 times the valid tokens/s of one row at a time (90 %"),
        ((100, 101, 99), (25, 26, 24), "Score: slower, 0.25 times the valid tokens/s"),
        ((100, 101, 100), (101, 100, 101), "Score: as fast, 1.01 times the valid tokens/s"),
        ((100, 160, 70), (110, 90, 150), "Score: cannot tell, 1.1 times the valid tokens/s"),
        ((100, 101, 99), (103, 104, 102), "Score: cannot tell, 1.03 times the valid tokens/s"),
        ((100, 101, 99), (98, 99, 97), "Score: cannot tell, 0.98 times the valid tokens/s"),
    ],
)
def test_every_score_in_words_from_made_throughputs(before: Any, after: Any, words: str) -> None:
    said = speed_score.score(before, after)
    assert said.startswith(words)
    low, high = min(after) / max(before), max(after) / min(before)
    assert said.endswith(f"interval {low:.3g} … {high:.3g}).")


@pytest.mark.parametrize(("factor", "word"), [(4.0, "slower"), (1.0, "as fast"), (0.25, "faster")])
def test_the_score_is_that_of_the_clock_in_turn(monkeypatch: pytest.MonkeyPatch, factor: float, word: str) -> None:
    clock, calls = SimpleNamespace(now=0.0), list[str]()

    def takes(name: str, seconds: float) -> Any:
        def step(*_: Any) -> None:
            calls.append(name)
            clock.now += seconds

        return step

    monkeypatch.setattr(speed_score, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    said = speed_score.scored(takes("A", 1.0), takes("B", factor), corpus.batch(0, 4))
    assert said.startswith(f"Score: {word}, {1 / factor:.3g} times")
    assert calls == ["A", "B"] * 4, "in turn, and the first of each warms up"


def test_a_step_that_breaks_in_float32_is_not_timed() -> None:
    def breaks(*_: Any) -> None:
        raise ValueError

    assert speed_score.scored(plain_step, breaks, corpus.batch(0, 2)) == "It could not be timed in float32."


# The throughput of a run.


def summed(valid: Any, positions: Any, step: Any, micro: Any) -> float:
    return sum(valid) / sum(step)


def in_a_loop(valid: Any, positions: Any, step: Any, micro: Any) -> float:
    tokens = seconds = 0.0
    for n, s in zip(valid, step, strict=True):
        tokens, seconds = tokens + n, seconds + s
    return tokens / seconds


RIGHT: list[Any] = [
    summed,
    in_a_loop,
    lambda valid, positions, step, micro: torch.tensor(valid).double().sum() / torch.tensor(step).double().sum(),
    lambda n, p, t, m: statistics.mean(n) / statistics.mean(t),
]


@pytest.mark.parametrize("function", RIGHT)
def test_a_throughput_however_it_is_written(function: Any) -> None:
    verdict = check.tokens_per_second(function)
    assert verdict.passed and len(verdict.checks) == 5, verdict


def rates(n: Any, t: Any) -> list[float]:
    return [a / b for a, b in zip(n, t, strict=True)]


FALSE: list[tuple[Any, list[str]]] = [
    (lambda n, p, t, m: statistics.mean(rates(n, t)), ["gives 466.7, and 500 is right", "a short step weighs as much"]),
    (lambda n, p, t, m: statistics.median(rates(n, t)), ["it is the median of the steps' rates"]),
    (lambda n, p, t, m: sum(p) / sum(t), ["gives 1280, and 500", "positions hold the padding too"]),
    (lambda n, p, t, m: sum(n) / sum(m), ["gives 2133, and 500", "the time of a microbatch was taken"]),
    (lambda n, p, t, m: n[-1] / t[-1], ["gives 333.3, and 500", "only the last step is in it"]),
    (lambda n, p, t, m: n[0] / t[0], ["only the first step is in it, the one that warms up"]),
    (lambda n, p, t, m: max(rates(n, t)), ["only the fastest step is in it"]),
    (lambda n, p, t, m: sum(n) / statistics.mean(t), ["the tokens of all steps stand over the time of one"]),
    (lambda n, p, t, m: statistics.mean(n) / sum(t), ["the tokens of one step stand over the time of all"]),
    (lambda n, p, t, m: sum(t) / sum(n), ["it is upside down, seconds per token"]),
    (lambda n, p, t, m: len(t) / sum(t), ["gives 2.5, and 500", "steps were counted, and not their tokens"]),
    (lambda n, p, t, m: sum(n), ["gives 400, and 500", "the time is missing"]),
    (lambda n, p, t, m: sum(n) * sum(t), ["tokens and seconds are multiplied"]),
    (lambda n, p, t, m: sum(p) / sum(m), ["positions hold the padding too", "; the time of a microbatch was taken"]),
    (lambda n, p, t, m: 7.0, ["gives 7, and 500", "none of the usual slips"]),
    (lambda n, p, t, m: None, ["Your function returns None, which is no finite number"]),
    (lambda n, p, t, m: n / t, ["TypeError"]),
    (lambda n, t: n, ["is called with (valid, positions, step_seconds, microbatch_seconds)"]),
]


@pytest.mark.parametrize(("function", "words"), FALSE)
def test_a_wrong_throughput_is_named(function: Any, words: list[str]) -> None:
    verdict = check.tokens_per_second(function)
    assert not verdict.passed
    for each in words:
        assert each in verdict.sentence, verdict.sentence


def test_no_two_single_slips_give_the_same_numbers() -> None:
    single = {words: wrong for words, wrong in TOKENS_PER_SECOND.wrong.items() if ";" not in words}
    rows = {words: [wrong(*case) for case in TOKENS_PER_SECOND.cases.values()] for words, wrong in single.items()}
    assert len(rows) == 14
    for one, other in itertools.combinations(rows, 2):
        assert not all(math.isclose(a, b) for a, b in zip(rows[one], rows[other], strict=True)), (one, other)


def test_the_exercises_are_handed_out() -> None:
    assert {"train_step", "tokens_per_second"} <= set(check.all())
    assert exercises.MOST < exercises.ROWS
