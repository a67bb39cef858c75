"""Batches that do not divide, and tails: what the library does, and what padding does."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import LabError, pipeline, workers
from labkit.pipeline.indivisible_batches import pieces, reference, refuse
from tests.pipeline.test_pipeline import full_batch

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("rows", "tail", "why"),
    [
        (7, 0, r"rank 1: ValueError: Expected input batch_size \(2\) to match target batch_size \(1\)"),
        (3, 0, r"rank [01]: .*(Expecting 4 arg_mbs but got 3|smaller than num_chunks)"),
        (8, 4, r"rank 1: ValueError: Expected input batch_size \(2\) to match target batch_size \(1\)"),
        (4, 8, r"rank 1.*SIGABRT"),
    ],
)
def test_the_library_fails_and_the_next_run_works(rows: int, tail: int, why: str) -> None:
    found = pipeline.indivisible(rows=rows, tail=tail)
    assert re.match(why, found.said), found.said
    assert not found.right and found.errors == () and "try the same" not in found.said and "\n" not in found.said
    assert workers.run("labkit.workers:total", 2, value=1) == [2.0, 2.0]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(
    ("rows", "tail", "ignored"), [(7, 0, 1), (3, 0, 1), (8, 4, 4), (4, 8, 4), (7, 3, 6), (8, 8, 0)]
)
def test_padding_is_exact(rows: int, tail: int, ignored: int, schedule: str) -> None:
    found = pipeline.indivisible(rows=rows, tail=tail, treatment="padded", schedule=schedule)
    assert found.right and found.said == "" and len(found.errors) == (2 if tail else 1)
    assert found.ignored == ignored and set(found.pieces + found.later) == {-(-max(rows, tail) // 4)}


def test_what_divides_needs_no_help() -> None:
    for treatment in ("as it is", "refused"):
        found = pipeline.indivisible(rows=8, tail=8, treatment=treatment)
        assert found.right and found.ignored == 0 and not found.padded and found.pieces == found.later == (2, 2, 2, 2)


def test_the_reference_is_the_mean_over_the_tokens_of_the_batch() -> None:
    right, bound = reference(2, 4, *pipeline.data(7, 4))
    whole = full_batch(2, 7, 4)
    assert (right - whole).norm() / whole.norm() <= bound.value < 1e-11


@given(st.integers(1, 16), st.integers(0, 16), st.integers(1, 8))
def test_what_is_refused_says_what_to_do(rows: int, tail: int, microbatches: int) -> None:
    alike = rows % microbatches == 0 and tail in (0, rows)
    if alike:
        refuse(rows, tail, microbatches)
        assert len({*pieces(rows, microbatches), *pieces(tail, microbatches)}) == 1
        return
    with pytest.raises(LabError, match=r"^(rows|tail) = \d+ .*: .*try \d+$"):
        refuse(rows, tail, microbatches)
    with pytest.raises(LabError, match=r"^(rows|tail) = "):
        pipeline.indivisible(rows=rows, tail=tail, microbatches=microbatches, treatment="refused")


@given(st.integers(1, 40), st.integers(1, 8))
def test_pieces_are_as_the_library_cuts(rows: int, microbatches: int) -> None:
    found = pieces(rows, microbatches)
    assert sum(found) == rows and len(found) == microbatches and max(found) - min(found) <= 1
    assert list(found) == sorted(found, reverse=True) and pieces(0, microbatches) == ()
