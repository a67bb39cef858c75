"""The conditions under which accumulation equals one large batch, and what happens when one is broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from labkit.corpus import Batch, Seed, Shortest, batch, split
from labkit.declare import Range, Switch, quantity
from labkit.errors import LabError
from labkit.fit import distance, flat, gradient_of
from labkit.nets import IGNORE, Transformer, next_token_loss, valid_tokens
from labkit.tolerance import Tolerance, depth, tolerance

Slope = Annotated[float, Range(-10, 10, help="gradient of one microbatch")]


@dataclass(frozen=True)
class ByHand:
    """One optimizer step of one weight."""

    mean: float = quantity("(g₁ + g₂ + g₃) / 3")
    after: float = quantity("W − η · mean")
    accumulated: float = quantity("what three backward passes of g W / 3 left in .grad")
    stepped: float = quantity("the weight after the optimizer's step")
    undivided: float = quantity("W − η (g₁ + g₂ + g₃), where the division is forgotten")


def by_hand(
    *,
    gradient_1: Slope = 1.0,
    gradient_2: Slope = 2.0,
    gradient_3: Slope = 6.0,
    weight: Annotated[float, Range(-10, 10, help="W before the step")] = 1.0,
    learning_rate: Annotated[float, Range(0.001, 1, log=True, help="η, how far a step goes")] = 0.1,
) -> ByHand:
    """Three gradients averaged, one step W ← W − η g: by pencil, and by three backward passes.

    >>> step = by_hand()
    >>> step.mean, step.accumulated, round(step.after, 9), round(step.stepped, 9)
    (3.0, 3.0, 0.7, 0.7)

    float64. Source: the definition of one SGD step.
    """
    slopes = (gradient_1, gradient_2, gradient_3)
    W = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([W], lr=learning_rate)
    for slope in slopes:
        loss = slope * W / 3
        loss.backward()
    optimizer.step()
    mean = sum(slopes) / 3
    accumulated = 0.0 if W.grad is None else W.grad.item()
    return ByHand(mean, weight - learning_rate * mean, accumulated, W.item(), weight - learning_rate * sum(slopes))


Examples = tuple[Tensor, Tensor, Tensor]


class Net(nn.Module):
    """A layer that may depend on the batch and a random one: both can break the equivalence inside the model."""

    statistics: tuple[Tensor, Tensor] | None = None

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(16, 8, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(16, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Predictions [b] of x [b, 8]; `mask` [b, 16] is the dropout mask; without `statistics` those of x are used."""
        h = x @ self.first.T
        mean, variance = self.statistics or (h.mean(0), h.var(0, correction=0))
        return ((h - mean) / (variance + 1e-5).sqrt()).relu() * mask @ self.second


def update(net: Net, batches: list[Examples], averaged: bool = True, one_update: bool = True) -> Tensor:
    """One update by plain SGD on microbatches of (x, y, dropout mask): how far it moved the parameters, flat."""
    B = sum(len(y) for _, y, _ in batches)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    before = flat(net.parameters())
    for x, y, mask in batches:
        losses = (net(x, mask) - y) ** 2
        loss = losses.sum() / B if averaged else losses.mean()
        loss.backward()
        if not one_update:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    return flat(net.parameters()) - before


@dataclass(frozen=True)
class Conditions:
    """One update by accumulation beside the same update by one large batch."""

    broken: tuple[str, ...] = quantity("conditions that are switched off")
    equal: bool = quantity("whether rounding explains the difference")
    relative_error: float = quantity("‖ΔW of accumulation − ΔW of the large batch‖ / ‖ΔW of the large batch‖")
    norm_ratio: float = quantity("‖ΔW of accumulation‖ / ‖ΔW of the large batch‖")
    tolerance: Tolerance = quantity("relative difference that rounding alone explains")


def conditions(
    *,
    same_examples: Annotated[bool, Switch(help="off: the last microbatch repeats the first")] = True,
    averaged: Annotated[bool, Switch(help="off: the microbatches' means are added, not averaged")] = True,
    one_update: Annotated[bool, Switch(help="off: the optimizer steps after every microbatch")] = True,
    equal_statistics: Annotated[bool, Switch(help="off: a batch-dependent layer sees its own microbatch")] = True,
    equal_randomness: Annotated[bool, Switch(help="off: accumulation draws its dropout masks anew")] = True,
    accumulation_steps: Annotated[
        int, Range(2, 8, unit="microbatches", help="K, microbatches of one optimizer step")
    ] = 4,
    seed: Seed = 0,
) -> Conditions:
    """The five conditions under which accumulation equals the large batch for plain SGD, each breakable.

    >>> conditions().equal, conditions(equal_statistics=False).equal
    (True, False)

    Two copies of one small net, 24 made examples, one update each, parameters compared after it, float64. With equal
    statistics both runs normalise by the whole batch's, held constant. The parameters before and after are among the
    terms of the tolerance, since their difference is compared.
    """
    switches = locals()
    large, small = Net(seed), Net(seed)
    examples, fresh = _examples(seed)
    if equal_statistics:
        h = (examples[0] @ large.first.T).detach()
        large.statistics = small.statistics = h.mean(0), h.var(0, correction=0)
    parts = _parts(examples, accumulation_steps)
    terms = [*_terms(large, parts), flat(large.parameters())]
    right = update(large, [examples])
    terms += [flat(large.parameters())]
    batches = parts if equal_randomness else _parts((*examples[:2], fresh), accumulation_steps)
    if not same_examples:
        batches[-1] = batches[0]
    difference = distance(update(small, batches, averaged, one_update), right)
    bound = tolerance(terms, count=24, depth=depth(large), dtype=torch.float64, result=difference.right_norm)
    broken = tuple(name.replace("_", " ") for name, on in switches.items() if on is False)
    return Conditions(
        broken, difference.relative_error <= bound.value, difference.relative_error, difference.norm_ratio, bound
    )


