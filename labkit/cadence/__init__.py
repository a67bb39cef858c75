"""Adam and cadence: how large an update becomes when its parts do not advance together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from labkit.cadence.schedule import schedules as schedules
from labkit.cadence.stepping import Seed, adam_states
from labkit.cadence.translation import translated as translated
from labkit.cadence.updates import path as path
from labkit.cadence.updates import state as state
from labkit.declare import Range, quantity
from labkit.errors import LabError
from labkit.tolerance import Tolerance, tolerance

POINTS = 60
Steps = Annotated[int, Range(1, 64, log=True, unit="microbatches", help="K, microbatches of one optimizer step")]
Beta1 = Annotated[float, Range(0, 0.99, help="β₁, how much of m stays at each update")]
Beta2 = Annotated[float, Range(0.5, 0.9999, help="β₂, how much of v stays at each update")]


def adam_step_ratio(step: int, accumulation: int, betas: Sequence[float]) -> float:
    """Size of Adam's update where t counts microbatches and m, v optimizer steps, over the right one.

    >>> [round(adam_step_ratio(step, 8, (0.9, 0.999)), 3) for step in (1, 30, 10_000)]
    [0.496, 2.573, 1.0]

    `step`: optimizer steps s, from 1; `accumulation`: microbatches K of each; `betas`: β₁ and β₂. Constant gradient,
    ε = 0. Raises LabError for a count below 1 and for betas that are not in [0, 1).
    Source: Adam's m̂ / √v̂ with the bias corrections 1 − β^(sK) for 1 − β^s (Kingma and Ba, 2015, algorithm 1).
    """
    s, K = _count("step", step), _count("accumulation", accumulation)
    first, second = _betas(betas)
    return _share(first, s, K) / math.sqrt(_share(second, s, K))


def _count(name: str, value: int) -> int:
    return int(Range(1, 10**12).check(name, value, int))


def _betas(betas: Sequence[float]) -> tuple[float, float]:
    try:
        first, second = (float(beta) for beta in betas)
        valid = 0 <= first < 1 and 0 <= second < 1
    except (TypeError, ValueError, OverflowError):
        valid = False
    if not valid:
        raise LabError(f"betas = {betas!r} are not two numbers from 0 to below 1: try (0.9, 0.999)")
    return first, second


def _share(beta: float, s: int, K: int) -> float:
    """(1 − β^s) / (1 − β^(sK)), without cancellation."""
    return math.expm1(s * math.log(beta)) / math.expm1(s * K * math.log(beta)) if beta else 1.0


def log_spaced(last: int, points: int = POINTS) -> list[int]:
    """Whole numbers from 1 to the last, about equally spaced by their logarithm, each once.

    >>> log_spaced(100, 5)
    [1, 3, 10, 32, 100]
    """
    return sorted({round(last ** (k / (points - 1))) for k in range(points)})


@dataclass(frozen=True, eq=False)
class Count:
    """The size of Adam's update where t counts microbatches, over the right one."""

    steps: Tensor = quantity("optimizer steps at which the update is compared, from 1")
    formula: Tensor = quantity("wrong update / right update by algebra")
    measured: Tensor = quantity("wrong update / right update, of two parameters that torch's Adam moved")
    first: float = quantity("measured ratio of the first update")
    largest: float = quantity("largest measured ratio of all updates")
    largest_at: int = quantity("optimizer step of that update")
    last: float = quantity("measured ratio of the last update")
    off: float = quantity("largest |measured / formula − 1|")
    tolerance: Tolerance = quantity("relative difference that rounding alone explains")
    accumulation_steps: int = quantity("K, how far t advances at each optimizer step", "microbatches")


def count(
    *,
    accumulation_steps: Steps = 8,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    steps: Annotated[
        int, Range(10, 10_000, log=True, unit="optimizer steps", help="how long the gradient stays the same")
    ] = 1000,
) -> Count:
    """Two parameters under torch's Adam with a constant gradient, t of the second advanced K times an update.

    >>> ratio = count(steps=100)
    >>> round(ratio.first, 3), round(ratio.largest, 3), ratio.largest_at, ratio.off < ratio.tolerance.value
    (0.496, 2.604, 40, True)

    float64, ε = 0. The second's m and v advance once, as they should. Both are set to 0 before every update, so that
    their values after it are the update. m and v are the same in both, so their rounding cancels; only that of the
    bias corrections remains, differences 1 − β^t of two terms.
    """
    weights = torch.zeros(2, 1, dtype=torch.float64)
    right, wrong = weights
    right.grad, wrong.grad = torch.ones(2, 1, dtype=torch.float64)
    optimizer = torch.optim.Adam([right, wrong], lr=1.0, betas=(beta1, beta2), eps=0.0, fused=True)
    _, state = adam_states(optimizer)
    ratios = []
    for _ in range(steps):
        weights.zero_()
        state["step"] += accumulation_steps - 1  # the optimizer's step counts the last
        optimizer.step()
        ratios.append(wrong.item() / right.item())
    return _counted(ratios, accumulation_steps, beta1, beta2)


