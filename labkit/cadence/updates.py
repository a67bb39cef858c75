"""What a rule of cadence does to the path of the weights, and to one number that should advance once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from labkit import rules
from labkit.cadence.stepping import Average, Loss, Seed, Training
from labkit.corpus import Batch
from labkit.declare import Choice, Range, Switch, quantity
from labkit.errors import LabError
from labkit.tolerance import Tolerance, tolerance

ROWS = 4  # examples of one microbatch
AXES = torch.tensor([[1.2, 0.4], [-0.15, 0.45]], dtype=torch.float64)  # what spreads the examples
TRUE, START = torch.tensor([[2.0, 1.0], [-1.0, 2.0]], dtype=torch.float64)
OPTIMIZERS: dict[str, Callable[[list[Tensor], float], torch.optim.Optimizer]] = {
    "SGD": lambda weights, rate: torch.optim.SGD(weights, lr=rate),
    "SGD with momentum": lambda weights, rate: torch.optim.SGD(weights, lr=rate, momentum=0.9),
    "AdamW": lambda weights, rate: torch.optim.AdamW(weights, lr=rate, weight_decay=0.1),
}
# What a rule needs of an optimizer, and which has it; a step per microbatch needs nothing.
NEEDS = {
    "adam-count-per-microbatch": ("counts no steps", "AdamW"),
    "moments-per-microbatch": ("keeps no second moment", "AdamW"),
    "momentum-per-microbatch": ("keeps no momentum buffer", "SGD with momentum"),
    "decay-per-microbatch": ("decays no weights", "AdamW"),
}
Method = Annotated[str, Choice((*NEEDS, "step-per-microbatch"), help="what advances at every microbatch")]
Steps = Annotated[int, Range(1, 16, log=True, unit="microbatches", help="K, microbatches of one optimizer step")]
Fixed = Annotated[bool, Switch(help="on: all K gradients are taken at the weights before the window")]


@dataclass(frozen=True, eq=False)
class Problem:
    """Least squares with two weights: the mean of (x · w − y)² / 2, in K microbatches."""

    microbatches: list[Batch]

    @property
    def hessian(self) -> Tensor:
        """Second derivative of the whole batch's loss, [2, 2]."""
        x = torch.cat([x for x, _ in self.microbatches])
        return x.T @ x / len(x)

    @property
    def minimum(self) -> Tensor:
        """The weights of least loss, [2]."""
        x, y = (torch.cat(each) for each in zip(*self.microbatches, strict=True))
        solution: Tensor = torch.linalg.lstsq(x, y[:, None]).solution
        return solution[:, 0]

    def shares(self, path: Tensor) -> Tensor:
        """The contribution of each microbatch to the gradient, at each of the weights [n, 2], as [n · K, 2]."""
        x, y = (torch.stack(each) for each in zip(*self.microbatches, strict=True))
        off = torch.einsum("kbi,ni->nkb", x, path) - y
        return torch.einsum("nkb,kbi->nki", off, x).flatten(0, 1) / y.numel()

    def excess(self, path: Tensor) -> Tensor:
        """Loss above the least, at weights [n, 2]."""
        away = path - self.minimum
        return ((away @ self.hessian) * away).sum(1) / 2


