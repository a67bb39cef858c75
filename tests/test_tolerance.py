"""The tolerance: its formula by hand, its promise on sums of random order, and on every rule, dtype and K."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labkit import rules
from labkit.accumulation import WINDOW, compare
from labkit.corpus import batch, split
from labkit.errors import LabError
from labkit.nets import Transformer
from labkit.tolerance import Compared, Tolerance, depth, gamma, tolerance, unit_roundoff

torch.set_num_threads(1)

WRONG = [word for word in WINDOW if not rules.TABLE[word].right]


def test_the_formula_by_hand() -> None:
    terms = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, -3.0]])
    bound = tolerance(terms, count=8, depth=2, dtype=torch.float32)
    assert (bound.terms, bound.unit_roundoff) == (10, 2.0**-24)
    assert bound.cancellation == pytest.approx(10 / math.sqrt(10))
    assert bound.value == pytest.approx(2 * 10 * 2.0**-24 / (1 - 10 * 2.0**-24) * math.sqrt(10))
    assert tolerance(terms, count=8, dtype=torch.float32, result=1.0).cancellation == pytest.approx(10)
    for part in ("n = 10", "u = 6e-08", "3.16", f"{bound.value:.2g}"):
        assert part in str(bound)


def test_a_result_is_equal_up_to_its_tolerance_and_never_where_its_error_is_no_number() -> None:
    @dataclass(frozen=True)
    class Result(Compared):
        relative_error: float
        tolerance: Tolerance

    bound = tolerance([torch.ones(1)], count=10, dtype=torch.float64)
    errors = (0.0, bound.value, math.nextafter(bound.value, 1), math.nan)
    assert [Result(error, bound).equal for error in errors] == [True, True, False, False]


def test_unit_roundoff_and_depth() -> None:
    assert [unit_roundoff(t) for t in (torch.float64, torch.float32, torch.bfloat16)] == [2.0**-53, 2.0**-24, 2.0**-8]
    assert depth(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False))) == 2 * (3 + 4)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=200), st.integers(0, 999))
@settings(deadline=None)
def test_two_orders_of_one_sum_stay_below_it(numbers: list[float], seed: int) -> None:
    terms = torch.tensor(numbers)
    one = np.float32(0)
    for value in terms.numpy():
        one += value
    other = terms[torch.randperm(len(terms), generator=torch.Generator().manual_seed(seed))].sum()
    exact = math.fsum(terms.tolist())
    if exact:
        bound = tolerance(terms[:, None], count=len(terms), dtype=torch.float32, result=abs(exact))
        assert abs(float(one) - float(other)) <= bound.value * abs(exact) + 1e-38


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("K", [1, 2, 4, 8, 16, 32])
def test_right_rules_stay_below_it_and_the_smallest_wrong_one_above(dtype: torch.dtype, K: int) -> None:
    model = Transformer(seed=K, dtype=dtype)
    microbatches = split(*batch(K, 32), K)
    for word in ("token-mean", "token-mean-once"):
        right = compare(model, microbatches, word)
        assert right.equal and right.relative_error < right.tolerance.value / 10
    wrong = [compare(model, microbatches, word) for word in WRONG]
    off = [each for each in wrong if (each.predicted - 1).abs().max() > 1e-9]
    assert len(off) >= (4 if K == 1 else 8)
    assert min(each.relative_error for each in off) > 20 * right.tolerance.value
    assert all(each.equal for each in wrong if each not in off)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_no_wider_than_one_token_in_a_thousand(dtype: torch.dtype) -> None:
    assert compare(Transformer(dtype=dtype), split(*batch(0, 8), 4), "token-mean").tolerance.value < 1e-3


def test_it_grows_with_terms_depth_and_cancellation() -> None:
    terms = torch.ones(2, 3)
    value = tolerance(terms, count=10, dtype=torch.float64).value
    assert tolerance(terms, count=20, dtype=torch.float64).value == pytest.approx(2 * value, rel=1e-12)
    assert tolerance(terms, count=10, depth=30, dtype=torch.float64).value == pytest.approx(4 * value, rel=1e-12)
    assert tolerance([*terms, -terms[0]], count=10, dtype=torch.float64).value == pytest.approx(3 * value, rel=1e-12)


def test_what_has_no_tolerance_is_said() -> None:
    with pytest.raises(LabError, match=r"n u = 1.* try float32"):
        gamma(256, torch.bfloat16)
    assert gamma(256, torch.float32) < 2e-5
    with pytest.raises(LabError, match="0 terms"):
        tolerance([], count=1, dtype=torch.float64)
    with pytest.raises(LabError, match="add up to 0"):
        tolerance(torch.tensor([[1.0], [-1.0]]), count=1, dtype=torch.float64)
    with pytest.raises(LabError, match="add up to nan"):
        tolerance(torch.tensor([[math.nan]]), count=1, dtype=torch.float64)
