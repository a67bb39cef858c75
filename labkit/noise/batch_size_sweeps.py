"""Training runs to one target at many batch sizes and learning rates: steps, samples, and the best learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from labkit.cached_runs import cache_runs
from labkit.cadence.stepping import Seed
from labkit.cadence.translation import CURVATURE, DIRECTIONS, TRUE
from labkit.declare import Choice, Range, quantity
from labkit.noise import Noise

RATES = 2.0 ** torch.arange(-8, 9.5, 0.5, dtype=torch.float64)  # all learning rates tried
LIMIT = 30_000  # optimizer steps after which a race is given up
CHUNK = 4096  # examples of one seed that are drawn at once
MARGIN = 0.1  # a learning rate is as good as the best if it takes at most so many more steps
Direction = Callable[[Tensor, int], Tensor]


def sgd() -> Direction:
    """Plain SGD: the gradient itself."""
    return lambda g, step: g


def adam(beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> Direction:
    """Adam: the mean gradient over the root of its mean square, both corrected for their start at 0."""
    m = v = torch.zeros(())

    def direction(g: Tensor, step: int) -> Tensor:
        nonlocal m, v
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        return m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + epsilon)

    return direction


OPTIMIZERS = {"SGD": sgd, "Adam": adam}

Optimizer = Annotated[str, Choice(tuple(OPTIMIZERS), help="plain SGD, or Adam")]
Target = Annotated[float, Range(0.4, 2, log=True, help="loss above the least that counts as there; 8 at the start")]
Seeds = Annotated[int, Range(4, 32, unit="seeds", help="trainings at each learning rate")]
Largest = Annotated[int, Range(128, 512, log=True, unit="examples", help="the largest batch")]


@cache_runs
def race(batch: int, optimizer: str, noise: float, target: float, seeds: int, seed: int) -> Iterator[Tensor]:
    """Optimizer steps to the target at each learning rate, ∞ while it has not been reached, [seeds, 35].

    >>> *_, steps = race(64, "SGD", 1.0, 4.0, seeds=4, seed=0)
    >>> steps.shape, int(steps.mean(0).min())
    (torch.Size([4, 35]), 3)

    Noisy least squares from weights 0, constant learning rate; all rates of a seed see the same examples. The race
    ends after twice the steps that the first rate needs to bring every seed there: slower ones stay at ∞.
    """
    generators = [torch.Generator().manual_seed(1_000_003 * (seed + 1) + each) for each in range(seeds)]
    away = (-TRUE).expand(seeds, len(RATES), DIRECTIONS)
    direction = OPTIMIZERS[optimizer]()
    steps = torch.full((seeds, len(RATES)), math.inf, dtype=torch.float64)
    step, end = 0, LIMIT
    while step < end:
        for x, error in examples(generators, batch, noise):
            step += 1
            off = away @ x.mT - error[:, None]
            away = away - RATES[:, None] * direction(off @ x / batch, step)
            there = away**2 @ CURVATURE / 2 <= target
            steps[there & steps.isinf()] = step
            if end == LIMIT and steps.isfinite().all(0).any():
                end = min(LIMIT, 2 * step)
            if step == end:
                break
        yield steps.clone()


def examples(generators: list[torch.Generator], batch: int, noise: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Some batches of every seed: x [seeds, b, 16] and the error of the targets [seeds, b].

    >>> [(x.shape, error.shape) for x, error in examples([torch.Generator()], 4096, 1.0)]
    [(torch.Size([1, 4096, 16]), torch.Size([1, 4096]))]
    """
    shape = max(1, min(64, CHUNK // batch)), batch, DIRECTIONS + 1
    normal = torch.stack([torch.randn(shape, generator=each, dtype=torch.float64) for each in generators], 1)
    return zip(normal[..., :DIRECTIONS] * CURVATURE.sqrt(), noise * normal[..., DIRECTIONS], strict=True)


def races(
    sizes: list[int], optimizer: str, noise: float, target: float, seeds: int, seed: int
) -> Iterator[tuple[list[Tensor], float]]:
    """A race for each batch size: the steps of finished races, each [seeds, 35], and the share of the work done.

    The length of a race is known only at its end: until then it counts as 1/9, 2/10, 3/11, … done.
    """
    over: list[Tensor] = []
    for size in sizes:
        for looks, steps in enumerate(race(size, optimizer, noise, target, seeds, seed), 1):
            yield over, (len(over) + looks / (looks + 8)) / len(sizes)
            latest = steps
        over = [*over, latest]
    yield over, 1.0


def good(steps: Tensor) -> Tensor:
    """Which learning rates are as good as the best: mean steps at most 10 % above the fewest, [35].

    >>> good(torch.tensor([[30.0, 22.0, 20.0, math.inf]])).tolist()
    [False, True, True, False]
    """
    means = steps.mean(0)
    return means <= (1 + MARGIN) * means.min()


# Steps and samples.


@dataclass(frozen=True, eq=False)
class Batches:
    """Optimizer steps and samples to the target by batch size, each with its best learning rate."""

    optimizer: str = quantity("the optimizer")
    noise_scale: float = quantity("tr Σ / ‖G‖² where the training starts, in closed form", "examples")
    sizes: Tensor = quantity("batch size", "examples")
    measured: int = quantity("batch sizes that are done")
    progress: float = quantity("share of the work that is done")
    steps: Tensor = quantity("steps to the target, mean over the seeds; NaN: not yet", "optimizer steps")
    lower: Tensor = quantity("lower quartile over the seeds", "optimizer steps")
    upper: Tensor = quantity("upper quartile", "optimizer steps")
    samples: Tensor = quantity("steps × batch size", "samples")
    rate: Tensor = quantity("learning rate with the fewest steps")

    @property
    def fit(self) -> tuple[float, float]:
        """Fewest steps S and critical batch B of steps = S (1 + B / b), by least squares of the relative error."""
        b, steps = self.sizes[: self.measured].double(), self.steps[: self.measured]
        columns = torch.stack([1 / steps, 1 / (b * steps)], 1)
        S, fewest = torch.linalg.lstsq(columns, torch.ones_like(steps)[:, None]).solution[:, 0].tolist()
        return S, fewest / S

    @property
    def residual(self) -> float:
        """Largest relative difference between a measured number of steps and the fit."""
        S, B = self.fit
        known = self.steps[: self.measured]
        return float((S * (1 + B / self.sizes[: self.measured]) / known - 1).abs().max())

    @property
    def fewer(self) -> float:
        """How many times fewer steps the largest batch takes than the smallest, of those that are done."""
        return float(self.steps[0] / self.steps[self.measured - 1])


def batches(
    *,
    optimizer: Optimizer = "SGD",
    noise: Noise = 6.0,
    target: Target = 0.8,
    largest: Largest = 512,
    seeds: Seeds = 32,
    seed: Seed = 0,
) -> Iterator[Batches]:
    """Training runs to one target loss with batches of 1, 2, 4, …, each at every learning rate.

    >>> *_, last = batches(noise=1.0, target=2.0, largest=128, seeds=4)
    >>> last.progress, [int(size) for size in last.sizes]
    (1.0, [1, 2, 4, 8, 16, 32, 64, 128])

    A generator of the result so far, float64. steps = S (1 + B / b) and samples = S B (1 + b / B): McCandlish, Kaplan,
    Amodei 2018, section 2.3, with B the critical batch.
    """
    sizes = [2**k for k in range(10) if 2**k <= largest]
    scale = 1 + DIRECTIONS + noise**2
    for over, progress in races(sizes, optimizer, noise, target, seeds, seed):
        yield _batches(optimizer, scale, sizes, over, progress)


def _batches(optimizer: str, scale: float, sizes: list[int], over: list[Tensor], progress: float) -> Batches:
    """The result so far: the fastest learning rate of every race."""
    columns = torch.full((5, len(sizes)), math.nan, dtype=torch.float64)
    for at, steps in enumerate(over):
        fastest = int(steps.mean(0).argmin())
        mine = steps[:, fastest]
        lower, upper = (float(mine.quantile(q)) for q in (0.25, 0.75))
        mean = float(mine.mean())
        columns[:, at] = torch.tensor([mean, lower, upper, mean * sizes[at], RATES[fastest]], dtype=torch.float64)
    return Batches(optimizer, scale, torch.tensor(sizes), len(over), progress, *columns)


# The best learning rate.


@dataclass(frozen=True, eq=False)
class Rates:
    """The measured best learning rate by batch size, beside two rules that scale that of the base batch."""

    optimizer: str = quantity("the optimizer")
    sizes: Tensor = quantity("batch size, the base batch first", "examples")
    measured: int = quantity("batch sizes that are done")
    progress: float = quantity("share of the work that is done")
    best: Tensor = quantity("learning rate with the fewest steps to the target; NaN: not yet")
    low: Tensor = quantity("smallest learning rate that takes at most 10 % more steps")
    high: Tensor = quantity("largest such")
    linear: Tensor = quantity("by the linear rule: the base batch's × b / base")
    root: Tensor = quantity("by the square-root rule: × √(b / base)")
    linear_cost: Tensor = quantity("steps by the linear rule over the fewest; ∞: never there, or lost", "times")
    root_cost: Tensor = quantity("steps by the square-root rule over the fewest", "times")

    @property
    def linear_holds(self) -> int:
        """The largest batch up to which the linear rule costs at most 10 % more steps than the best."""
        return self._holds(self.linear_cost)

    @property
    def root_holds(self) -> int:
        """The same of the square-root rule."""
        return self._holds(self.root_cost)

    def _holds(self, cost: Tensor) -> int:
        broken = (~(cost <= 1 + MARGIN)).nonzero().flatten().tolist()
        return int(self.sizes[broken[0] - 1 if broken else -1])


def rates(
    *,
    optimizer: Optimizer = "SGD",
    base: Annotated[int, Range(1, 16, log=True, unit="examples", help="the batch that the rules start from")] = 1,
    noise: Noise = 6.0,
    target: Target = 0.8,
    largest: Largest = 512,
    seeds: Seeds = 32,
    seed: Seed = 0,
) -> Iterator[Rates]:
    """The learning rate that reaches the target first, for the base batch and its doublings, and by two rules.

    >>> *_, last = rates(noise=1.0, target=2.0, largest=128, seeds=4)
    >>> last.linear_holds < 64, last.measured
    (True, 8)

    The rules start from the smallest learning rate that is as good as the best, for the base batch. They are:
    rate × b / base (Goyal et al. 2017, for SGD) and rate × √(b / base) (Malladi et al. 2022, for Adam). Learning
    rates are a factor √2 apart. A generator of the result so far, float64.
    """
    sizes = [base * 2**k for k in range(10) if base * 2**k <= largest]
    for over, progress in races(sizes, optimizer, noise, target, seeds, seed):
        yield _rates(optimizer, sizes, over, progress)


def _rates(optimizer: str, sizes: list[int], over: list[Tensor], progress: float) -> Rates:
    """The result so far; a doubling of the batch is two learning rates further by the linear rule, one by the root."""
    columns = torch.full((7, len(sizes)), math.nan, dtype=torch.float64)
    for at, steps in enumerate(over):
        means, start = steps.mean(0), int(good(over[0]).nonzero()[0])
        near = RATES[good(steps)]
        linear, root = start + 2 * at, start + at
        chosen = [RATES[means.argmin()], near[0], near[-1], RATES[linear], RATES[root]]
        columns[:, at] = torch.stack([*chosen, means[linear] / means.min(), means[root] / means.min()])
    return Rates(optimizer, torch.tensor(sizes), len(over), progress, *columns)