def problem(K: int, seed: int) -> Problem:
    """Made examples, four a microbatch, whose microbatches pull in different directions.

    >>> len(problem(4, 0).microbatches), problem(4, 0).hessian.shape
    (4, torch.Size([2, 2]))
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(K * ROWS, 2, generator=generator, dtype=torch.float64) @ AXES
    noise = torch.randn(K * ROWS, generator=generator, dtype=torch.float64)
    y = x @ TRUE + noise
    return Problem(list(zip(x.split(ROWS), y.split(ROWS), strict=True)))


@dataclass(frozen=True, eq=False)
class Path:
    """Where the weights go by a rule, beside the right path."""

    rule: str = quantity("the rule's word")
    optimizer: str = quantity("the optimizer of both paths")
    right: Tensor = quantity("weights of the right path, before the first and after every window, [T + 1, 2]")
    wrong: Tensor = quantity("weights by the rule, [T + 1, 2]")
    minimum: Tensor = quantity("weights of least loss, [2]")
    hessian: Tensor = quantity("second derivative of the loss, [2, 2]")
    right_loss: Tensor = quantity("loss of the right path above the least, [T + 1]")
    wrong_loss: Tensor = quantity("loss by the rule above the least, [T + 1]")
    distance: float = quantity("distance of the two ends")
    travelled: float = quantity("length of the right path")
    equal: bool = quantity("whether rounding explains the distance")
    tolerance: Tolerance = quantity("distance / travelled that rounding alone explains")


def path(
    *,
    rule: Method = "step-per-microbatch",
    optimizer: Annotated[str, Choice(tuple(OPTIMIZERS), help="momentum 0.9; AdamW: weight decay 0.1")] = "AdamW",
    accumulation_steps: Steps = 4,
    learning_rate: Annotated[float, Range(0.01, 1, log=True, help="η of both paths")] = 0.2,
    steps: Annotated[int, Range(1, 60, unit="windows", help="T, windows of K microbatches")] = 25,
    fixed_weights: Fixed = False,
    seed: Seed = 0,
) -> Path:
    """The path of two weights by a rule, and the right one: the same K microbatches in every window.

    >>> path(optimizer="SGD", fixed_weights=True).equal, path(fixed_weights=True).equal
    (True, False)

    float64; the loss is exactly quadratic. The tolerance counts the start and every microbatch's share of every
    update as terms. Raises LabError for a rule that the optimizer leaves without meaning.
    """
    lacks, has = NEEDS.get(rule, ("", optimizer))
    if optimizer != has:
        raise LabError(f"optimizer = {optimizer!r} {lacks}: try {has!r}")
    examples = problem(accumulation_steps, seed)
    setting = (examples, optimizer, learning_rate, steps, fixed_weights)
    right, wrong = walk("once-per-window", *setting), walk(rule, *setting)
    updates = right.diff(dim=0)
    travelled, distance = float(updates.norm(dim=1).sum()), float((right[-1] - wrong[-1]).norm())
    terms = torch.cat([START[None], updates, learning_rate * examples.shares(right[:-1])])
    roundings = 2 * ROWS + 10  # of one gradient and its way through an optimizer
    bound = tolerance(terms, count=len(terms), depth=roundings, dtype=torch.float64, result=travelled)
    least = (examples.minimum, examples.hessian, examples.excess(right), examples.excess(wrong))
    equal = distance <= bound.value * travelled
    return Path(rule, optimizer, right, wrong, *least, distance, travelled, equal, bound)


def walk(rule: str, examples: Problem, optimizer: str, learning_rate: float, steps: int, fixed_weights: bool) -> Tensor:
    """The weights before the first window and after each, [T + 1, 2].

    >>> walk("once-per-window", problem(4, 0), "AdamW", 0.2, steps=3, fixed_weights=False).shape
    torch.Size([4, 2])
    """
    w = START.clone().requires_grad_()
    training = Training(OPTIMIZERS[optimizer]([w], learning_rate))
    path = [START]
    for _ in range(steps):
        loss = _tangent(path[-1], w) if fixed_weights else _squares(w)
        rules.rule(rule).loop(loss, examples.microbatches, training)
        path.append(w.detach().clone())
    return torch.stack(path)


def _squares(w: Tensor) -> Loss:
    """The loss of a microbatch at the weights as they are."""
    return lambda microbatch: ((microbatch[0] @ w - microbatch[1]) ** 2).mean() / 2


def _tangent(fixed: Tensor, w: Tensor) -> Loss:
    """A loss whose gradient stays the one at the fixed weights, however the weights move."""

    def loss(microbatch: Batch) -> Tensor:
        x, y = microbatch
        return ((x @ fixed - y) @ x / len(y)) @ w

    return loss


# One number that should advance once.


@dataclass(frozen=True, eq=False)
class State:
    """One number of a training's state, right and by a rule."""

    rule: str = quantity("the rule's word")
    steps: Tensor = quantity("optimizer steps made, from 0")
    right: Tensor = quantity("the number where it advances once for an optimizer step")
    wrong: Tensor = quantity("the number where it advances K times")
    right_formula: Tensor = quantity("the right number by algebra")
    wrong_formula: Tensor = quantity("the wrong number by algebra")
    ratio: float = quantity("wrong / right after the first optimizer step")
    half_life_right: float = quantity("after which half of the start is left, by algebra", "optimizer steps")
    half_life_wrong: float = quantity("the same where it advances K times", "optimizer steps")
    off: float = quantity("largest difference from algebra, relative")
    tolerance: Tolerance = quantity("relative difference that rounding alone explains")