def _examples(seed: int) -> tuple[Examples, Tensor]:
    """24 examples of x, y and dropout mask, and fresh masks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 8, generator=generator, dtype=torch.float64)
    y = torch.randn(24, generator=generator, dtype=torch.float64)
    mask, fresh = 2.0 * (torch.rand(2, 24, 16, generator=generator, dtype=torch.float64) < 0.5)
    return (x, y, mask), fresh


def _parts(examples: Examples, K: int) -> list[Examples]:
    return list(zip(*(each.tensor_split(K) for each in examples), strict=True))


def _terms(net: Net, parts: list[Examples]) -> list[Tensor]:
    """What each part adds to the update."""
    B, step = sum(len(y) for _, y, _ in parts), 0.05
    losses = [((net(x, mask) - y) ** 2).sum() / B for x, y, mask in parts]
    return [step * gradient_of(net, loss) for loss in losses]


# The microbatch without a valid target.


def masked_mean(model: nn.Module, tokens: Tensor, labels: Tensor, N: int, K: int) -> Tensor:
    """A mean by hand: 0/0 where nothing is valid, in the loss and in the gradient."""
    mask = labels[:, 1:] != IGNORE
    losses = next_token_loss(model, tokens, labels.clamp(min=0), "none")
    return (losses * mask).sum() / mask.sum() / K


def library_mean(model: nn.Module, tokens: Tensor, labels: Tensor, N: int, K: int) -> Tensor:
    """The library's mean: the loss is NaN and the gradient 0, and K still counts it, which dilutes the others."""
    return next_token_loss(model, tokens, labels, "mean") / K


def sum_over_n(model: nn.Module, tokens: Tensor, labels: Tensor, N: int, K: int) -> Tensor:
    """The correct one: a sum over nothing is exactly 0, and its backward still runs."""
    return next_token_loss(model, tokens, labels, "sum") / N


POLICIES = {"masked mean by hand": masked_mean, "library mean": library_mean, "token mean": sum_over_n}


@dataclass(frozen=True)
class Policy:
    """The result of one policy for a window with empty microbatches."""

    name: str = quantity("the policy")
    loss: float = quantity("loss of the window, as it would be logged", "nat per token")
    empty_norm: float = quantity("norm of an empty microbatch's contribution to the gradient")
    dilution: float = quantity("norm of the gradient, over that of the same window without its empty microbatches")
    relative_error: float = quantity("‖g − G‖ / ‖G‖, G the token mean's gradient")


@dataclass(frozen=True)
class Empty:
    """A window with empty microbatches under each policy."""

    counts: tuple[int, ...] = quantity("valid tokens of each microbatch", "tokens")
    policies: tuple[Policy, ...] = quantity("the result of each policy")


def empty(
    *,
    accumulation_steps: Annotated[
        int, Range(2, 8, unit="microbatches", help="K, microbatches of one optimizer step")
    ] = 4,
    empty: Annotated[int, Range(0, 7, unit="microbatches", help="how many of them have no valid target")] = 1,
    shortest: Shortest = 4,
    seed: Seed = 0,
) -> Empty:
    """A window in which some microbatches have no valid target, under each policy.

    >>> [(each.name, each.empty_norm) for each in empty().policies]
    [('masked mean by hand', nan), ('library mean', 0.0), ('token mean', 0.0)]

    One sequence a microbatch, the first ones emptied. Raises LabError where all would be empty.
    """
    if empty >= accumulation_steps:
        raise LabError(
            f"empty = {empty} of {accumulation_steps} microbatches leaves none: try {accumulation_steps - 1}"
        )
    model = Transformer(seed=seed, dtype=torch.float64)
    microbatches = split(*batch(seed, accumulation_steps, shortest=shortest), accumulation_steps)
    for _, labels in microbatches[:empty]:
        labels.fill_(IGNORE)
    policies = tuple(_policy(name, model, microbatches, empty) for name in POLICIES)
    return Empty(tuple(valid_tokens(labels) for _, labels in microbatches), policies)


def _policy(name: str, model: nn.Module, microbatches: list[Batch], empty: int) -> Policy:
    full = microbatches[empty:]
    _, right = _contributions("token mean", model, full)
    _, without = _contributions(name, model, full)
    losses, parts = _contributions(name, model, microbatches)
    return Policy(
        name,
        loss=sum(losses),
        empty_norm=float(parts[0].norm()) if empty else 0.0,
        dilution=float(parts.sum(0).norm() / without.sum(0).norm()),
        relative_error=distance(parts.sum(0), right.sum(0)).relative_error,
    )


def _contributions(name: str, model: nn.Module, microbatches: list[Batch]) -> tuple[list[float], Tensor]:
    """Loss and gradient that each microbatch adds under a policy."""
    N, K = sum(valid_tokens(labels) for _, labels in microbatches), len(microbatches)
    losses, parts = [], []
    for tokens, labels in microbatches:
        loss = POLICIES[name](model, tokens, labels, N, K)
        losses.append(loss.item())
        parts.append(gradient_of(model, loss))
    return losses, torch.stack(parts)
