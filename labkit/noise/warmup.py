"""A large learning rate with and without warmup, and how much weight decay acts when the batch grows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from labkit.cadence.stepping import Seed
from labkit.declare import Range, quantity
from labkit.tolerance import Tolerance, tolerance

WIDTH = 64
EXAMPLES = 8  # of one batch
STEPS = 300
NOISE = 0.1  # of a target
UNTRAINED = 0.5  # loss of a net that always predicts 0


# Warmup.


@dataclass(frozen=True, eq=False)
class Warmup:
    """Training runs with and without warmup, from the same start and examples."""

    steps: Tensor = quantity("optimizer steps made, 0 … T")
    rate: Tensor = quantity("learning rate of the next step with warmup, [T + 1]")
    losses: Tensor = quantity("loss above the least, with warmup and without, [2, seeds, T + 1]")
    sharpness: Tensor = quantity("learning rate × curvature, the same shape; stable below 2")
    curvature: float = quantity("mean curvature over the seeds at the start")
    lost: tuple[int, int] = quantity("trainings that end worse than a net that says 0, with warmup and without")
    seeds: int = quantity("trainings of each kind")


def warmup(
    *,
    learning_rate: Annotated[float, Range(0.25, 8, log=True, help="η after the warmup")] = 3.0,
    warmup: Annotated[int, Range(2, 300, log=True, unit="steps", help="steps in which η grows in a line from 0")] = 200,
    seeds: Annotated[int, Range(4, 16, unit="seeds", help="trainings of each kind")] = 8,
    seed: Seed = 0,
) -> Warmup:
    """300 SGD steps of the net f(x) = u · v x / 8 with 64 hidden units on y = x + noise, with warmup and without.

    >>> warmup().lost
    (0, 6)

    Batches of 8, float64. Curvature: (‖u‖² + ‖v‖²) / 64, the Gauss-Newton eigenvalue of the expected loss. It is about
    2 at the start and sinks while η times it is above 2; a jump past 4 is lost (Lewkowycz et al. 2020, "The large
    learning rate phase of deep learning", section 2). ∞ where the numbers overflow.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(2, seeds, WIDTH, generator=generator, dtype=torch.float64)
    u, v = start.expand(2, 2, seeds, WIDTH).unbind(1)  # with and without, seeds, hidden units
    growing = learning_rate * ((torch.arange(STEPS + 1) + 1) / warmup).clamp(max=1).double()
    both = torch.stack([growing, torch.full_like(growing, learning_rate)], 1)[..., None]
    losses, sharpness = [], []
    for eta in both:
        slope = (u * v).sum(2) / math.sqrt(WIDTH)
        losses.append((slope - 1) ** 2 / 2)
        sharpness.append(eta * ((u**2).sum(2) + (v**2).sum(2)) / WIDTH)
        x, error = torch.randn(2, EXAMPLES, 1, seeds, generator=generator, dtype=torch.float64)
        g = (((slope - 1) * x - NOISE * error) * x).mean(0) / math.sqrt(WIDTH)
        u, v = u - (eta * g)[..., None] * v, v - (eta * g)[..., None] * u
    loss, sharp = (torch.stack(each, 2).nan_to_num(math.inf, math.inf) for each in (losses, sharpness))
    with_warmup, without = (~(loss[:, :, -1] <= UNTRAINED)).sum(1).tolist()
    curvature = float((start**2).sum((0, 2)).mean() / WIDTH)
    return Warmup(torch.arange(STEPS + 1), growing, loss, sharp, curvature, (with_warmup, without), seeds)


# Weight decay.


@dataclass(frozen=True, eq=False)
class Decayed:
    """The share left of a weight that gets no gradient, after the same samples at two batch sizes."""

    names: tuple[str, ...] = quantity("what is scaled with the batch; the base batch first")
    left: Tensor = quantity("share of the weight that torch's AdamW leaves")
    formula: Tensor = quantity("(1 − η λ)^steps")
    steps: tuple[int, ...] = quantity("optimizer steps", "optimizer steps")
    forgotten: Tensor = quantity("log of what is left, over that of the base batch: 1 is right")
    off: float = quantity("largest difference from the formula, relative")
    tolerance: Tolerance = quantity("relative difference that rounding alone explains")


def decay(
    *,
    factor: Annotated[int, Range(2, 32, log=True, unit="times", help="K, how many times the base batch")] = 16,
    learning_rate: Annotated[float, Range(0.0001, 0.01, log=True, help="η of the base batch")] = 0.01,
    weight_decay: Annotated[float, Range(0.01, 1, log=True, help="λ of the base batch")] = 0.5,
    updates: Annotated[int, Range(1, 32, unit="optimizer steps", help="steps of the large batch")] = 16,
) -> Decayed:
    """A weight without gradient under AdamW, over the same samples: base batch, and K times the batch.

    >>> weights = decay()
    >>> [round(share, 2) for share in weights.forgotten.tolist()]
    [1.0, 0.06, 0.25, 1.04, 1.04]

    Decoupled decay takes the share η λ of a weight at every step, whatever the gradient (Loshchilov and Hutter
    2019), so over the same samples it is η λ / b that counts. float64.
    """
    K, eta, decay = factor, learning_rate, weight_decay
    root = math.sqrt(K)
    ways = {
        "base batch": (1.0, 1.0, K * updates),
        "nothing scaled": (1.0, 1.0, updates),
        "η × √K": (root, 1.0, updates),
        "η and λ × √K": (root, root, updates),
        "η × K": (float(K), 1.0, updates),
    }
    left = torch.tensor([left_over(eta * a, decay * b, steps) for a, b, steps in ways.values()], dtype=torch.float64)
    formula = torch.tensor([(1 - eta * a * decay * b) ** steps for a, b, steps in ways.values()], dtype=torch.float64)
    off = float(((left - formula) / formula).abs().max())
    bound = tolerance([torch.ones(1)], count=4 * K * updates, dtype=torch.float64)
    forgotten = left.log() / left[0].log()
    return Decayed(tuple(ways), left, formula, tuple(steps for *_, steps in ways.values()), forgotten, off, bound)


def left_over(rate: float, decay: float, steps: int) -> float:
    """The share that torch's AdamW leaves of a weight of 1 whose gradient is 0.

    >>> round(left_over(0.1, 0.5, 2), 9)
    0.9025
    """
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=rate, weight_decay=decay)
    for _ in range(steps):
        optimizer.step()
    return weight.item()
