"""Packing against brute force, each backward by itself, finite differences, and algebra."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import corpus
from labkit.packing import HEURISTICS, boundary, leak, packed, positions, read, rows, waste
from labkit.packing.rows import Reader, one_by_one, texts
from tests.strategies import settings_of

torch.set_num_threads(1)

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=7)


# Rows.


def fewest(lengths: list[int], row: int) -> int:
    """The least number of rows, by trying every way to share the documents out."""
    for count in range(1, len(lengths) + 1):
        for owner in itertools.product(range(count), repeat=len(lengths) - 1):
            room = [row] * count
            for r, n in zip((0, *owner), lengths, strict=True):
                room[r] -= n
            if min(room) >= 0:
                return count
    raise AssertionError


@pytest.mark.parametrize("heuristic", HEURISTICS)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40), row=st.integers(12, 30))
def test_every_document_stands_in_one_row_and_none_overflows(heuristic: str, lengths: list[int], row: int) -> None:
    found = packed(lengths, row, heuristic)
    assert sorted(at for each in found for at in each) == list(range(len(lengths)))
    assert all(each and sum(lengths[at] for at in each) <= row for each in found)
    assert len(found) >= math.ceil(sum(lengths) / row)


@pytest.mark.parametrize("heuristic", ["first-fit decreasing", "best-fit decreasing"])
@given(lengths=LENGTHS, row=st.integers(12, 20))
@settings(max_examples=60)
def test_decreasing_keeps_the_published_bound(heuristic: str, lengths: list[int], row: int) -> None:
    bound = Fraction(11, 9) * fewest(lengths, row) + Fraction(6, 9)  # Dósa 2007, tight
    assert len(packed(lengths, row, heuristic)) <= bound


@pytest.mark.parametrize(("heuristic", "expected"), [
    ("next-fit", [[0, 1, 2], [3], [4, 5], [6]]),
    ("first-fit", [[0, 1, 2], [3, 6], [4, 5]]),
    ("first-fit decreasing", [[3, 1], [4, 5], [0, 6, 2]]),
    ("best-fit decreasing", [[3, 1], [4, 5], [0, 6, 2]]),
])  # fmt: skip
def test_rows_by_hand(heuristic: str, expected: list[list[int]]) -> None:
    assert packed([5, 3, 2, 7, 6, 4, 3], 10, heuristic) == expected


@pytest.mark.parametrize("heuristic", HEURISTICS)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40), row=st.integers(12, 30))
def test_each_document_went_where_its_heuristic_says(heuristic: str, lengths: list[int], row: int) -> None:
    found = packed(lengths, row, heuristic)
    where = {at: r for r, each in enumerate(found) for at in each}
    turns = sorted(where, key=lambda at: (-lengths[at], at)) if "decreasing" in heuristic else sorted(where)
    room: list[int] = []
    for at in turns:
        fits = [r for r, left in enumerate(room) if left >= lengths[at]]
        if heuristic == "next-fit":
            fits = [r for r in fits if r == len(room) - 1]
        if where[at] == len(room):
            assert not fits
            room.append(row)
        else:
            tightest = min(room[r] for r in fits)
            assert where[at] == next(r for r in fits if "best" not in heuristic or room[r] == tightest)
        room[where[at]] -= lengths[at]
    assert len(room) == len(found) and found == [sorted(each, key=turns.index) for each in found]


def test_the_two_decreasing_heuristics_differ() -> None:
    assert packed([7, 5, 4, 1], 10, "first-fit decreasing") == [[0, 3], [1, 2]]
    assert packed([7, 5, 4, 1], 10, "best-fit decreasing") == [[0], [1, 2, 3]]


@given(settings_of(waste))
@settings(max_examples=60)
def test_shares_of_padding_are_exact_fractions(values: dict[str, Any]) -> None:
    found = waste(**values)
    tokens, D, T, b = sum(found.lengths), len(found.lengths), found.length, values.get("batch", 8)
    cut = [max(found.lengths[at : at + b]) for at in range(0, D, b)]
    sizes = [min(b, D - at) for at in range(0, D, b)]
    padded = sum(longest * size for longest, size in zip(cut, sizes, strict=True))
    assert found.to_longest == pytest.approx(float(1 - Fraction(tokens, padded)), abs=1e-15)
    assert found.to_length == pytest.approx(float(1 - Fraction(tokens, D * T)), abs=1e-15)
    assert found.in_rows == pytest.approx(float(1 - Fraction(tokens, len(found.rows) * T)), abs=1e-15)
    assert sum(found.widths) == padded and max(found.lengths) <= T and found.fewest == -(-tokens // T)
    assert [list(row) for row in found.rows] == packed(found.lengths, T, values.get("heuristic", "best-fit decreasing"))
    if values.get("order") == "sorted by length":
        assert list(found.lengths) == sorted(found.lengths)
        if D % b == 0:
            assert found.to_longest <= waste(**{**values, "order": "as they come"}).to_longest + 1e-15


def test_lengths_are_those_of_real_documents() -> None:
    found, everything = waste(documents=96, length=1024), [min(1024, len(each)) for each in corpus.documents()]
    assert all(found.lengths.count(n) <= everything.count(n) for n in found.lengths)
    assert list(found.lengths) != sorted(found.lengths) != sorted(waste(documents=96, length=1024, seed=1).lengths)


# The leak.


@given(settings_of(leak))
@settings(max_examples=15)
def test_what_a_target_depends_on_is_what_two_layers_reach_and_nothing_else(values: dict[str, Any]) -> None:
    result = leak(**values)
    looks = rows.MASKS[values.get("mask", "plain causal")](result.lengths).double()
    reach, known = looks @ looks > 0, ~result.map[:, :1].isnan()
    assert torch.equal((result.map > 0) & known, reach & known)
    assert bool((result.map[known.expand_as(result.map) & ~reach] == 0).all())  # to the last bit
    starts = rows.positions_of(result.lengths) == 0
    assert torch.equal(known[:, 0], torch.cat([~starts[1:], torch.tensor([False])]))


@given(seed=st.integers(0, 9999), documents=st.integers(2, 5), longest=st.integers(8, 24))
@settings(max_examples=15)
def test_with_the_right_mask_nothing_leaks_to_the_last_bit(seed: int, documents: int, longest: int) -> None:
    result = leak(mask="block causal", documents=documents, longest=longest, seed=seed)
    assert result.leaked == 0.0 and result.ahead == 0.0
    assert torch.equal(result.between, result.between.diag().diag()) and bool((result.between.diag() > 0).all())


@pytest.mark.parametrize(("mask", "moves"), [("block causal", False), ("plain causal", True)])
def test_another_text_in_the_first_document_moves_the_logits_of_the_others_or_not_a_bit(mask: str, moves: bool) -> None:
    row, model = texts(0, 3, 16), Reader(seed=0)
    lengths = [len(text) for text in row]
    where, looks = rows.positions_of(lengths), rows.MASKS[mask](lengths)
    before, after = (
        model(model.embedding[torch.cat([first, *row[1:]])], where, looks)[lengths[0] :]
        for first in (row[0], row[0].flip(0))
    )
    assert torch.equal(before, after) != moves


@pytest.mark.parametrize("mask", rows.MASKS)
def test_gradients_between_documents_by_a_backward_for_each(mask: str) -> None:
    found, model, row = leak(mask=mask, seed=2), Reader(seed=2), texts(2, 3, 16)
    lengths = [len(text) for text in row]
    tokens, ends = torch.cat(row), torch.tensor([0, *lengths]).cumsum(0).tolist()
    x = model.embedding.detach()[tokens].requires_grad_()
    logits = model(x, rows.positions_of(lengths), rows.MASKS[mask](lengths))
    for at, (start, end) in enumerate(itertools.pairwise(ends)):
        loss = F.cross_entropy(logits[start : end - 1], tokens[start + 1 : end], reduction="sum")
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        norms = [float(part.norm()) for part in slope.split(lengths)]
        assert found.between[at].tolist() == pytest.approx(norms, rel=1e-12)
    others = math.hypot(*found.between[-1, :-1].tolist())
    assert found.leaked == pytest.approx(others / float(found.between[-1, -1]), rel=1e-14)
    assert (found.leaked > 0.01) == (mask in ("plain causal", "block, off by one"))
    assert (found.ahead > 0.01) == (mask == "block, both ways")


def test_the_map_by_finite_differences() -> None:
    found, model, row = leak(seed=1), Reader(seed=1), texts(1, 3, 16)
    lengths = [len(text) for text in row]
    tokens, t = torch.cat(row), lengths[0] + 2
    x, step = model.embedding.detach()[tokens], 1e-6
    for s in (1, t - 1, t):
        slopes = []
        for coordinate in range(24):
            sides = []
            for sign in (1, -1):
                moved = x.clone()
                moved[s, coordinate] += sign * step
                logits = model(moved, rows.positions_of(lengths), rows.plain_causal(lengths))
                sides.append(F.cross_entropy(logits[t], tokens[t + 1]).item())
            slopes.append((sides[0] - sides[1]) / (2 * step))
        assert float(found.map[t, s]) == pytest.approx(math.hypot(*slopes), rel=1e-6)


# The boundary.


@given(settings_of(boundary))
@settings(max_examples=15)
def test_every_way_to_label_is_off_as_algebra_predicts(values: dict[str, int]) -> None:
    found, seed = boundary(**values), values.get("seed", 0)
    row = texts(seed, values.get("documents", 4), values.get("longest", 16))
    model, D, N = Reader(seed=seed), len(row), sum(len(text) - 1 for text in row)
    alone = [model(model.embedding[text], torch.arange(len(text)), rows.plain_causal([len(text)])) for text in row]
    good = sum(F.cross_entropy(z[:-1], text[1:], reduction="sum") for z, text in zip(alone, row, strict=True))
    pairs = itertools.pairwise(range(D))
    over = sum(F.cross_entropy(alone[a][-1], row[b][0]) for a, b in pairs)
    last = sum(F.cross_entropy(z[-2], text[-1]) for z, text in zip(alone, row, strict=True))
    one, bridge, end = (slope(model, loss) for loss in (good, over, last))
    G, (good, over, last) = one / N, (float(each.detach()) for each in (good, over, last))
    expected = {
        "first ignored": (good, one, N, 0, 0),
        "nothing ignored": (good + over, one + bridge, N + D - 1, D - 1, 0),
        "last ignored": (good + over - last, one + bridge - end, N - 1, D - 1, D),
        "both ignored": (good - last, one - end, N - D, 0, D),
    }
    assert found.loss == pytest.approx(good / N, rel=1e-13)
    for way in found.ways:
        loss, gradient, targets, across, lost = expected[way.name]
        assert (way.targets, way.across, way.lost) == (targets, across, lost)
        assert way.loss == pytest.approx(loss / targets, rel=1e-12)
        off = float((gradient / targets - G).norm() / G.norm())
        assert way.relative_error == pytest.approx(off, rel=1e-9, abs=found.tolerance.value)
        assert (way.relative_error <= found.tolerance.value) == (way.name == "first ignored")


def slope(model: Reader, loss: torch.Tensor) -> torch.Tensor:
    parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


# Positions.


@given(settings_of(positions))
@settings(max_examples=15)
def test_rotary_does_not_notice_where_a_document_stands_and_learned_does(values: dict[str, int]) -> None:
    learned, running, rotary, turned = positions(**values).kinds
    for kind in (learned, rotary, turned):
        assert kind.equal and kind.logits < 1e-13 and kind.tolerance.value < 1e-11
    assert not running.equal and running.relative_error > 0.05 and running.logits > 0.05


@pytest.mark.parametrize("rotary", [False, True])
def test_the_first_document_never_notices_and_a_flat_table_has_nothing_to_notice(rotary: bool) -> None:
    row, model = texts(0, 3, 16), Reader(seed=0, rotary=rotary)
    right, n = one_by_one(model, row), len(row[0])
    assert (read(model, row, reset=False)[:n] - right.logits[:n]).abs().max() < 1e-13
    if model.position is not None:
        with torch.no_grad():
            model.position.copy_(model.position[:1].expand_as(model.position))
        right = one_by_one(model, row)
        assert (read(model, row, reset=False) - right.logits).norm() < 1e-14 * right.logits.norm()


def test_rotary_under_a_plain_mask_is_off_too() -> None:
    row, model = texts(0, 3, 16), Reader(seed=0, rotary=True)
    lengths, right = [len(text) for text in row], one_by_one(model, row)
    logits = model(model.embedding[torch.cat(row)], torch.arange(sum(lengths)), rows.plain_causal(lengths))
    assert (logits - right.logits).norm() > 0.1 * right.logits.norm()


# All of them.


@pytest.mark.parametrize("run", [waste, leak, boundary, positions])
@given(data=st.data())
@settings(max_examples=10)
def test_what_is_declared_runs_the_same_twice(run: Callable[..., Any], data: st.DataObject) -> None:
    values, state = data.draw(settings_of(run)), torch.get_rng_state()
    assert repr(vars(run(**values))) == repr(vars(run(**values))) and torch.equal(torch.get_rng_state(), state)
