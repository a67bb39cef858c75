"""Every denominator against a loop that divides by it, written out here, and the weights fitted to its gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from labkit import rules
from labkit.corpus import Batch, batch, split
from labkit.denominators import DENOMINATORS, RULES, counts
from labkit.fit import fit, flat, gradient
from labkit.nets import IGNORE, Transformer, next_token_loss, sequence_gradients

# For all label tensors of a window, the place of one of them and one of its rows: what that row's loss is divided by.
DIVISORS: dict[str, Callable[[list[list[list[int]]], int, int], int]] = {
    "N": lambda window, m, row: sum(valid(each) for labels in window for each in labels),
    "1": lambda window, m, row: 1,
    "n": lambda window, m, row: sum(map(valid, window[m])),
    "PADDED": lambda window, m, row: sum(len(each) - 1 for labels in window for each in labels),
    "padded": lambda window, m, row: sum(len(each) - 1 for each in window[m]),
    "SIZE": lambda window, m, row: sum(len(each) for labels in window for each in labels),
    "size": lambda window, m, row: sum(map(len, window[m])),
    "LABELS": lambda window, m, row: sum(len(each) - each.count(IGNORE) for labels in window for each in labels),
    "labels": lambda window, m, row: sum(len(each) - each.count(IGNORE) for each in window[m]),
    "seen": lambda window, m, row: sum(valid(each) for labels in window[: m + 1] for each in labels),
    "last": lambda window, m, row: sum(map(valid, window[-1])),
    "first": lambda window, m, row: sum(map(valid, window[0])),
    "s": lambda window, m, row: valid(window[m][row]),
    "s b": lambda window, m, row: valid(window[m][row]) * len(window[m]),
    "b": lambda window, m, row: len(window[m]),
    "B": lambda window, m, row: sum(map(len, window)),
    "length": lambda window, m, row: len(window[m][row]) - 1,
    "N n": lambda window, m, row: sum(map(valid, window[m])) * sum(valid(each) for labels in window for each in labels),
}


def valid(labels: list[int]) -> int:
    return len(labels[1:]) - labels[1:].count(IGNORE)


@pytest.fixture(scope="module")
def microbatches() -> list[Batch]:
    window = split(*batch(3, 7, 12, shortest=4, text="made"), 3)
    window[0][1][1].fill_(IGNORE)
    return [(window[0][0][:, :9], window[0][1][:, :9]), *window[1:]]


def weights(model: Transformer, microbatches: list[Batch]) -> Tensor:
    """Fitted to the gradient in .grad: of every sequence with a valid token."""
    taken = flat(gradient(model))
    rows = sequence_gradients(model, microbatches)
    fitted = fit(taken, rows[(rows != 0).any(1)])
    assert fitted.residual < 1e-12
    return fitted.values


@pytest.mark.parametrize("name", DENOMINATORS)
def test_a_loop_that_divides_by_it_gives_every_sequence_one_over_it(name: str, microbatches: list[Batch]) -> None:
    model, window = Transformer(width=8, dtype=torch.float64), [labels.tolist() for _, labels in microbatches]
    for m, (tokens, labels) in enumerate(microbatches):
        for row in (row for row in range(len(labels)) if valid(window[m][row])):
            loss = next_token_loss(model, tokens[row : row + 1], labels[row : row + 1], "sum")
            (loss / DIVISORS[name](window, m, row)).backward()
    predicted = 1 / DENOMINATORS[name].count(counts(microbatches))
    assert torch.allclose(weights(model, microbatches), predicted, rtol=1e-9)


@pytest.mark.parametrize(("pair", "word"), RULES.items(), ids=RULES.values())
def test_the_loop_of_a_rule_divides_by_its_denominator_and_by_k(
    pair: tuple[str, int], word: str, microbatches: list[Batch]
) -> None:
    model, (name, power) = Transformer(width=8, dtype=torch.float64), pair
    rules.rule(word).run(model, microbatches)
    predicted = 1 / (DENOMINATORS[name].count(counts(microbatches)) * 3**power)
    assert torch.allclose(weights(model, microbatches), predicted, rtol=1e-9)


def test_a_denominator_is_mended_as_its_rule_is() -> None:
    for (name, _), word in RULES.items():
        assert word == "token-mean" or DENOMINATORS[name].fix in (rules.rule(word).fix, rules.COUNT_FIRST)
    assert DENOMINATORS["SIZE"].fix == rules.rule("padded-count").fix
