"""Every rule's loop against arithmetic done by hand, exact fractions, and the whole batch in one forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from labkit import rules
from labkit.corpus import Batch, batch, made, split, window
from labkit.errors import LabError
from labkit.nets import Scalar, Transformer

torch.set_num_threads(1)

Window = Sequence[Sequence[Sequence[int]]]
RIGHT = ("token-mean", "token-mean-once")
WORDS = tuple(word for word, rule in rules.TABLE.items() if rule.topic == "accumulation")

# Targets of gradient 8 | 3 and 2, and 1: n = 1 and 3, N = 4, S = 8 and 6, three sequences, 5 positions, 7 labels.
BY_HAND: Window = [[[8]], [[3, 2], [1]]]
GRADIENT = {
    "token-mean": 14 / 4,
    "token-mean-once": 14 / 4,
    "mean-of-means": (8 / 1 + 6 / 3) / 2,
    "sum-of-means": 8 / 1 + 6 / 3,
    "token-sum": 14.0,
    "double-division": 14 / 4 / 2,
    "padded-count": 14 / 5,
    "unshifted-count": 14 / 7,
    "sequence-means": (8 / 1 + 5 / 2 + 1 / 1) / 3,
    "last-microbatch-only": 6 / 4,
    "tail-divided-by-k": (8 / 1 + 6 / 3) / 4,
    "carried-over": 14 / 3,
}
STEPS = {"tail-divided-by-k": 4, "carried-over": 1}
WEIGHTS = {
    "token-mean": [1, 1],
    "token-mean-once": [1, 1],
    "mean-of-means": [4 / 2, 4 / 6],
    "sum-of-means": [4, 4 / 3],
    "token-sum": [4, 4],
    "double-division": [1 / 2, 1 / 2],
    "padded-count": [4 / 5, 4 / 5],
    "unshifted-count": [4 / 7, 4 / 7],
    "sequence-means": [4 / 3, 4 / 6, 4 / 3],
    "last-microbatch-only": [0, 1],
    "tail-divided-by-k": [4 / 4, 4 / 12],
    "carried-over": [1, 1],
}


def ran(word: str, microbatches: Sequence[Batch], steps: int | None = None) -> float:
    model = Scalar()
    rules.rule(word).run(model, microbatches, steps)
    assert model.weight.grad is not None
    return float(model.weight.grad)


@pytest.mark.parametrize("word", WORDS)
def test_a_loop_leaves_the_gradient_worked_out_by_hand(word: str) -> None:
    assert ran(word, made(BY_HAND), STEPS.get(word)) == pytest.approx(GRADIENT[word], rel=1e-15)


@pytest.mark.parametrize("word", WORDS)
def test_predicted_weights_are_those_worked_out_by_hand(word: str) -> None:
    predicted = rules.rule(word).weights(window(made(BY_HAND), STEPS.get(word)))
    assert predicted.dtype == torch.float64
    assert predicted.tolist() == pytest.approx(WEIGHTS[word], rel=1e-15)


@pytest.mark.parametrize(
    ("word", "targets", "steps", "gradient"),
    [
        ("mean-of-means", [[8], [2, 2, 2]], None, 5.0),  # B01
        ("token-mean", [[8], [2, 2, 2]], None, 3.5),
        ("sum-of-means", [[1], [2], [3], [2]], None, 8.0),  # B02
        ("token-mean", [[1], [2], [3], [2]], None, 2.0),
        ("double-division", [[2] * 10, [1] * 10, [3] * 10, [2] * 10], None, 0.5),  # B04
        ("token-mean-once", [[2] * 10, [1] * 10, [3] * 10, [2] * 10], None, 2.0),
        ("tail-divided-by-k", [[1], [1]], 4, 0.5),  # B06
        ("token-mean", [[1], [1]], None, 1.0),
        ("last-microbatch-only", [[1], [2], [3], [6]], None, 1.5),  # B15
        ("token-mean", [[1], [2], [3], [6]], None, 3.0),
        ("mean-of-means", [[], [2, 2, 2, 2]], None, 1.0),  # B29
        ("token-mean", [[], [2, 2, 2, 2]], None, 2.0),
        ("carried-over", [[1]] * 15, 8, 15 / 8),  # B43
    ],
)
def test_shipped_cases(word: str, targets: list[list[int]], steps: int | None, gradient: float) -> None:
    assert ran(word, made([[sequence] for sequence in targets]), steps) == pytest.approx(gradient, rel=1e-15)


def exact(word: str, targets: Window, steps: int) -> Fraction:
    """The gradient in fractions, written down from each rule's name."""
    rows = [[sum(sequence) for sequence in sequences] for sequences in targets]
    sums = [sum(row) for row in rows]
    n = [sum(map(len, sequences)) for sequences in targets]
    means = [Fraction(s, c) if c else Fraction(0) for s, c in zip(sums, n, strict=True)]
    sequences = [each for row in targets for each in row]
    padded = sum(len(row) * max(1, *map(len, row)) for row in targets)
    labelled = sum(len(each) + 1 for each in sequences if each)
    return {
        "token-mean": Fraction(sum(sums), sum(n)),
        "token-mean-once": Fraction(sum(sums), sum(n)),
        "mean-of-means": sum(means) / Fraction(len(targets)),
        "sum-of-means": sum(means) + Fraction(0),
        "token-sum": Fraction(sum(sums)),
        "double-division": Fraction(sum(sums), sum(n) * len(targets)),
        "padded-count": Fraction(sum(sums), padded),
        "unshifted-count": Fraction(sum(sums), labelled),
        "sequence-means": sum(Fraction(sum(each), len(each)) for each in sequences if each) / Fraction(len(sequences)),
        "last-microbatch-only": Fraction(sums[-1], sum(n)),
        "tail-divided-by-k": sum(means) / Fraction(steps),
        "carried-over": Fraction(sum(sums), sum(n[-steps:]) or 1),
    }[word]