def _counted(ratios: list[float], K: int, beta1: float, beta2: float) -> Count:
    at = log_spaced(len(ratios))
    formula = torch.tensor([adam_step_ratio(s, K, (beta1, beta2)) for s in at], dtype=torch.float64)
    measured = torch.tensor([ratios[s - 1] for s in at], dtype=torch.float64)
    difference = torch.tensor([[1.0], [-max(beta1, beta2)]], dtype=torch.float64)
    return Count(
        torch.tensor(at),
        formula,
        measured,
        first=ratios[0],
        largest=max(ratios),
        largest_at=1 + ratios.index(max(ratios)),
        last=ratios[-1],
        off=float((measured / formula - 1).abs().max()),
        tolerance=tolerance(difference, count=20, dtype=torch.float64),
        accumulation_steps=K,
    )


@dataclass(frozen=True, eq=False)
class Moments:
    """The update of Adam where m, v and t advance at every microbatch, beside the right one."""

    steps: Tensor = quantity("optimizer steps at which the updates are shown, from 1")
    right: Tensor = quantity("right update along the mean gradient, over the learning rate")
    wrong: Tensor = quantity("the same, with moments of single microbatches")
    ratio: float = quantity("mean wrong update / mean right update, second half of the steps")
    formula: float = quantity("√((G² + σ²/K) / (G² + σ²)), its limit where v is slow")
    noise: float = quantity("σ of a microbatch's gradient over its mean G")


def moments(
    *,
    accumulation_steps: Steps = 8,
    noise: Annotated[float, Range(0, 8, help="σ / G: spread of a microbatch's gradient over the mean gradient")] = 1.0,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    steps: Annotated[int, Range(20, 2000, log=True, unit="optimizer steps", help="windows that are seen")] = 300,
    seed: Seed = 0,
) -> Moments:
    """One parameter's update by Adam, moments per optimizer step and per microbatch, on the same noisy gradients.

    >>> updates = moments()
    >>> round(updates.ratio, 2), round(updates.formula, 2)
    (0.75, 0.75)

    Gradients 1 + noise · ε, ε normal; ε of Adam 0. A microbatch is noisier than the mean of K: its v is larger, and
    the update smaller. The formula takes v for its mean, which it nears where 1 / (1 − β₂) is many updates.
    """
    generator = torch.Generator().manual_seed(seed)
    epsilon = torch.randn(steps, accumulation_steps, generator=generator, dtype=torch.float64)
    gradients = 1 + noise * epsilon
    right = adam_updates(gradients.mean(1, keepdim=True), beta1, beta2)
    wrong = adam_updates(gradients, beta1, beta2)
    at = log_spaced(steps)
    rows = torch.tensor(at) - 1
    late = steps // 2
    ratio = float(wrong[late:].mean() / right[late:].mean())
    formula = math.sqrt((1 + noise**2 / accumulation_steps) / (1 + noise**2))
    return Moments(torch.tensor(at), right[rows], wrong[rows], ratio, formula, noise)


def adam_updates(gradients: Tensor, beta1: float, beta2: float) -> Tensor:
    """m̂ / √v̂ after every window, of moments that advance at each of its gradients.

    >>> adam_updates(torch.tensor([[3.0, 3.0], [-3.0, -3.0]]), 0.5, 0.5)
    tensor([ 1.0000, -0.6000], dtype=torch.float64)

    Shapes: [windows, gradients of one window] in, [windows] out; float64, ε = 0.
    """
    m = v = 0.0
    t, updates = 0, []
    for window in gradients.tolist():
        for g in window:
            t += 1
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
        updates.append(m / (1 - beta1**t) / math.sqrt(v / (1 - beta2**t)))
    return torch.tensor(updates, dtype=torch.float64)
