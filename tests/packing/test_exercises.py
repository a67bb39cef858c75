"""Block masks and targets as learners write them, right and wrong, and the sentence that each of them gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from labkit import check
from labkit.exercise.verdict import Verdict
from labkit.packing import rows
from labkit.packing.exercises import CASES, LABEL_SLIPS, MASK_SLIPS

Lengths = list[int]
Function = Callable[..., Any]


def holds(verdict: Verdict, passes: int, words: list[str]) -> None:
    assert not verdict.passed and sum(ok for _, ok in verdict.checks) == passes, verdict
    for each in words:
        assert each in verdict.sentence, verdict.sentence


def owner(lengths: Lengths) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


# The mask.


def with_blocks(lengths: Lengths) -> Tensor:
    return torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()


def by_a_loop(lengths: Lengths) -> Tensor:
    mask = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    start = 0
    for n in lengths:
        for t in range(start, start + n):
            mask[t, start : t + 1] = True
        start += n
    return mask


def in_numpy(lengths: Lengths) -> Any:
    document = np.repeat(np.arange(len(lengths)), lengths)
    return np.tril(document[:, None] == document[None, :]).astype(int)


def as_a_list(lengths: Lengths) -> list[list[bool]]:
    document = [at for at, n in enumerate(lengths) for _ in range(n)]
    return [[a == b and s <= t for s, b in enumerate(document)] for t, a in enumerate(document)]


@pytest.mark.parametrize("function", [with_blocks, by_a_loop, in_numpy, as_a_list, rows.block_causal])
def test_a_right_mask_passes_however_it_is_written(function: Function) -> None:
    verdict = check.block_mask(function)
    assert verdict.passed and verdict.sentence == "Right in all cases.", verdict


def one_late(lengths: Lengths) -> Tensor:
    T, mask = sum(lengths), torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    starts = [0, *(1 + sum(lengths[:at]) for at in range(1, len(lengths))), T]
    for a, b in itertools.pairwise(starts):
        mask[a:b, a:b] = torch.ones(T, T).tril().bool()[a:b, a:b]
    return mask


def one_early(lengths: Lengths) -> Tensor:
    mask = with_blocks(lengths)
    for at in range(1, len(lengths)):
        start = sum(lengths[:at])
        mask[start : start + lengths[at], start - 1] = True
    return mask


def all_of_one_size(lengths: Lengths) -> Tensor:
    block = torch.arange(sum(lengths)) // max(1, sum(lengths) // len(lengths))
    return (block[:, None] == block) & torch.ones(sum(lengths), sum(lengths)).tril().bool()


def additive(lengths: Lengths) -> Tensor:
    return torch.zeros(sum(lengths), sum(lengths)).masked_fill(~with_blocks(lengths), -torch.inf)


def padded(lengths: Lengths) -> Tensor:
    mask = torch.zeros(8 * len(lengths), 8 * len(lengths), dtype=torch.bool)
    mask[: sum(lengths), : sum(lengths)] = with_blocks(lengths)
    return mask


MASKS: list[tuple[Function, int, list[str]]] = [
    (
        lambda n: torch.ones(sum(n), sum(n)).tril().bool(),
        1,
        [
            "In the check “two documents” 6 pairs leak: token 3 (document 2) may look at token 0 (document 1).",
            "This is the plain causal mask, it knows no documents: both tokens must be of one document too.",
        ],
    ),
    (
        lambda n: owner(n)[:, None] == owner(n),
        0,
        ["4 pairs look ahead: token 0 (document 1) may look at token 1 (document 1)", "s must be at most t too"],
    ),
    (lambda n: torch.ones(sum(n), sum(n)).bool(), 0, ["12 pairs leak", "Everybody may look at everybody"]),
    (lambda n: torch.zeros(sum(n), sum(n)).bool(), 0, ["9 pairs are missing", "Nobody may look at anybody"]),
    (lambda n: ~with_blocks(n), 0, ["12 pairs leak", "True and False are swapped: True shall mean “may look”"]),
    (lambda n: with_blocks(n).T, 0, ["4 pairs look ahead", "Rows and columns are swapped: row t is who looks"]),
    (
        lambda n: with_blocks(n).tril(-1),
        0,
        ["5 pairs are missing: token 0 (document 1) may not look at token 0 (document 1)", "compare with s <= t"],
    ),
    (lambda n: torch.eye(sum(n)), 0, ["4 pairs are missing: token 1", "A token may look at more than itself"]),
    (
        one_early,
        1,
        ["2 pairs leak: token 3 (document 2) may look at token 2 (document 1).", "begins one token too early, at the"],
    ),
    (one_late, 1, ["3 pairs leak: token 3", "one token too late: a document's first token is counted to the one"]),
    (all_of_one_size, 2, ["1 pair leaks: token 3 (document 2) may look at token 2", "All blocks have one length"]),
    (
        lambda n: with_blocks(n) & (owner(n) == 0)[:, None],
        1,
        ["3 pairs are missing: token 3 (document 2)", "Only the first document has its block: the others begin where"],
    ),
    (lambda n: owner(n)[:, None] >= owner(n), 0, ["6 pairs leak", "Documents are compared with >="]),
    (
        lambda n: with_blocks(n[::-1]),
        2,
        ["2 pairs leak: token 3 (document 2) may look at token 2", "The blocks stand in reverse order."],
    ),
    (
        additive,
        0,
        ["your mask holds −∞, to be added to the scores", "asked is True where a token may look"],
    ),
    (lambda n: with_blocks(n) * 2, 0, ["your mask holds 2: asked is True where a token may look, else False"]),
    (lambda n: torch.nan * with_blocks(n), 0, ["your mask holds nan"]),
    (padded, 0, ["the shape (16, 16), and (5, 5) is asked: a row and a column for each of the row's tokens"]),
    (lambda n: with_blocks(n)[None, None], 0, ["the shape (1, 1, 5, 5), and (5, 5) is asked"]),
    (lambda n: torch.eye(len(n)).bool(), 0, ["the shape (2, 2), and (5, 5) is asked"]),
    (lambda n: None, 0, ["your function returns None, and a row and a column for each of the row's tokens"]),
    (lambda n: "mask", 0, ["your function returns a str, and a row"]),
    (lambda n: with_blocks(n)[::-1], 0, ["raises ValueError: step must be greater than zero"]),
    (lambda n, T: with_blocks(n), 0, ["takes (n, T), and is called with (lengths)"]),
    (
        lambda n: with_blocks(n) if len(n) < 6 else by_a_loop([*n[:5], 2, 1]),
        4,
        ["“six documents” 2 pairs are missing: token 20 (document 6) may not look at token 18 (document 6)."],
    ),
]


@pytest.mark.parametrize(("function", "passes", "words"), MASKS)
def test_a_wrong_mask_is_named(function: Function, passes: int, words: list[str]) -> None:
    holds(check.block_mask(function), passes, words)


# The targets.


def cloned(tokens: Tensor, lengths: Lengths) -> Tensor:
    labels, start = tokens.clone(), 0
    for n in lengths:
        labels[start] = -100
        start += n
    return labels


def where(tokens: Tensor, lengths: Lengths) -> Tensor:
    first = torch.cat([torch.tensor([True]), owner(lengths)[1:] != owner(lengths)[:-1]])
    return torch.where(first, -100, tokens)


def joined(tokens: Tensor, lengths: Lengths) -> list[int]:
    return [label for part in tokens.split(lengths) for label in (-100, *part[1:].tolist())]


def first_kept(tokens: Tensor, lengths: Lengths) -> Any:
    labels = tokens.numpy().copy()
    labels[np.cumsum(lengths)[:-1]] = -100
    return labels


@pytest.mark.parametrize("function", [cloned, where, joined, first_kept, rows.apart])
def test_right_targets_pass_however_they_are_written(function: Function) -> None:
    verdict = check.targets(function)
    assert verdict.passed and verdict.sentence == "Right in all cases.", verdict


def at_places(places: Callable[[Lengths], list[int]], value: int = -100) -> Function:
    def labels(tokens: Tensor, lengths: Lengths) -> Tensor:
        found = tokens.clone()
        found[[at for at in places(lengths) if at < len(tokens)]] = value
        return found

    return labels


def starts(lengths: Lengths) -> list[int]:
    return [sum(lengths[:at]) for at in range(len(lengths))]


def ends(lengths: Lengths) -> list[int]:
    return [sum(lengths[: at + 1]) - 1 for at in range(len(lengths))]


def shifted(tokens: Tensor, lengths: Lengths) -> Tensor:
    return torch.cat([tokens[1:], torch.tensor([-100])])


def shifted_and_ended(tokens: Tensor, lengths: Lengths) -> Tensor:
    labels = shifted(tokens, lengths)
    labels[ends(lengths)] = -100
    return labels


def in_place(tokens: Tensor, lengths: Lengths) -> Tensor:
    tokens[starts(lengths)] = -100
    return tokens


TARGETS: list[tuple[Function, int, list[str]]] = [
    (
        lambda tokens, n: tokens.clone(),
        1,
        [
            "In the check “two documents” 1 target crosses a boundary: token 2, the last of document 1, shall predict",
            "shall predict token 3. No boundary is ignored: set the label of each document's first token to -100.",
        ],
    ),
    (at_places(ends), 0, ["1 target crosses", "The ends are ignored, but the loss shifts the labels: it is the first"]),
    (
        at_places(lambda n: [*starts(n), *ends(n)]),
        0,
        ["2 good targets are lost: token 2 stands behind another one of document 1", "the first token is enough"],
    ),
    (shifted, 0, ["1 target crosses", "The labels are shifted already, and the loss shifts them again: leave each"]),
    (shifted_and_ended, 0, ["shifted already, with -100 at the ends, and the loss shifts them again: ignore the"]),
    (lambda tokens, n: torch.full_like(tokens, -100), 0, ["3 good targets are lost", "so there is no loss"]),
    (
        at_places(lambda n: [0, n[0]]),
        2,
        ["“equal lengths” 1 target crosses a boundary: token 5, the last of document 2", "Only the second document's"],
    ),
    (at_places(lambda n: n), 1, ["1 good target is lost: token 2", "The lengths were taken as places"]),
    (at_places(lambda n: [1 + at for at in starts(n)]), 0, ["1 target crosses", "one too late"]),
    (at_places(starts, 0), 1, ["1 target crosses a boundary", "The loss ignores -100 alone: 0 is a token like any"]),
    (at_places(starts, -1), 1, ["1 target crosses a boundary", "-1 is no token at all"]),
    (in_place, 0, ["changed the tokens that it was given, and the model reads them: begin with tokens.clone()"]),
    (lambda tokens, n: where(tokens, n) + 1, 0, ["1 target crosses"]),
    (
        lambda tokens, n: torch.where(where(tokens, n) < 0, -100, tokens + 1),
        0,
        ["3 labels are not their tokens: at 1 stands 13, and the token is 12."],
    ),
    (
        lambda tokens, n: torch.where(where(tokens, n) < 0, -100, tokens - 1),
        0,
        ["3 labels are not their tokens: at 1 stands 11, and the token is 12."],
    ),
    (lambda tokens, n: where(tokens, n).double(), 0, ["your labels are of torch.float64: whole numbers are asked"]),
    (lambda tokens, n: where(tokens, n) > 0, 0, ["your labels are of torch.bool"]),
    (lambda tokens, n: where(tokens, n)[1:], 0, ["the shape (4,), and (5,) is asked: a label for each token"]),
    (lambda tokens, n: where(tokens, n)[None], 0, ["the shape (1, 5), and (5,) is asked"]),
    (lambda tokens, n: [part.tolist() for part in tokens.split(n)], 0, ["returns a list, and a label for each token"]),
    (lambda tokens, n: None, 0, ["your function returns None, and a label for each token"]),
    (lambda tokens, n: tokens[sum(n)], 0, ["raises IndexError"]),
    (lambda tokens: tokens, 0, ["takes (tokens), and is called with (tokens, lengths)"]),
]


@pytest.mark.parametrize(("function", "passes", "words"), TARGETS)
def test_wrong_targets_are_named(function: Function, passes: int, words: list[str]) -> None:
    holds(check.targets(function), passes, words)


# Both.


@pytest.mark.parametrize("slips", [MASK_SLIPS, LABEL_SLIPS])
def test_no_two_slips_are_alike_and_none_is_right(slips: dict[str, Callable[[Lengths], Tensor]]) -> None:
    judge = check.block_mask if slips is MASK_SLIPS else check.targets
    for words, wrong in slips.items():
        verdict = judge(wrong if slips is MASK_SLIPS else lambda tokens, lengths, wrong=wrong: wrong(lengths))
        assert not verdict.passed and verdict.sentence.endswith(words), verdict


def test_what_it_prints_and_changes_is_told() -> None:
    def loud(lengths: Lengths) -> Tensor:
        print("documents:", lengths)
        torch.manual_seed(0)
        return with_blocks(lengths)

    verdict = check.block_mask(loud)
    assert verdict.passed and verdict.printed == "documents: [3, 2]"
    assert verdict.sentence == "Right in all cases. (It also changed torch's random numbers; that was put back.)"


def test_one_that_never_ends_is_stopped_and_one_that_empties_its_list_harms_nobody() -> None:
    def for_ever(tokens: Tensor, lengths: Lengths) -> None:
        while True:
            pass

    def emptied(lengths: Lengths) -> Tensor:
        mask = with_blocks(lengths)
        lengths.clear()
        return mask

    assert "was still running after 0.2 s" in check.targets(for_ever, seconds=0.2).sentence
    assert check.block_mask(emptied).passed and CASES["two documents"] == [3, 2]


@given(st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.lists(st.integers() | st.none()), st.binary()))
@settings(max_examples=60)
def test_whatever_a_function_returns_there_is_a_verdict(value: object) -> None:
    for judge in (check.block_mask, check.targets):
        verdict = judge(lambda *_: value)
        assert not verdict.passed and verdict.sentence.endswith((".", "?")) and len(str(verdict)) < 1500