TARGETS = st.lists(
    st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=3), min_size=1, max_size=5
).filter(lambda microbatches: any(microbatches[-1]))


@given(st.sampled_from(WORDS), TARGETS, st.integers(1, 9))
@settings(deadline=None)
def test_loop_and_prediction_are_exact_on_any_window(word: str, targets: Window, steps: int) -> None:
    microbatches, rule = made(targets), rules.rule(word)
    expected = float(exact(word, targets, steps))
    assert ran(word, microbatches, steps) == pytest.approx(expected, rel=1e-14, abs=1e-14)
    counted = window(microbatches, steps if rule.needs == "steps" else None)
    sums = torch.tensor([sum(each) for row in targets for each in row], dtype=torch.float64)
    predicted = float((rule.sequence_weights(counted) * sums).sum()) / counted.total
    assert predicted == pytest.approx(expected, rel=1e-14, abs=1e-14)


def whole_batch(model: Transformer, tokens: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the mean over all targets, in one forward of all sequences."""
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("K", [1, 2, 3, 8])
@pytest.mark.parametrize("word", RIGHT)
def test_right_rules_equal_the_whole_batch(word: str, K: int) -> None:
    model = Transformer(seed=3, dtype=torch.float64)
    tokens, labels = batch(3)
    rules.rule(word).run(model, split(tokens, labels, K))
    right = whole_batch(model, tokens, labels)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert float((found - right).norm() / right.norm()) < 1e-14


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("targets", [[[[5, 3]]], [[[4]], [[2]], [[6]]]])
def test_one_microbatch_and_equal_counts_hide_the_mean_of_means(word: str, targets: Window) -> None:
    hidden = {*RIGHT, "mean-of-means", "sequence-means", "tail-divided-by-k", "carried-over"}
    if len(targets) == 1:
        hidden |= {"sum-of-means", "double-division", "last-microbatch-only", "padded-count"}
    elif word == "padded-count":
        hidden |= {word}
    mean = float(exact("token-mean", targets, 1))
    assert (ran(word, made(targets)) == pytest.approx(mean, rel=1e-15)) == (word in hidden)


@pytest.mark.parametrize("word", WORDS)
def test_a_microbatch_without_a_valid_token_weighs_nothing(word: str) -> None:
    rule, counted = rules.rule(word), window(made([[[]], [[3, 2]], [[], [4]]]))
    expected = [0, 1, 0, 1] if rule.needs == "sequences" else [0, 1, 1]
    if word != "last-microbatch-only":
        assert (rule.weights(counted) > 0).int().tolist() == expected
    assert (rule.sequence_weights(counted)[[0, 2]] == 0).all() and rule.sequence_weights(counted)[3] > 0


def test_every_rule_says_how_to_recognise_it_and_what_to_do() -> None:
    assert len(WORDS) == 12
    for word in WORDS:
        rule = rules.rule(word)
        assert rule.word == word and len(rule.looks_like) > 20 and rule.fix and rule.loop.__doc__
        assert rule.right == (word in RIGHT)
        assert rule.needs in {"counts", "padding", "shift", "sequences", "steps"}


def test_other_topics_add_their_rules() -> None:
    rule = dataclasses.replace(rules.rule("token-mean"), word="weighted-by-taste", topic="taste")
    rules.add(rule)
    try:
        assert rules.rule("weighted-by-taste") is rule
        with pytest.raises(LabError, match="taken by a rule of taste"):
            rules.add(rule)
    finally:
        del rules.TABLE["weighted-by-taste"]


@given(st.text(max_size=20).filter(lambda word: word not in rules.TABLE))
@settings(deadline=None)
def test_an_unknown_word_names_one_that_exists(word: str) -> None:
    with pytest.raises(LabError, match="there is no rule") as caught:
        rules.rule(word)
    assert rules.rule(str(caught.value).rpartition("try ")[2].strip("'"))


def test_a_run_begins_with_clear_gradients() -> None:
    model, microbatches = Scalar(), made(BY_HAND)
    for _ in range(2):
        rules.rule("token-mean").run(model, microbatches)
    assert float(model.weight.grad or 0) == 3.5
