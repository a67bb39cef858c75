"""Loss scaling: what half precision loses, and a scaler that searches for its scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from labkit.corpus import Seed, batch, split
from labkit.declare import Choice, Range, quantity
from labkit.fit import flat, gradient
from labkit.nets import Transformer, next_token_loss, valid_tokens
from labkit.rules import Microbatches

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

Window = Annotated[int, Range(1, 8, unit="microbatches", help="K, microbatches of one optimizer step")]
Updates = Annotated[int, Range(20, 60, unit="optimizer steps", help="length of the training")]


def half_loss(model: nn.Module, tokens: Tensor, labels: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """The summed loss, with every matmul, forward and backward, in half precision."""
    with torch.autocast("cpu", dtype=dtype):
        return next_token_loss(model, tokens, labels, "sum")


@dataclass(frozen=True, eq=False)
class Underflow:
    """The entries of one gradient by size, and what half precision does to them."""

    dtype: str = quantity("type of the matmuls")
    zero: float = quantity("share of the entries that became exactly 0", "%")
    infinite: float = quantity("share of the entries that became inf or NaN", "%")
    relative_error: float = quantity("‖g/S − G‖ / ‖G‖, G computed in float64; NaN after an overflow")
    smallest: float = quantity("log2 of the smallest number of the type")
    largest: float = quantity("log2 of its largest number")
    median: float = quantity("log2 of the median entry of S · G")
    sizes: Tensor = quantity("log2 of an entry of S · G, rounded down")
    share: Tensor = quantity("share of the entries of that size", "%")
    lost: Tensor = quantity("share of the entries that are of that size and became 0, inf or NaN", "%")


def underflow(
    *,
    dtype: Annotated[str, Choice(tuple(DTYPES), help="type of the matmuls, forward and backward")] = "float16",
    scale_exponent: Annotated[int, Range(0, 24, help="the loss is multiplied by S = 2 to this power")] = 0,
    tokens_exponent: Annotated[
        int, Range(8, 24, help="the loss is divided by the step's N = 2 to this power, in tokens")
    ] = 22,
    seed: Seed = 0,
) -> Underflow:
    """One microbatch of a large step in half precision: which entries of its gradient are lost.

    >>> underflow().zero > 20, underflow(scale_exponent=16).zero
    (True, 0.0)

    8 documents through torch.autocast on the CPU, weights in float32; the loss is divided by N and multiplied by S
    before its backward. Entries that are 0 in float64 too are left out.
    """
    (tokens, labels), factor = batch(seed, 8), 2.0 ** (scale_exponent - tokens_exponent)
    exact, model = Transformer(seed=seed, dtype=torch.float64), Transformer(seed=seed)
    (next_token_loss(exact, tokens, labels, "sum") * factor).backward()
    (half_loss(model, tokens, labels, DTYPES[dtype]) * factor).backward()
    right, half = flat(gradient(exact)), flat(gradient(model))
    right, half = right[right != 0], half[right != 0]
    zero, infinite, size = half == 0, ~half.isfinite(), right.abs().log2().floor().int()
    sizes = torch.arange(int(size.min()), int(size.max()) + 1)
    information = torch.finfo(DTYPES[dtype])
    return Underflow(
        dtype,
        zero=_percent(zero),
        infinite=_percent(infinite),
        relative_error=float((half - right).norm() / right.norm()) if half.isfinite().all() else math.nan,
        smallest=math.log2(information.smallest_normal * information.eps),
        largest=math.log2(information.max),
        median=float(right.abs().log2().median()),
        sizes=sizes,
        share=torch.tensor([_percent(size == each) for each in sizes]),
        lost=torch.tensor([_percent((size == each) & (zero | infinite)) for each in sizes]),
    )


def _percent(chosen: Tensor) -> float:
    return 100 * float(chosen.double().mean())


def next_scale(scale: float, overflow: bool, good_steps: int, interval: int) -> float:
    """The loss scale after a step: half after an overflow, double after `interval` good steps, else the same.

    >>> next_scale(1024, True, 3, 8), next_scale(1024, False, 6, 8), next_scale(1024, False, 7, 8)
    (512.0, 1024.0, 2048.0)

    good_steps: steps without an overflow before this one, since the scale last changed. Source: Micikevicius et al.,
    Mixed Precision Training, 2018; torch.amp.GradScaler with its own factors 2 and 0.5.
    """
    if overflow:
        return scale / 2
    return scale * 2.0 if good_steps + 1 == interval else float(scale)


def per_window(model: nn.Module, microbatches: Microbatches, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Right: one check and one count for one optimizer step."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        scaler.scale(half_loss(model, tokens, labels) / N).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def per_microbatch(model: nn.Module, microbatches: Microbatches, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Wrong: the scaler checks and counts every microbatch; the gradients themselves are added correctly."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for tokens, labels in microbatches:
        scaler.scale(half_loss(model, tokens, labels) / N).backward()
        scaler.unscale_(optimizer)
        scaler.update()
        for total, g in zip(totals, gradient(model), strict=True):
            total += g
        optimizer.zero_grad()
    if all(total.isfinite().all() for total in totals):
        for p, total in zip(model.parameters(), totals, strict=True):
            p.grad = total
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True, eq=False)
class Overflows:
    """The loss scale over the optimizer steps, and the steps that were skipped, counted right and wrong."""

    updates: int = quantity("length of the training", "optimizer steps")
    done: int = quantity("windows so far", "optimizer steps")
    right_skipped: int = quantity("skipped, with an update of the scaler a window", "optimizer steps")
    wrong_skipped: int = quantity("skipped, with an update of the scaler a microbatch", "optimizer steps")
    scale: Tensor = quantity("log2 S as each window begins, an update of the scaler a window; NaN: not yet")
    skips: Tensor = quantity("1 where that step was skipped")
    scale_per_microbatch: Tensor = quantity("log2 S as each window begins, an update a microbatch; NaN: not yet")
    skips_per_microbatch: Tensor = quantity("1 where that step was skipped")

    @property
    def progress(self) -> float:
        """Share of the work that is done."""
        return self.done / self.updates


def overflow(
    *,
    scale_exponent: Annotated[int, Range(0, 24, help="S = 2 to this power at the start; torch's own is 16")] = 16,
    growth_interval: Annotated[
        int, Range(1, 20, unit="good steps", help="good steps after which the scale is doubled; torch's own is 2000")
    ] = 8,
    updates: Updates = 40,
    accumulation_steps: Window = 4,
    seed: Seed = 0,
) -> Iterator[Overflows]:
    """A training in float16 whose scaler looks for the largest scale: counted in windows, and in microbatches.

    >>> *_, last = overflow(updates=20)
    >>> last.right_skipped < last.wrong_skipped
    True

    A generator of the result so far. torch.amp.GradScaler and torch.autocast on the CPU: each overflow is one of
    float16. One document a microbatch, SGD.
    """
    loops = (per_window, per_microbatch)
    runs = [
        half_training(loop, 2.0**scale_exponent, growth_interval, updates, accumulation_steps, seed) for loop in loops
    ]
    scales, skips = torch.full((2, updates), math.nan), torch.zeros(2, updates, dtype=torch.int)
    for at in range(updates):
        for side, run in enumerate(runs):
            scales[side, at], skips[side, at] = next(run)
        right, wrong = skips.sum(1).tolist()
        copies = scales[0].clone(), skips[0].clone(), scales[1].clone(), skips[1].clone()
        yield Overflows(updates, at + 1, right, wrong, *copies)


def half_training(
    update: Callable[[nn.Module, Microbatches, Optimizer, GradScaler], None],
    scale: float,
    growth_interval: int,
    updates: int,
    accumulation_steps: int,
    seed: int,
) -> Iterator[tuple[float, bool]]:
    """For every window: log2 S as it begins, and whether the optimizer's step was skipped."""
    model, taken = Transformer(seed=seed), []
    optimizer = SGD(model.parameters(), lr=0.3)
    optimizer.register_step_post_hook(lambda *_: taken.append(True))
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    for step in range(updates):
        before, steps = scaler.get_scale(), len(taken)
        microbatches = split(*batch(1_000_003 * (seed + 1) + step, accumulation_steps), accumulation_steps)
        update(model, microbatches, optimizer, scaler)
        yield math.log2(before), len(taken) == steps
