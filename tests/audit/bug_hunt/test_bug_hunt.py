"""The hunt: the hidden fault is what the audit finds and what its measurements tell; and the four loops on the page."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import LabError
from labkit.audit import bug_hunt
from labkit.audit.bug_hunt import NOT_YET, Hunt, Measurement, suspects
from labkit.audit.bug_hunt.hidden import EACH, LAYERS, LOSSES, SECRET, STRUCTURES, WORDS, Trainer
from labkit.audit.bug_hunt.suspects import LOOPS, loops
from labkit.corpus import Window
from labkit.declare import checked, parameters
from labkit.nets import IGNORE, Transformer, sequence_gradients
from tests.strategies import forbidden

torch.set_num_threads(1)

CASES = range(240)
SWITCHES = [name for name, p in parameters(bug_hunt.hunt).items() if p.kind is bool]
EVERYTHING = dict.fromkeys(SWITCHES, True)
measure: Callable[..., Hunt] = bug_hunt.hunt
case = functools.cache(bug_hunt.case)


# What somebody deduces who has nothing but the counts and the measurements.


def same(values: Sequence[float], wanted: float) -> bool:
    return all(value == pytest.approx(wanted, rel=1e-8) for value in values)


def deduce(measurements: Sequence[Measurement], window: Window) -> str:
    weights, _, steps, schedule, adam, clips, second, forward = (each.values for each in measurements)
    often = {"step-per-microbatch": steps, "schedule-per-microbatch": schedule}
    often |= {"adam-count-per-microbatch": adam, "clip-per-microbatch": clips}
    if second[0] > 1e-6:
        return "nondeterministic"
    if forward[0] > 1e-6:
        return "batch-dependent-layer"
    for word, (times,) in often.items():
        if times > 1:
            return word
    return by_weights(weights, [int(n) for n in window.counts], window.positions, window.labelled)


def by_weights(weights: Sequence[float], n: Sequence[int], positions: int, labelled: int) -> str:
    K, N = len(n), sum(n)
    alike = {"token-mean": 1, "token-sum": N, "double-division": 1 / K}
    alike |= {"padded-count": N / positions, "unshifted-count": N / labelled}
    for word, weight in alike.items():
        if same(weights, weight):
            return word
    if max(map(abs, weights[:-1])) < 1e-9:
        return "last-microbatch-only"
    products = [w * each for w, each in zip(weights, n, strict=True)]
    if not same(products, products[0]):
        return "sequence-means"
    if same(products, N / K):
        return "mean-of-means"
    return "sum-of-means" if same(products, N) else "tail-divided-by-k" if products[0] < N / K else "unknown"


@pytest.mark.parametrize("first", range(0, len(CASES), 40))
def test_the_audit_finds_what_is_hidden_and_the_measurements_tell_it(first: int) -> None:
    for number in CASES[first : first + 40]:
        hidden = case(number)
        assert hidden.report.verdict == hidden.word, (number, hidden.report)
        assert hidden.report.faults == (() if hidden.word == "token-mean" else (hidden.word,))
        assert deduce(hidden.measurements, hidden.window) == hidden.word, number


def test_every_word_and_every_structure_occurs() -> None:
    met = {(case(number).word, case(number).structure) for number in CASES}
    assert {word for word, _ in met} == set(WORDS)
    assert {structure for _, structure in met} == set(STRUCTURES)
    assert all(structure == "loop" for word, structure in met if word in EACH)
    assert len({len(case(number).report.counts) for number in CASES}) == 3


def test_no_window_has_two_divisors_that_are_the_same() -> None:
    windows = {number: case(number).window for number in CASES}
    for window in windows.values():
        N, K = window.total, len(window.valid)
        divisors = [N, 1, N * K, window.positions, window.labelled]
        assert len(set(divisors)) == 5 and len(set(window.counts.tolist())) == K


def test_with_fewer_measurements_some_words_look_the_same() -> None:
    """Each measurement but the error is needed: without it two of the words give the same numbers."""
    by_word: dict[str, list[Any]] = {}
    for number in CASES:
        by_word.setdefault(case(number).word, case(number).measurements)
    ones = {"token-mean", "clip-per-microbatch", "step-per-microbatch", "schedule-per-microbatch"}
    ones |= {"adam-count-per-microbatch", "batch-dependent-layer"}
    for word in ones:
        assert by_word[word][0].values == pytest.approx([1] * len(by_word[word][0].values), abs=5e-4), "say nothing"
    off = {word: [each.off for each in by_word[word]] for word in ones}
    assert off["token-mean"] == [False] * 8
    for one, other in itertools.combinations(ones, 2):
        assert off[one] != off[other]


# What each step does, by pencil.


def gradient(trainer: Trainer, microbatches: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What reaches the optimizer where nothing is clipped, and the gradient of every sequence's sum."""
    rows = sequence_gradients(trainer.model, microbatches)
    taken: list[torch.Tensor] = []

    def take() -> None:
        taken.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).clone())

    trainer.clip = take  # type: ignore[method-assign]
    trainer.step(microbatches)
    (found,) = taken
    return found, rows


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("word", LOSSES)
def test_the_gradient_of_every_structure_is_the_words_algebra(word: str, structure: str) -> None:
    microbatches = bug_hunt.telling_microbatches(torch.Generator().manual_seed(3), 3)
    found, rows = gradient(Trainer(word, structure, 5), microbatches)
    valid = torch.tensor([[int(n) for n in (labels[:, 1:] != IGNORE).sum(1)] for _, labels in microbatches]).double()
    n, K, N = valid.sum(1).repeat_interleave(2), len(valid), float(valid.sum())
    padded = sum(labels[:, 1:].numel() for _, labels in microbatches)
    labelled = sum(int((labels != IGNORE).sum()) for _, labels in microbatches)
    share = {
        "token-mean": 1 / N + 0 * n,
        "mean-of-means": 1 / (K * n),
        "sum-of-means": 1 / n,
        "token-sum": 1 + 0 * n,
        "double-division": 1 / (N * K) + 0 * n,
        "padded-count": 1 / padded + 0 * n,
        "unshifted-count": 1 / labelled + 0 * n,
        "tail-divided-by-k": 1 / ((K + SECRET) * n),
        "sequence-means": 1 / (2 * K * valid.flatten()),
    }[word]
    right = share @ rows
    assert (found - right).norm() <= 1e-12 * right.norm()