def state(
    *,
    rule: Annotated[
        str,
        Choice(
            ("decay-per-microbatch", "momentum-per-microbatch", "ema-per-microbatch"),
            help="a weight without gradient, the buffer under a constant gradient, the average after a jump",
        ),
    ] = "decay-per-microbatch",
    accumulation_steps: Steps = 8,
    coefficient: Annotated[float, Range(0.5, 0.9999, help="c: 1 − ηλ, momentum, or the average's decay")] = 0.9,
    steps: Annotated[int, Range(1, 200, log=True, unit="optimizer steps", help="windows of K microbatches")] = 20,
) -> State:
    """A number that is multiplied by c at every optimizer step, and at every microbatch.

    >>> numbers = state(steps=1, accumulation_steps=3, coefficient=0.99)
    >>> round(numbers.right[1].item(), 6), round(numbers.wrong[1].item(), 6)
    (0.99, 0.970299)

    float64, torch's AdamW and SGD. c^s and c^(sK) for a weight that decays; 1 − c^s and 1 − c^(sK) for an average;
    for the buffer those over 1 − c, where each microbatch brings 1/K of the gradient.
    """
    K, c = accumulation_steps, coefficient
    right, wrong = run(rule, "once-per-window", K, c, steps), run(rule, rule, K, c, steps)
    s = torch.arange(steps + 1, dtype=torch.float64)
    expected = formula(rule, s, c, 1), formula(rule, s, c, K)
    bound = tolerance([torch.ones(1)], count=4 * steps * K, dtype=torch.float64)
    tiny = torch.finfo(torch.float64).tiny  # smaller numbers have fewer digits
    off = max(
        float(((number - by).abs() / by.clamp(min=tiny)).max())
        for number, by in zip((right, wrong), expected, strict=True)
    )
    half = math.log(0.5) / math.log(c)
    return State(rule, s, right, wrong, *expected, float(wrong[1] / right[1]), half, half / K, off, bound)


def formula(rule: str, s: Tensor, c: float, K: int) -> Tensor:
    """The number after s optimizer steps of K advances each.

    >>> formula("decay-per-microbatch", torch.arange(3), 0.5, 2)
    tensor([1.0000, 0.2500, 0.0625])
    """
    if rule == "decay-per-microbatch":
        return c ** (s * K)
    gone = -torch.expm1(s * K * math.log(c))
    return gone / (K * (1 - c)) if rule == "momentum-per-microbatch" else gone


def run(rule: str, word: str, K: int, c: float, steps: int) -> Tensor:
    """The number that the rule is about, before the first optimizer step and after each by the loop of the word.

    >>> run("ema-per-microbatch", "once-per-window", K=2, c=0.5, steps=2)
    tensor([0.0000, 0.5000, 0.7500], dtype=torch.float64)
    """
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    training, read, slope = WATCHED[rule](weight, c)
    numbers = [read()]
    for _ in range(steps):
        rules.rule(word).loop(lambda _: slope * weight.sum(), range(K), training)
        numbers.append(read())
    return torch.tensor(numbers, dtype=torch.float64)


Watched = tuple[Training, Callable[[], float], float]


def _decayed(weight: Tensor, c: float) -> Watched:
    """A weight under decoupled decay, without gradient."""
    return Training(torch.optim.AdamW([weight], lr=1.0, weight_decay=1 - c)), weight.item, 0.0


def _buffer(weight: Tensor, c: float) -> Watched:
    """The momentum buffer under a gradient of 1."""
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=c)
    return Training(optimizer), lambda: float(optimizer.state[weight].get("momentum_buffer", 0.0)), 1.0


def _averaged(weight: Tensor, c: float) -> Watched:
    """The average of a weight that has just jumped from 0 to 1."""
    average = Average([torch.zeros_like(weight)], decay=c)
    average.parameters = [weight]
    return Training(torch.optim.SGD([weight], lr=1.0), average=average), average.values[0].item, 0.0


WATCHED = {
    "decay-per-microbatch": _decayed,
    "momentum-per-microbatch": _buffer,
    "ema-per-microbatch": _averaged,
}
