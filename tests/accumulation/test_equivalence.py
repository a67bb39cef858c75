"""Conditions, empty microbatches and one step by hand, against arithmetic and torch's own modules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.accumulation.equivalence import Net, _contributions, _examples, by_hand, conditions, empty
from labkit.corpus import batch, made
from labkit.errors import LabError
from labkit.nets import IGNORE, Scalar, Transformer
from tests.strategies import settings_of

torch.set_num_threads(1)

CONDITIONS = ("same_examples", "averaged", "one_update", "equal_statistics", "equal_randomness")


@given(settings_of(by_hand))
@settings(deadline=None)
def test_one_step_by_pencil_and_by_backward_agree(values: dict[str, float]) -> None:
    step = by_hand(**values)
    size = max(1.0, abs(step.after))
    assert step.accumulated == pytest.approx(step.mean, abs=1e-14 * 10)
    assert step.stepped == pytest.approx(step.after, abs=1e-14 * size * 10)


def test_one_step_in_numbers() -> None:
    step = by_hand(gradient_1=1.0, gradient_2=2.0, gradient_3=6.0, weight=1.0, learning_rate=0.1)
    assert (step.mean, step.accumulated) == (3, 3)
    assert step.stepped == pytest.approx(1 - 0.3) and step.undivided == pytest.approx(1 - 0.9)


@pytest.mark.parametrize("K", range(2, 9))
def test_accumulation_equals_the_large_batch_while_every_condition_holds(K: int) -> None:
    for seed in range(3):
        result = conditions(accumulation_steps=K, seed=seed)
        assert result.equal and result.broken == () and result.relative_error < 1e-14 < result.tolerance.value < 1e-10


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("K", [2, 5, 8])
def test_every_condition_alone_breaks_it(name: str, K: int) -> None:
    outcome = conditions(accumulation_steps=K, **{name: False})
    assert not outcome.equal and outcome.broken == (name.replace("_", " "),) and outcome.relative_error > 0.02


def test_all_switches_in_every_position() -> None:
    for on in itertools.product([True, False], repeat=5):
        outcome = conditions(**dict(zip(CONDITIONS, on, strict=True)))
        assert outcome.equal == all(on) and len(outcome.broken) == on.count(False)


@pytest.mark.parametrize("K", [2, 4, 8])
def test_without_averaging_the_update_is_k_times_as_long(K: int) -> None:
    outcome = conditions(averaged=False, accumulation_steps=K)
    assert outcome.norm_ratio == pytest.approx(K) and outcome.relative_error == pytest.approx(K - 1)


def test_the_batch_dependent_layer_is_torchs_batch_norm() -> None:
    net, ((x, _, kept), _) = Net(0), _examples(0)
    layer = torch.nn.BatchNorm1d(16, affine=False, dtype=torch.float64)
    expected = layer(x @ net.first.T).relu() * kept @ net.second
    assert (net(x, kept) - expected).abs().max() < 1e-12
    assert set(kept.unique().tolist()) == {0, 2}


def policies(**values: int) -> dict[str, Any]:
    return {each.name: each for each in empty(**values).policies}


@pytest.mark.parametrize(("K", "e"), [(2, 1), (4, 1), (4, 3), (8, 5)])
def test_an_empty_microbatch_dilutes_poisons_or_adds_nothing(K: int, e: int) -> None:
    by_policy = policies(accumulation_steps=K, empty=e, shortest=32)
    hand, library, right = by_policy.values()
    assert math.isnan(hand.loss) and math.isnan(hand.empty_norm) and math.isnan(hand.relative_error)
    assert math.isnan(library.loss) and library.empty_norm == 0 and library.dilution == pytest.approx((K - e) / K)
    assert library.relative_error == pytest.approx(e / K)
    assert math.isfinite(right.loss) and right.empty_norm == 0 and right.dilution == pytest.approx(1)
    assert right.relative_error < 1e-14


def test_without_empty_ones_nothing_is_wrong_but_the_means() -> None:
    hand, library, right = policies(empty=0, shortest=32).values()
    for each in (hand, library, right):
        assert each.relative_error < 1e-13 and each.dilution == pytest.approx(1) and each.empty_norm == 0
    assert policies(empty=0)["library mean"].relative_error > 1e-3


@pytest.mark.parametrize(("policy", "gradient"), [("library mean", 1.0), ("token mean", 2.0)])
def test_the_shipped_case(policy: str, gradient: float) -> None:
    losses, parts = _contributions(policy, Scalar(), made([[[]], [[2, 2, 2, 2]]]))  # B29
    assert float(parts.sum()) == pytest.approx(gradient) and float(parts[0]) == 0
    assert math.isnan(losses[0]) == (policy == "library mean")


def test_the_mean_by_hand_is_the_librarys_where_there_are_targets() -> None:
    tokens, labels = batch(0, 2)
    model = Transformer(dtype=torch.float64)
    hand, library = (
        _contributions(name, model, [(tokens, labels)])[1] for name in ("masked mean by hand", "library mean")
    )
    assert (hand - library).norm() < 1e-13 * library.norm()
    assert int((labels != IGNORE).sum()) < labels.numel()


def test_a_window_without_targets_is_refused_with_a_remedy() -> None:
    with pytest.raises(LabError, match="empty = 4 of 4 microbatches leaves none: try 3"):
        empty(accumulation_steps=4, empty=4)
    assert empty(accumulation_steps=4, empty=3).counts[:3] == (0, 0, 0)


@pytest.mark.parametrize("run", [by_hand, conditions, empty])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_what_is_declared_runs_the_same_twice(run: Callable[..., Any], data: st.DataObject) -> None:
    values = data.draw(settings_of(run))
    try:
        assert repr(run(**values)) == repr(run(**values))
    except LabError as refused:
        assert run(**{**values, "empty": int(str(refused).rpartition("try ")[2])})
