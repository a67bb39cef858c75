"""The same samples in batches K times as large: a training run whose schedule is translated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from labkit.accumulation.training import STUDENT
from labkit.cadence.schedule import warmup_cosine
from labkit.cadence.stepping import Seed
from labkit.declare import Choice, Range, quantity
from labkit.wording import three

BATCH, POINTS, DIRECTIONS = 8, 16, 16
CURVATURE = torch.logspace(0, -2, DIRECTIONS, dtype=torch.float64)
TRUE = CURVATURE**-0.5  # every direction has the same share in the loss at the start
LARGE = (
    "schedule left in updates",
    "schedule in samples",
    "learning rate scaled too",
    "horizons too",
)


def sgd(weights: Tensor, rate: float, horizon: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9^horizon; the rate is the effective one, lr / (1 − momentum)."""
    momentum = 0.9**horizon
    return torch.optim.SGD([weights], lr=0.8 * rate * (1 - momentum), momentum=momentum)


def adamw(weights: Tensor, rate: float, horizon: float) -> torch.optim.Optimizer:
    """AdamW with β₁ = 0.9^horizon and β₂ = 0.999^horizon."""
    return torch.optim.AdamW([weights], lr=0.08 * rate, betas=(0.9**horizon, 0.999**horizon))


OPTIMIZERS = {"SGD with momentum": sgd, "AdamW": adamw}
POWER = {"SGD with momentum": 1.0, "AdamW": 0.5}  # of K, by which the learning rate is scaled