def test_the_last_microbatch_alone() -> None:
    microbatches = bug_hunt.telling_microbatches(torch.Generator().manual_seed(3), 3)
    found, rows = gradient(Trainer("last-microbatch-only", "loop", 5), microbatches)
    N = sum(int((labels[:, 1:] != IGNORE).sum()) for _, labels in microbatches)
    assert torch.allclose(found, rows[-2:].sum(0) / N, rtol=1e-12)


@pytest.mark.parametrize(
    ("word", "at"), [(word, at) for at, word in enumerate(("steps", "schedule", "adam", "clips"), 2)]
)
def test_what_happens_too_often_happens_k_times(word: str, at: int) -> None:
    full = next(each for each in EACH if each.startswith(word.rstrip("s")))
    number = next(number for number in CASES if case(number).word == full)
    hidden = case(number)
    K = len(hidden.report.counts)
    assert hidden.measurements[at].values[0] == (K + 1 if word == "clips" else K)


def test_dropout_differs_and_batchnorm_sees_the_batch() -> None:
    for word, at in zip(LAYERS, (6, 7), strict=True):
        hidden = next(case(number) for number in CASES if case(number).word == word)
        assert hidden.measurements[at].values[0] > 0.01
    right = next(case(number) for number in CASES if case(number).word == "token-mean")
    assert right.measurements[6].values == (0.0,) and right.measurements[7].values[0] < 1e-12


# What a learner gets.


def test_only_what_is_switched_on_is_shown_and_nothing_of_the_fault() -> None:
    nothing = measure(case_number=11)
    assert (nothing.measurements, nothing.verdict, nothing.explanation, nothing.points) == ((), "", "", 10)
    for name, shown in zip(SWITCHES, bug_hunt.NAMES, strict=True):
        found = measure(case_number=11, **{name: True})
        assert [each.name for each in found.measurements] == [shown] and found.points == 9 and not found.verdict
    assert measure(case_number=11, **EVERYTHING).points == 2


