"""What learners do to freeze a BatchNorm, and the formulas they write: each gets the sentence meant for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from labkit import check
from labkit.normalization.exercises import MOMENTUM, POOLED, Net

NORM = nn.BatchNorm2d


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, NORM)]


def by_loop(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def by_apply(model: nn.Module) -> nn.Module:
    return model.apply(lambda module: module.eval() if isinstance(module, nn.modules.batchnorm._BatchNorm) else module)


def for_good(model: nn.Module) -> None:
    """Lasts beyond the next model.train()."""
    for module in norms(model):
        module.eval()
        module.train = lambda mode=True, module=module: module  # type: ignore[method-assign,assignment,misc]


@pytest.mark.parametrize("freeze", [by_loop, by_apply, for_good])
def test_right_ways_are_accepted(freeze: Callable[..., Any]) -> None:
    verdict = check.frozen(freeze)
    assert verdict.passed and verdict.sentence.startswith("Right: microbatches are ")


def nothing(model: nn.Module) -> None:
    pass


def everything(model: nn.Module) -> None:
    model.eval()


def no_gradient(model: nn.Module) -> None:
    for module in norms(model):
        module.weight.requires_grad = module.bias.requires_grad = False


def momentum_zero(model: nn.Module) -> None:
    for module in norms(model):
        module.momentum = 0.0


def no_tracking(model: nn.Module) -> None:
    for module in norms(model):
        module.track_running_stats = False
        module.running_mean = module.running_var = None
        module.eval()


def undone_by_the_root(model: nn.Module) -> None:
    """train() walks down, so the last call, on the model itself, undoes the others."""
    model.apply(lambda module: module.train(not isinstance(module, NORM)))


def only_children(model: nn.Module) -> None:
    for module in model.children():
        if isinstance(module, NORM):
            module.eval()


def reset(model: nn.Module) -> None:
    for module in norms(model):
        module.reset_running_stats()
        module.eval()


def stuck(model: nn.Module) -> None:
    for module in norms(model):
        module.eval()
        module.requires_grad_(False)


def all_stuck(model: nn.Module) -> None:
    by_loop(model)
    model.requires_grad_(False)


def group_norm(model: Net) -> None:
    model.norm = nn.GroupNorm(2, 4)  # type: ignore[assignment]
    model.first[1] = nn.GroupNorm(2, 4)


def identity(model: Net) -> None:
    model.norm = nn.Identity()  # type: ignore[assignment]
    model.first[1] = nn.Identity()


def another(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval()


def no_dropout(model: Net) -> None:
    by_loop(model)
    model.dropout.p = 0.0


STILL = "% off that of one batch"


@pytest.mark.parametrize(
    ("freeze", "said"),
    [
        (nothing, ("The layers still normalise by their own microbatch", STILL, "Call .eval() on each BatchNorm")),
        (undone_by_the_root, ("The layers still normalise by their own microbatch",)),
        (everything, ("switches dropout off too: put only the BatchNorm layers in eval mode",)),
        (no_gradient, ("requires_grad=False freezes a layer's weight and bias, which do not look at the batch", STILL)),
        (momentum_zero, ("The running statistics stand still, and the layers do not use them", STILL, ".eval()")),
        (no_tracking, ("Without running statistics a BatchNorm uses those of the microbatch in eval mode too", STILL)),
        (only_children, ("first.1 still looks at the batch: go through model.modules()",)),
        (reset, ("In eval mode the model gives other outputs", "leave layers, weights and statistics alone")),
        (stuck, ("first.1.weight, first.1.bias, norm.weight and norm.bias would never train again",)),
        (all_stuck, ("would never train again",)),
        (group_norm, ("In eval mode the model gives other outputs than before",)),
        (identity, ("In eval mode the model gives other outputs than before",)),
        (another, ("returns another model: change the one it is given",)),
        (no_dropout, ("switches dropout off too",)),
        (lambda model: model.norms, ("AttributeError",)),
        (lambda: None, ("takes (), and is called with (model)",)),
        (3, ("This is a int and no function",)),
    ],
)
def test_each_wrong_way_gets_its_sentence(freeze: Any, said: tuple[str, ...]) -> None:
    verdict = check.frozen(freeze)
    assert not verdict.passed
    for words in said:
        assert words in verdict.sentence


def test_the_checks_are_told_apart() -> None:
    assert [ok for _, ok in check.frozen(nothing).checks] == [False, False, True, True, True]
    assert [ok for _, ok in check.frozen(everything).checks] == [True, True, False, True, True]
    assert [ok for _, ok in check.frozen(momentum_zero).checks] == [False, True, True, True, True]
    assert [ok for _, ok in check.frozen(stuck).checks] == [True, True, True, False, True]


def test_the_verdict_leaves_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    check.frozen(nothing)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    "right",
    [
        lambda m, K: 1 - (1 - m) ** K,
        lambda m, K: sum(m * (1 - m) ** k for k in range(K)),
        lambda m, K: 1 - torch.tensor(1 - m, dtype=torch.float64).pow(K).item(),
    ],
)
def test_right_momenta_are_accepted(right: Any) -> None:
    assert check.momentum(lambda momentum, accumulation: right(momentum, accumulation)).passed


def by_all_images(means: list[float], variances: list[float], counts: list[int]) -> float:
    """Images at mean ± standard deviation have these moments; an odd count does not matter to weights."""
    values = [(m + sign * v**0.5, n) for m, v, n in zip(means, variances, counts, strict=True) for sign in (-1, 1)]
    total = sum(n for _, n in values)
    mean = sum(x * n for x, n in values) / total
    return sum((x - mean) ** 2 * n for x, n in values) / total


def by_squares(means: list[float], variances: list[float], counts: list[int]) -> float:
    m, v, n = (torch.tensor(each, dtype=torch.float64) for each in (means, variances, counts))
    return float(((v + m**2) * n).sum() / n.sum() - ((m * n).sum() / n.sum()) ** 2)


def in_two_terms(means: list[float], variances: list[float], counts: list[int]) -> float:
    N = sum(counts)
    mean = sum(m * n for m, n in zip(means, counts, strict=True)) / N
    within = sum(v * n for v, n in zip(variances, counts, strict=True)) / N
    return within + sum(n * (m - mean) ** 2 for m, n in zip(means, counts, strict=True)) / N


@pytest.mark.parametrize("right", [by_all_images, by_squares, in_two_terms])
def test_right_variances_are_accepted(right: Any) -> None:
    assert check.pooled_variance(right).passed


@pytest.mark.parametrize("exercise", [MOMENTUM, POOLED])
def test_every_slip_is_told_in_its_own_words(exercise: Any) -> None:
    assert len(exercise.wrong) >= 8
    for words, wrong in exercise.wrong.items():
        names = ", ".join(exercise.names)
        verdict = exercise.judge(eval(f"lambda {names}: wrong({names})", {"wrong": wrong}), 5.0)
        assert not verdict.passed and verdict.sentence.endswith(f": {words}.")
