"""The noise that an average leaves: the gradient of a batch, draw by draw, and the noise scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from labkit.cadence.stepping import Seed
from labkit.cadence.translation import CURVATURE, DIRECTIONS, TRUE
from labkit.declare import Range, quantity
from labkit.errors import LabError

NORMAL = 1.96  # two-sided 95 % of a normal distribution
RESAMPLED = 1000  # times that the bootstrap redraws the steps

Noise = Annotated[float, Range(0.1, 8, log=True, help="σ, standard deviation of the targets' noise")]


# Ten voters or a million.


@dataclass(frozen=True, eq=False)
class Voters:
    """How far the averaged gradient of b votes lies from the gradient of all, over many polls."""

    voters: Tensor = quantity("b, votes that are averaged", "voters")
    spread: Tensor = quantity("√ of the mean of (g_b − G)² over the polls, measured")
    low: Tensor = quantity("lower end of its 95 % interval")
    high: Tensor = quantity("upper end")
    formula: Tensor = quantity("√(tr Σ / b), tr Σ = p (1 − p)")
    few: int = quantity("the small poll", "voters")
    many: int = quantity("the large poll", "voters")
    ratio: float = quantity("spread of the small poll over that of the large one, measured")
    expected: float = quantity("√(many / few)")


def voters(
    *,
    few: Annotated[int, Range(1, 500, log=True, unit="voters", help="the small poll")] = 10,
    many: Annotated[int, Range(1, 1000, log=True, unit="thousand voters", help="the large poll")] = 1000,
    share: Annotated[float, Range(0.1, 0.9, help="p, share of all who vote 1; the others vote 0")] = 0.5,
    polls: Annotated[int, Range(100, 4000, log=True, unit="polls", help="how often each poll is drawn")] = 400,
    seed: Seed = 0,
) -> Voters:
    """Every vote v pulls the weight w by the gradient w − v of (w − v)² / 2; b of them are averaged.

    >>> polls = voters()
    >>> round(polls.expected, 1), 290 < polls.ratio < 340
    (316.2, True)

    The votes of a poll are independent, so the number of ones among b is binomial: a million voters are one draw.
    float64.
    """
    sizes = sorted({few, 1000 * many, *(10**k for k in range(7))})
    b = torch.tensor(sizes, dtype=torch.float64)
    chance = torch.tensor(share, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    ones = torch.binomial(b.expand(polls, -1).contiguous(), chance, generator=generator)
    squares = (ones / b - share) ** 2  # w cancels in g − G
    mean, margin = squares.mean(0), NORMAL * squares.std(0) / math.sqrt(polls)
    spread = mean.sqrt()
    low, high = (mean - margin).clamp(min=0).sqrt(), (mean + margin).sqrt()
    formula = (share * (1 - share) / b).sqrt()
    ratio = float(spread[sizes.index(few)] / spread[sizes.index(1000 * many)])
    return Voters(b, spread, low, high, formula, few, 1000 * many, ratio, math.sqrt(1000 * many / few))


# A gradient with more directions, whose noise is known in closed form.


def gradients(away: Tensor, count: int, noise: float, generator: torch.Generator) -> Tensor:
    """The gradients of single examples where the weights are `away` from the true ones, [count, 16].

    >>> gradients(TRUE, 5, 1.0, torch.Generator()).shape
    torch.Size([5, 16])

    Least squares, (x · w − y)² / 2 with y = x · true + σ ε: the gradient is x (x · away − σ ε).
    """
    normal = torch.randn(count, DIRECTIONS + 1, generator=generator, dtype=torch.float64)
    x = normal[:, :DIRECTIONS] * CURVATURE.sqrt()
    return x * (x @ away - noise * normal[:, DIRECTIONS])[:, None]


def closed(away: Tensor, noise: float) -> tuple[float, float]:
    """‖G‖² and tr Σ of those gradients in closed form.

    >>> squared_norm, trace = closed(TRUE, 1.0)
    >>> round(trace / squared_norm, 9)
    18.0

    x is normal with covariance H, so G = H d and Σ = G Gᵀ + (dᵀ H d + σ²) H, by the fourth moments of a normal
    vector (Isserlis 1918). At d = s · true, with true = H^(−1/2), tr Σ / ‖G‖² is 17 + σ² / s².
    """
    G = CURVATURE * away
    squared_norm = float(G @ G)
    return squared_norm, squared_norm + (float(away @ G) + noise**2) * float(CURVATURE.sum())


@dataclass(frozen=True)
class Estimate:
    """Estimates of the gradient and its noise from two batch sizes."""

    squared_norm: float = quantity("estimate of ‖G‖²; may be negative by chance")
    trace: float = quantity("estimate of tr Σ")

    @property
    def noise_scale(self) -> float:
        """The noise scale tr Σ / ‖G‖² in examples; ∞ where no gradient can be detected."""
        return self.trace / self.squared_norm if self.squared_norm > 0 else math.inf


def estimate(small_norm2: float, small: int, big_norm2: float, big: int) -> Estimate:
    """‖G‖² and tr Σ from the mean squared norms of the gradient at two batch sizes.

    >>> estimate(5.0, 4, 2.0, 16)  # 1 + 16 / 4 and 1 + 16 / 16
    Estimate(squared_norm=1.0, trace=16.0)

    Two equations E‖g_b‖² = ‖G‖² + tr Σ / b for two unknowns; both estimates are unbiased, their ratio is not.
    Source: McCandlish, Kaplan, Amodei 2018, appendix A.1. Raises LabError for one batch size.
    """
    if small == big:
        raise LabError(f"small = {small} is as large as big, two sizes are needed: try {max(1, big // 2)}")
    squared_norm = (big * big_norm2 - small * small_norm2) / (big - small)
    return Estimate(squared_norm, (small_norm2 - big_norm2) / (1 / small - 1 / big))


@dataclass(frozen=True, eq=False)
class Norms:
    """Mean squared norm of the gradient over batch sizes, and the noise scale from two of them."""

    small: int = quantity("the small batch", "examples")
    big: int = quantity("the large batch", "examples")
    batches: Tensor = quantity("b", "examples")
    measured: Tensor = quantity("mean of ‖g_b‖² over the draws")
    low: Tensor = quantity("lower end of its 95 % interval")
    high: Tensor = quantity("upper end")
    formula: Tensor = quantity("‖G‖² + tr Σ / b in closed form")
    squared_norm: float = quantity("‖G‖² in closed form")
    trace: float = quantity("tr Σ in closed form")
    squared_norm_estimate: float = quantity("‖G‖² from the two batch sizes")
    trace_estimate: float = quantity("tr Σ from the two batch sizes")
    noise_scale: float = quantity("tr Σ / ‖G‖² in closed form", "examples")
    estimated: float = quantity("the same from the two batch sizes", "examples")
    least: float = quantity("lower end of its 95 % interval, by bootstrap over the steps", "examples")
    most: float = quantity("upper end; ∞: the gradient cannot be told from 0", "examples")
    naive: float = quantity("the small batch's excess over the large one, taken as noise over gradient", "examples")
    naive_formula: float = quantity("what algebra says that this gives", "examples")


def norms(
    *,
    small: Annotated[int, Range(1, 512, log=True, unit="examples", help="the small batch, a microbatch")] = 4,
    big: Annotated[
        int, Range(2, 1024, log=True, unit="examples", help="the large batch: all small ones of a step")
    ] = 64,
    steps: Annotated[int, Range(16, 256, log=True, unit="steps", help="steps whose norms are averaged")] = 128,
    distance: Annotated[float, Range(0.05, 1, log=True, help="s, how far off the weights are; 1 at the start")] = 0.5,
    noise: Noise = 1.0,
    seed: Seed = 0,
) -> Norms:
    """Squared norms at many batch sizes, all from the same examples, and the noise scale from two of them.

    >>> scale = norms()
    >>> round(scale.noise_scale, 9), scale.least < scale.noise_scale < scale.most
    (21.0, True)

    float64; steps × big examples, in groups of b. The small batches are pieces of the large one, as microbatches are
    of a step. The weights stay where they are. Raises LabError for a small batch that is no part of the large one.
    """
    if big % small or small == big:
        part = max(b for b in range(1, min(small, big - 1) + 1) if big % b == 0)
        raise LabError(f"small = {small} does not divide big = {big} into several: try {part}")
    generator = torch.Generator().manual_seed(seed)
    away = distance * TRUE
    g = gradients(away, steps * big, noise, generator)
    squared_norm, trace = closed(away, noise)
    b = torch.tensor(sorted({small, big, *(2**k for k in range(11) if 2**k <= big)}))
    mean, margin = _means([squared(g, size) for size in b.tolist()])
    pairs = torch.stack([squared(g, small).view(steps, -1).mean(1), squared(g, big)], 1)
    one, other = pairs.mean(0).tolist()
    fit = estimate(one, small, other, big)
    least, most = interval(pairs, small, big, generator)
    naive = small * (one - other) / other, trace * (1 - small / big) / (squared_norm + trace / big)
    curve = b, mean, mean - margin, mean + margin, squared_norm + trace / b.double()
    estimates = fit.squared_norm, fit.trace, trace / squared_norm, fit.noise_scale
    return Norms(small, big, *curve, squared_norm, trace, *estimates, least, most, *naive)


def squared(g: Tensor, size: int) -> Tensor:
    """‖g_b‖² of the mean of every `size` gradients in a row.

    >>> squared(torch.tensor([[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]]), 2)
    tensor([6.2500])
    """
    count = len(g) // size
    return (g[: count * size].view(count, size, -1).mean(1) ** 2).sum(1)


def _means(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The mean of each, and half the width of its 95 % interval."""
    margins = [NORMAL * values.std() / math.sqrt(len(values)) for values in samples]
    return torch.stack([values.mean() for values in samples]), torch.stack(margins)


def interval(pairs: Tensor, small: int, big: int, generator: torch.Generator) -> tuple[float, float]:
    """The 95 % interval of the noise scale, from the norms of every step, [steps, 2].

    >>> pairs = torch.tensor([[5.0, 2.0]] * 20)
    >>> interval(pairs, 4, 16, torch.Generator())
    (16.0, 16.0)

    The percentile bootstrap (Efron 1979): the steps are drawn again and again with replacement, and the interval
    holds the middle 95 % of the estimates.
    """
    rows = torch.randint(len(pairs), (RESAMPLED, len(pairs)), generator=generator)
    means: Sequence[tuple[float, float]] = pairs[rows].mean(1).tolist()
    scales = sorted(estimate(one, small, other, big).noise_scale for one, other in means)
    return scales[RESAMPLED // 40], scales[-1 - RESAMPLED // 40]
