"""Paths against plain numpy, and numbers that advance K times against powers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cadence.updates import NEEDS, OPTIMIZERS, START, Problem, path, problem, state
from labkit.errors import LabError
from tests.strategies import settings_of

torch.set_num_threads(1)

Array = np.ndarray[Any, np.dtype[np.float64]]
RULES = (*NEEDS, "step-per-microbatch")
MEANT = [
    (rule, optimizer) for rule in RULES for optimizer in OPTIMIZERS if rule not in NEEDS or NEEDS[rule][1] == optimizer
]
STATES = ("decay-per-microbatch", "momentum-per-microbatch", "ema-per-microbatch")


class Numpy:
    """Each optimizer by its equations, and what a rule makes of one window."""

    def __init__(self, optimizer: str, given: Problem, rate: float) -> None:
        self.kind, self.rate = optimizer, rate
        self.parts = [(x.numpy(), y.numpy()) for x, y in given.microbatches]
        self.w, self.m, self.v, self.t = START.numpy().copy(), np.zeros(2), np.zeros(2), 0

    def slope(self, k: int, w: Array) -> Array:
        x, y = self.parts[k]
        return x.T @ (x @ w - y) / len(y)

    def remember(self, g: Array, t: int = 1) -> None:
        if self.kind == "AdamW":
            self.m, self.v, self.t = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g * g, self.t + t
        else:
            self.m = (0.9 if self.kind == "SGD with momentum" else 0.0) * self.m + g

    def move(self, rate: float) -> None:
        if self.kind == "AdamW":
            self.w = self.w * (1 - rate * 0.1)
            root = np.sqrt(self.v / (1 - 0.999**self.t)) + 1e-8
            self.w = self.w - rate * self.m / (1 - 0.9**self.t) / root
        else:
            self.w = self.w - rate * self.m

    def window(self, rule: str, fixed: bool) -> None:
        K, held = len(self.parts), self.w
        if rule == "step-per-microbatch":
            for k in range(K):
                self.remember(self.slope(k, held if fixed else self.w))
                self.move(self.rate / K)
            return
        slopes = []
        for k in range(K):
            slopes.append(self.slope(k, held if fixed else self.w) / K)
            if rule == "decay-per-microbatch" and k < K - 1:
                self.w = self.w * (1 - self.rate * 0.1)
        if rule in ("moments-per-microbatch", "momentum-per-microbatch"):
            for each in slopes:
                self.remember(each)
        else:
            self.remember(sum(slopes, np.zeros(2)), K if rule == "adam-count-per-microbatch" else 1)
        self.move(self.rate)


def by_numpy(rule: str, optimizer: str, given: Problem, rate: float, steps: int, fixed: bool) -> Array:
    run, found = Numpy(optimizer, given, rate), [START.numpy()]
    for _ in range(steps):
        run.window(rule, fixed)
        found.append(run.w)
    return np.stack(found)


@pytest.mark.parametrize(("rule", "optimizer"), MEANT)
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("K", "rate", "seed"), [(4, 0.2, 0), (7, 0.05, 3)])
def test_both_paths_are_those_of_numpy(rule: str, optimizer: str, fixed: bool, K: int, rate: float, seed: int) -> None:
    values: dict[str, Any] = {"accumulation_steps": K, "learning_rate": rate, "seed": seed, "steps": 12}
    paths = path(rule=rule, optimizer=optimizer, fixed_weights=fixed, **values)
    for word, each in (("once-per-window", paths.right), (rule, paths.wrong)):
        expected = by_numpy(word, optimizer, problem(K, seed), rate, 12, fixed)
        assert np.abs(each.numpy() - expected).max() < 1e-12
    assert (paths.rule, paths.optimizer) == (rule, optimizer)


def test_ends_lengths_and_losses_are_those_of_the_paths() -> None:
    found, given = path(steps=7, seed=2), problem(4, 2)
    x, y = (torch.cat(each) for each in zip(*given.microbatches, strict=True))
    normal = torch.linalg.solve(x.T @ x, x.T @ y)
    assert (found.minimum - normal).norm() < 1e-12 and x.shape == (16, 2)
    for each, losses in ((found.right, found.right_loss), (found.wrong, found.wrong_loss)):
        expected = [float(((x @ w - y) ** 2).mean() - ((x @ normal - y) ** 2).mean()) / 2 for w in each]
        assert losses.tolist() == pytest.approx(expected, rel=1e-9)
        assert len(each) == 8
    assert found.distance == pytest.approx(math.dist(found.right[-1].tolist(), found.wrong[-1].tolist()))
    steps = zip(found.right.tolist(), found.right[1:].tolist(), strict=False)
    assert found.travelled == pytest.approx(sum(math.dist(a, b) for a, b in steps))
    w = START.clone().requires_grad_()
    second = torch.autograd.functional.hessian(lambda w: ((x @ w - y) ** 2).mean() / 2, w)
    assert torch.as_tensor(second).sub(found.hessian).norm() < 1e-12
    (slope,) = torch.autograd.grad(((x @ w - y) ** 2).mean() / 2, w)
    shares = given.shares(torch.stack([START, normal]))
    assert shares.shape == (8, 2) and (shares[:4].sum(0) - slope).norm() < 1e-12 and shares[4:].sum(0).norm() < 1e-12


@pytest.mark.parametrize("K", [2, 3, 8, 16])
def test_steps_of_plain_sgd_are_equal_at_fixed_weights_and_nowhere_else(K: int) -> None:
    for seed in range(2):
        values: dict[str, Any] = {"accumulation_steps": K, "seed": seed, "steps": 15}
        equal = path(optimizer="SGD", fixed_weights=True, **values)
        assert equal.equal and equal.distance < 1e-14 * equal.travelled < equal.tolerance.value < 1e-10
        for optimizer, fixed in (("SGD", False), ("SGD with momentum", True), ("AdamW", True), ("AdamW", False)):
            paths = path(optimizer=optimizer, fixed_weights=fixed, **values)
            assert not paths.equal and paths.distance > 1e-5 * paths.travelled


def test_the_smallest_learning_rate_and_one_window_still_tell_them_apart() -> None:
    paths = path(optimizer="SGD", learning_rate=0.01, steps=1)
    assert not paths.equal and paths.distance > 1e3 * paths.tolerance.value * paths.travelled
    assert path(optimizer="SGD", learning_rate=0.01, steps=1, fixed_weights=True).equal


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounding_stays_within_the_tolerance_over_a_long_path(optimizer: str) -> None:
    for rate in (0.01, 1.0):
        paths = path(optimizer=optimizer, steps=60, accumulation_steps=16, learning_rate=rate, fixed_weights=True)
        expected = by_numpy("once-per-window", optimizer, problem(16, 0), rate, 60, True)[-1]
        off = np.linalg.norm(paths.right[-1].numpy() - expected) / paths.travelled
        assert off < paths.tolerance.value < 1e-8
        assert paths.equal == (optimizer == "SGD")


def test_one_microbatch_makes_no_difference() -> None:
    for rule, optimizer in MEANT:
        paths = path(rule=rule, optimizer=optimizer, accumulation_steps=1)
        assert paths.equal and torch.equal(paths.right, paths.wrong)


def test_microbatches_pull_in_different_directions() -> None:
    given = problem(4, 0)
    pulls = given.shares(given.minimum[None])
    assert pulls.norm(dim=1).min() > 1e3 * pulls.sum(0).norm() and not torch.equal(pulls, given.shares(START[None]))


@pytest.mark.parametrize("rule", NEEDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_rule_without_meaning_names_an_optimizer_that_has_it(rule: str, optimizer: str) -> None:
    if (rule, optimizer) in MEANT:
        return
    with pytest.raises(LabError, match=f"optimizer = '{optimizer}' .*: try '.*'") as caught:
        path(rule=rule, optimizer=optimizer)
    remedy = str(caught.value).rpartition("try ")[2].strip("'")
    assert not path(rule=rule, optimizer=remedy).equal


def test_the_sentence_of_a_refusal() -> None:
    with pytest.raises(LabError, match=r"^optimizer = 'SGD' keeps no momentum buffer: try 'SGD with momentum'$"):
        path(rule="momentum-per-microbatch", optimizer="SGD")


def test_as_it_stands_there_is_something_to_see() -> None:
    for rule, optimizer in MEANT:
        if (rule, optimizer) != ("step-per-microbatch", "SGD"):
            paths = path(rule=rule, optimizer=optimizer)
            apart = (paths.right - paths.wrong).norm(dim=1).max()
            assert apart > 0.1 * (paths.right - START).norm(dim=1).max()


def powers(rule: str, s: int, c: Fraction, K: int) -> Fraction:
    """The number by its recursion, in fractions, after s optimizer steps."""
    number = Fraction(rule == "decay-per-microbatch")
    for _ in range(s * K):
        number = {
            "decay-per-microbatch": c * number,
            "momentum-per-microbatch": c * number + Fraction(1, K),
            "ema-per-microbatch": c * number + (1 - c),
        }[rule]
    return number


@pytest.mark.parametrize("rule", STATES)
@pytest.mark.parametrize(("K", "c", "steps"), [(8, 0.9, 6), (3, 0.5, 10), (16, 0.9999, 4), (1, 0.75, 5)])
def test_a_state_is_its_recursion(rule: str, K: int, c: float, steps: int) -> None:
    numbers = state(rule=rule, accumulation_steps=K, coefficient=c, steps=steps)
    for times, ran, formula in ((1, numbers.right, numbers.right_formula), (K, numbers.wrong, numbers.wrong_formula)):
        expected = [float(powers(rule, s, Fraction(c), times)) for s in range(steps + 1)]
        assert ran.tolist() == pytest.approx(expected, rel=1e-12) and formula.tolist() == pytest.approx(expected, 1e-12)
    assert numbers.ratio == pytest.approx(float(powers(rule, 1, Fraction(c), K) / powers(rule, 1, Fraction(c), 1)))
    assert numbers.off <= numbers.tolerance.value and numbers.steps.tolist() == list(range(steps + 1))
    assert c**numbers.half_life_right == pytest.approx(0.5) and numbers.half_life_right == pytest.approx(
        K * numbers.half_life_wrong
    )


def test_the_shipped_case_of_the_decay() -> None:
    numbers = state(accumulation_steps=3, coefficient=0.99, steps=1)
    assert numbers.right[1].item() == pytest.approx(0.99) and numbers.wrong[1].item() == pytest.approx(0.970299)  # B22


@pytest.mark.parametrize(
    ("rule", "first", "last"),
    [
        ("decay-per-microbatch", 0.9**7, 0.0),
        ("momentum-per-microbatch", (1 - 0.9**8) / 0.8, 1 / 8),
        ("ema-per-microbatch", (1 - 0.9**8) / 0.1, 1.0),
    ],
)
def test_what_the_fault_does_first_and_in_the_end(rule: str, first: float, last: float) -> None:
    numbers = state(rule=rule, steps=200)
    assert numbers.ratio == pytest.approx(first)
    assert float(numbers.wrong[-1] / numbers.right[-1]) == pytest.approx(last, abs=1e-9)


@pytest.mark.parametrize("rule", STATES)
@pytest.mark.parametrize("c", [0.5, 0.9999])
def test_the_extremes_of_a_state_stay_within_rounding(rule: str, c: float) -> None:
    numbers = state(rule=rule, accumulation_steps=16, coefficient=c, steps=200)
    assert numbers.off <= numbers.tolerance.value < 1e-11
    assert numbers.right.isfinite().all() and numbers.wrong.isfinite().all()


def test_the_difference_from_algebra_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.cadence.updates.formula", lambda rule, s, c, K: c ** (s * K + 1e-6))
    assert state().off > 1e5 * state().tolerance.value


@pytest.mark.parametrize("run", [path, state])
@given(data=st.data())
@settings(max_examples=15)
def test_what_is_declared_runs_the_same_twice_or_is_refused(run: Callable[..., Any], data: st.DataObject) -> None:
    values = data.draw(settings_of(run).map(lambda v: v | {"steps": min(v.get("steps", 5), 10)}))
    seed = torch.get_rng_state()
    try:
        result = run(**values)
        assert repr(result) == repr(run(**values)) and torch.equal(seed, torch.get_rng_state())
        assert all(each.isfinite().all() for each in vars(result).values() if isinstance(each, torch.Tensor))
    except LabError as refused:
        assert run(**{**values, "optimizer": str(refused).rpartition("try ")[2].strip("'")})
