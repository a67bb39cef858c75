"""The orders of accumulate, unscale, clip and step, correct and faulty, and the weights by algebra for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from labkit.fit import gradient
from labkit.nets import next_token_loss, valid_tokens
from labkit.rules import Microbatches

EPSILON = 1e-6  # what clip_grad_norm_ adds to the norm before it divides

# N: valid tokens of the window. Each makes one whole update, and the gradient it stepped with stays in .grad.


def clip_once(
    model: nn.Module, microbatches: Microbatches, optimizer: Optimizer, scaler: GradScaler, max_norm: float
) -> None:
    """Accumulate everything, unscale once, clip once, step once."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


def clip_per_microbatch(
    model: nn.Module, microbatches: Microbatches, optimizer: Optimizer, scaler: GradScaler, max_norm: float
) -> None:
    """Every microbatch's own mean gradient is clipped, and their mean over tokens is the step."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "mean")
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale())
        for total, g in zip(totals, gradient(model), strict=True):
            total += valid_tokens(labels) / N * g
        optimizer.zero_grad()
    for p, total in zip(model.parameters(), totals, strict=True):
        p.grad = total
    scaler.step(optimizer)
    scaler.update()


def clip_running_sum(
    model: nn.Module, microbatches: Microbatches, optimizer: Optimizer, scaler: GradScaler, max_norm: float
) -> None:
    """The clip is inside the loop: the running sum is clipped again and again."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()


def unscale_early(
    model: nn.Module, microbatches: Microbatches, optimizer: Optimizer, scaler: GradScaler, max_norm: float
) -> None:
    """Unscaled once, but after the first microbatch: the others stay scaled."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for at, (tokens, labels) in enumerate(microbatches):
        loss = next_token_loss(model, tokens, labels, "sum") / N
        scaler.scale(loss).backward()
        if at == 0:
            scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


def unscale_every(
    model: nn.Module, microbatches: Microbatches, optimizer: Optimizer, scaler: GradScaler, max_norm: float
) -> None:
    """Unscaled after every microbatch, by hand: the sum so far is divided again and again."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        scaler.scale(loss).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= scaler.get_scale()
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


def clip_scaled(
    model: nn.Module, microbatches: Microbatches, optimizer: Optimizer, scaler: GradScaler, max_norm: float
) -> None:
    """Clipped while still scaled: scaler.step unscales, but only after the clip."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


# The weights by algebra, from the gradients of the microbatches.


@dataclass(frozen=True, eq=False)
class Parts:
    """What a step is made of: rows S_m / N [K, P], the share n_m / N of each microbatch [K], S and c."""

    rows: Tensor
    share: Tensor
    scale: float
    max_norm: float

    @property
    def norms(self) -> Tensor:
        """‖g_m‖ of each microbatch's own mean gradient, [K]."""
        lengths: Tensor = self.rows.norm(dim=1)
        return lengths / self.share

    def clipped(self, weights: Tensor) -> Tensor:
        """Weights [K], after the gradient that they make has been clipped."""
        factor = clip_weight(float((weights @ self.rows).norm()), self.max_norm)
        return factor * weights


def clip_weight(norm: float, max_norm: float) -> float:
    """What `clip_grad_norm_` multiplies a gradient with: min(1, c / ‖g‖), 10⁻⁶ added to the norm.

    >>> clip_weight(0.5, 1.0), round(clip_weight(4.0, 1.0), 6)
    (1.0, 0.25)

    Source: torch.nn.utils.clip_grad_norm_; Pascanu, Mikolov, Bengio 2013, algorithm 1, without the 10⁻⁶.
    """
    return min(1.0, max_norm / (norm + EPSILON))


def once(parts: Parts) -> Tensor:
    """min(1, c/‖G‖) for all."""
    return parts.clipped(torch.ones_like(parts.share))


def each(parts: Parts) -> Tensor:
    """min(1, c/‖g_m‖), both S times as large in the loop."""
    S, c = parts.scale, parts.max_norm
    return torch.tensor([clip_weight(S * norm, S * c) for norm in parts.norms.tolist()], dtype=torch.float64)


def running(parts: Parts) -> Tensor:
    """A microbatch is clipped together with all before it, and again with every later one."""
    S, weights = parts.scale, torch.zeros_like(parts.share)
    for m in range(len(weights)):
        weights[m] = 1.0
        weights = weights * clip_weight(S * float((weights @ parts.rows).norm()), S * parts.max_norm)
    return weights


def early(parts: Parts) -> Tensor:
    """[1, S, S, …], clipped."""
    weights = torch.full_like(parts.share, parts.scale)
    weights[0] = 1.0
    return parts.clipped(weights)


def every(parts: Parts) -> Tensor:
    """[…, 1/S², 1/S, 1], clipped."""
    later = torch.arange(len(parts.share) - 1, -1, -1, dtype=torch.float64)
    return parts.clipped(parts.scale**-later)


def scaled(parts: Parts) -> Tensor:
    """min(1, c/(S‖G‖)) for all."""
    return parts.clipped(torch.full_like(parts.share, parts.scale)) / parts.scale


Order = Callable[[nn.Module, Microbatches, Optimizer, GradScaler, float], None]
ORDERS: dict[str, tuple[Order, Callable[[Parts], Tensor]]] = {
    "clip-once": (clip_once, once),
    "clip-per-microbatch": (clip_per_microbatch, each),
    "clip-running-sum": (clip_running_sum, running),
    "unscale-early": (unscale_early, early),
    "unscale-every": (unscale_every, every),
    "clip-scaled": (clip_scaled, scaled),
}