@dataclass(frozen=True, eq=False)
class Translated:
    """Trainings on the same samples: the base batch, and K times the batch with more and more translated."""

    factor: int = quantity("K, the large batch over the base batch of 8")
    optimizer: str = quantity("the optimizer of all trainings")
    names: tuple[str, ...] = quantity("the trainings: the base batch first, then the large one")
    samples: Tensor = quantity("samples seen at each measurement, [n]", "samples")
    losses: Tensor = quantity("loss above the true weights', trainings × seeds × n; NaN: not yet, ∞: lost")
    measured: int = quantity("measurements so far, each of all seeds")

    @property
    def progress(self) -> float:
        """Share of the work that is done."""
        return self.measured / (len(self.names) * len(self.samples))

    @property
    def reached(self) -> int:
        """Index of the last measurement that every training has."""
        return max(0, self.measured // len(self.names) - 1)

    @property
    def gaps(self) -> Tensor:
        """Loss of each large-batch training minus the base's there, seed by seed, [trainings − 1, seeds]."""
        there = self.losses[:, :, self.reached]
        return there[1:] - there[0]

    @property
    def margins(self) -> Tensor:
        """Half the width of the 95 % interval of each mean gap, by Student's t over the seeds, [trainings − 1]."""
        seeds = self.losses.shape[1]
        return STUDENT[seeds - 3] * self.gaps.std(1) / math.sqrt(seeds)

    @property
    def diverged(self) -> Tensor:
        """Which trainings have a loss above their start, [trainings]."""
        return (self.losses[:, :, self.reached] > self.losses[:, :, 0]).any(1)

    @property
    def verdict(self) -> str:
        """The outcome, training by training, and what it does not show."""
        if self.measured < len(self.names):
            return "Not every training has been measured yet."
        base = float(self.losses[0, :, self.reached].mean())
        outcomes = "; ".join(f"{name}: {self._outcome(at)}" for at, name in enumerate(self.names[1:]))
        return (
            f"After {int(self.samples[self.reached])} samples the base batch is {three(base)} above the least loss. "
            f"A batch {self.factor} times as large, against it, by {self.optimizer}: {outcomes}. "
            f"± is 95 % over {self.losses.shape[1]} seeds; one made problem, so nothing here proves a rule."
        )

    def _outcome(self, at: int) -> str:
        if self.diverged[at + 1]:
            return "diverges"
        gap, margin = float(self.gaps[at].mean()), float(self.margins[at])
        size = f"{'lower' if gap < 0 else 'higher'} by {three(abs(gap))} ± {three(margin)}"
        return f"{size}, more than the seeds explain" if abs(gap) > margin else f"{size}, no difference seen"


def translated(
    *,
    factor: Annotated[int, Range(2, 16, log=True, unit="times", help="K, how many times the batch of 8")] = 8,
    optimizer: Annotated[str, Choice(tuple(OPTIMIZERS), help="learning rate × K, or × √K for AdamW")] = "AdamW",
    learning_rate: Annotated[
        float, Range(0.25, 4, log=True, help="of the base batch, as a multiple of one that suits it")
    ] = 1.0,
    samples: Annotated[
        int, Range(2048, 32_768, log=True, unit="samples", help="about as many in each training")
    ] = 8192,
    seeds: Annotated[int, Range(3, 8, unit="seeds", help="trainings of each kind")] = 3,
    seed: Seed = 0,
) -> Iterator[Translated]:
    """Warmup and cosine on noisy least squares: base batch, and K times the batch with its schedule translated.

    >>> *_, last = translated(samples=2048, factor=2)
    >>> last.progress, last.losses.shape
    (1.0, torch.Size([5, 3, 17]))

    A generator of the result so far. The schedule left in updates is cut off where the samples end; in samples it is
    K times shorter; then the learning rate is scaled too, × K or × √K; then every momentum and β is raised to the K,
    so that it forgets as many samples. float64; the loss is that over the distribution of the examples, in closed form.
    """
    every = BATCH * factor * max(1, round(samples / (BATCH * factor * POINTS)))
    examples = [draw_examples(1_000_003 * (seed + 1) + each, every * POINTS) for each in range(seeds)]
    x, y = (torch.stack(each, 1) for each in zip(*examples, strict=True))
    U, scale = every * POINTS // BATCH, factor ** POWER[optimizer]
    large = ((U, 1.0, 1), (U // factor, 1.0, 1), (U // factor, scale, 1), (U // factor, scale, factor))
    runs = [training(x, y, every, BATCH, optimizer, learning_rate, U)]
    for last, rate, horizon in large:
        runs.append(training(x, y, every, BATCH * factor, optimizer, learning_rate * rate, last, horizon))
    at, losses = torch.arange(POINTS + 1) * every, torch.full((len(runs), seeds, POINTS + 1), math.nan).double()
    for point in range(POINTS + 1):
        for measured, run in enumerate(runs, 1 + point * len(runs)):
            losses[(measured - 1) % len(runs), :, point] = next(run)
            yield Translated(factor, optimizer, ("base batch", *LARGE), at, losses.clone(), measured)


def draw_examples(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Examples x [count, 16] and y [count]: y = x · true weights + noise of variance 1.

    >>> x, y = draw_examples(0, 5)
    >>> x.shape, y.shape
    (torch.Size([5, 16]), torch.Size([5]))
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, DIRECTIONS, generator=generator, dtype=torch.float64) * CURVATURE.sqrt()
    return x, x @ TRUE + torch.randn(count, generator=generator, dtype=torch.float64)


def training(
    x: Tensor, y: Tensor, every: int, batch: int, optimizer: str, rate: float, last: int, horizon: int = 1
) -> Iterator[Tensor]:
    """The excess loss of one training of every seed side by side, before it and after every so many samples, [seeds].

    Shapes: x [count, seeds, 16], y [count, seeds]. The schedule ends after `last` updates, a tenth of them warmup.
    """
    w = torch.zeros(x.shape[1:], dtype=torch.float64, requires_grad=True)
    opt = OPTIMIZERS[optimizer](w, rate, horizon)
    scheduler = LambdaLR(opt, warmup_cosine(last / 10, last))
    for at in range(0, len(x), batch):
        if at % every == 0:
            yield excess(w)
        losses = ((x[at : at + batch] * w).sum(2) - y[at : at + batch]) ** 2 / 2
        losses.mean(0).sum().backward()
        opt.step()
        scheduler.step()
        opt.zero_grad()
    yield excess(w)


@torch.no_grad()
def excess(w: Tensor) -> Tensor:
    """Expected loss above that of the true weights: Σ curvature (w − true)² / 2, infinite where a weight is lost.

    >>> excess(TRUE.clone()), excess(torch.zeros(2, 16))
    (tensor(0., dtype=torch.float64), tensor([8., 8.], dtype=torch.float64))
    """
    return ((w - TRUE) ** 2 @ CURVATURE / 2).nan_to_num(nan=math.inf, posinf=math.inf)