def test_a_right_guess_keeps_the_points_and_a_wrong_one_loses_them() -> None:
    word = case(11).word
    right = measure(case_number=11, weights=True, clips=True, guess=word)
    assert (right.points, right.verdict) == (8, word) and right.explanation == case(11).report.explain()
    other = next(each for each in WORDS if each != word)
    wrong = measure(case_number=11, guess=other)
    assert (wrong.points, wrong.verdict) == (0, word) and wrong.explanation


def test_a_right_step_is_guessed_as_token_mean() -> None:
    number = next(number for number in CASES if case(number).word == "token-mean")
    assert measure(case_number=number, guess="token-mean").points == 10
    assert measure(case_number=number, guess="mean-of-means").points == 0


def test_the_source_says_nothing_of_the_case() -> None:
    source = inspect.getsource(bug_hunt.hunt)
    assert not any(word in source for word in WORDS)


@pytest.mark.parametrize("number", [0, 9, 9999])
def test_the_same_number_is_the_same_step_and_random_numbers_are_left_alone(number: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = measure(case_number=number, **EVERYTHING)
    bug_hunt.case.cache_clear()
    assert measure(case_number=number, **EVERYTHING) == first
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bad_input_is_refused(data: st.DataObject) -> None:
    declared = parameters(data.draw(st.sampled_from([bug_hunt.hunt, loops])))
    name = data.draw(st.sampled_from(list(declared)))
    with pytest.raises(LabError, match="try"):
        checked(declared, {name: data.draw(forbidden(declared[name]))})


def test_guesses_are_the_words_that_occur() -> None:
    rule: Any = parameters(bug_hunt.hunt)["guess"].rule
    assert rule.options == (NOT_YET, *WORDS)


# The four loops.


@pytest.mark.parametrize("K", [2, 4, 8])
def test_four_loops_by_pencil(K: int) -> None:
    window = suspects.window(K, 4, 0)
    n = [int((labels[:, 1:] != IGNORE).sum()) for _, labels in window]
    labelled = sum(int((labels != IGNORE).sum()) for _, labels in window)
    N = sum(n)
    expected = {
        "A": (("mean-of-means",), [N / (K * each) for each in n]),
        "B": (("schedule-per-microbatch",), [1.0] * K),
        "C": ((), [1.0] * K),
        "D": (("unshifted-count", "clip-per-microbatch"), [N / labelled] * K),
    }
    for name, (faults, weights) in expected.items():
        report = loops(loop=name, accumulation_steps=K)
        assert report.faults == faults and report.counts == tuple(n), name
        assert report.token_weights == pytest.approx(weights, rel=1e-5), name
    assert loops(loop="B", accumulation_steps=K).schedule_steps == K
    assert loops(loop="D", accumulation_steps=K).clips == K


def test_the_figures_of_the_notebook() -> None:
    report = loops()
    assert report.counts == (54, 30, 19, 38) and max(report.token_weights) == pytest.approx(141 / (4 * 19))
    assert loops(loop="D").token_weights == pytest.approx([141 / 149] * 4, rel=1e-5)


def test_equal_counts_hide_a_mean_of_means_and_the_audit_says_so() -> None:
    report = loops(shortest=32)
    assert report.right and any("mean-of-means" in each for each in report.cannot_tell)
    assert loops(loop="C").cannot_tell == ()


@pytest.mark.parametrize("seed", [0, 1, 9999])
def test_the_clip_of_every_loop_bites(seed: int) -> None:
    """Without a gradient longer than the limit loop D would be clipped nowhere."""
    window = suspects.window(4, 4, seed)
    rows = sequence_gradients(Transformer(seed=seed, width=8, dtype=torch.float64), window)
    first = rows[:2].sum(0) / sum(int((labels != IGNORE).sum()) for _, labels in window)
    assert float((rows.sum(0) / 141).norm()) > 0.1 and first.norm() > 0
    assert "clip-per-microbatch" in loops(loop="D", seed=seed).faults


def test_the_loops_are_shown_without_their_faults() -> None:
    for loop in LOOPS.values():
        assert not any(word in inspect.getsource(loop) for word in WORDS)
