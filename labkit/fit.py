"""What weight did each microbatch really get? Takes a gradient and its constituents, and returns the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.declare import quantity
from labkit.errors import LabError

SAMPLE = 65_536
Gradient = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights with which references add up to a gradient, and how far they may be trusted."""

    values: Tensor
    residual: float
    condition: float
    indistinguishable: tuple[tuple[int, ...], ...]
    totals: tuple[float, ...]
    zero: tuple[int, ...]


def fit(gradient: Gradient, references: Sequence[Gradient] | Tensor, *, sample: int = SAMPLE, seed: int = 0) -> Weights:
    """Weights w, by least squares in float64, with which Σ w_m · reference_m comes nearest to the gradient.

    >>> r = torch.eye(3, 5)
    >>> fit(2 * r[0] + r[2], r).values
    tensor([2., 0., 1.], dtype=torch.float64)
    >>> twins = fit(r[0] + 3 * r[1], torch.stack([r[0], r[1], r[1]]))
    >>> twins.values, twins.indistinguishable, round(twins.totals[0], 9)
    (tensor([1., nan, nan], dtype=torch.float64), ((1, 2),), 3.0)

    Shapes: gradient [P], or a list of tensors, one a layer; references [m, P], or m of either kind; values [m].
    residual: ‖gradient − Σ w r‖ / ‖gradient‖. condition: of the references scaled to one length, over the
    directions that can be told apart.
    References that depend on each other linearly (twins, multiples, one the sum of others) are a group in
    `indistinguishable`: their values are NaN, never a guess, and `totals` has the sum of each group's weights
    where it is determined (for twins it is), else NaN. References that are zero are listed in `zero`, value NaN.
    Beyond `sample` coordinates a seeded sample of every layer is used. Raises LabError for shapes that do not
    match and numbers that are not finite. Method: QR, then the SVD of R, so that the condition is not squared
    (Golub and Van Loan, Matrix Computations, 5.5).
    """
    g, rows, unit = _together(_layers(gradient), [_layers(each) for each in references], sample, seed)
    norms = rows.norm(dim=1)
    _finite(g.norm(), norms)
    zero = norms == 0
    scale = norms.masked_fill(zero, 1.0)
    columns = (rows / scale[:, None]).T
    q, r = torch.linalg.qr(columns)
    u, sigma, vt = torch.linalg.svd(r)
    noise = _noise(len(g), unit)
    rank = int((sigma > noise * sigma[0]).sum())
    scaled = vt[:rank].T @ ((u.T @ (q.T @ g))[:rank] / sigma[:rank])
    residual = float((g - columns @ scaled).norm() / g.norm()) if g.any() else 0.0
    condition = float(sigma[0] / sigma[rank - 1]) if rank else math.nan
    groups = _groups(vt[rank:], noise * max(1.0, condition), zero)
    totals = tuple(_total(vt[rank:, group], scaled[[*group]], scale[[*group]], noise) for group in groups)
    values = (scaled / scale).masked_fill(zero, math.nan)
    values[[m for group in groups for m in group]] = math.nan
    return Weights(values, residual, condition, groups, totals, tuple(zero.nonzero().flatten().tolist()))


@dataclass(frozen=True)
class Distance:
    """How far a gradient is from the correct one, by each measure in use."""

    norm: float = quantity("‖g‖")
    right_norm: float = quantity("‖G‖, G the correct gradient")
    relative_error: float = quantity("‖g − G‖ / ‖G‖")
    norm_ratio: float = quantity("‖g‖ / ‖G‖")
    cosine: float = quantity("g · G / (‖g‖ ‖G‖)")
    projection: float = quantity("g · G / ‖G‖²: blind to anything perpendicular to G")


def distance(gradient: Tensor, right: Tensor) -> Distance:
    """The distance of one gradient from another.

    >>> off = distance(torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.0]))
    >>> off.projection, off.relative_error
    (1.0, 0.5)

    Shapes: the same for both. NaN where the correct gradient is zero. ‖g − G‖² = (p − 1)² ‖G‖² + ‖g perpendicular
    to G‖², so a projection p of 1 says nothing about the second term.
    """
    g, r = gradient.double(), right.double()
    norm, right_norm, inner = float(g.norm()), float(r.norm()), float((g * r).sum())
    cosine = inner / (norm * right_norm) if norm * right_norm else math.nan
    ratios = [each / right_norm if right_norm else math.nan for each in (float((g - r).norm()), norm, inner)]
    return Distance(norm, right_norm, ratios[0], ratios[1], cosine, ratios[2] / (right_norm or 1.0))


def per_layer(model: nn.Module, wrong: Tensor, right: Tensor) -> dict[str, Distance]:
    """The distance of a flat gradient from the correct one, parameter by parameter.

    >>> round(per_layer(nn.Linear(2, 1), torch.tensor([1.0, 0, 3]), torch.tensor([1.0, 0, 2]))["bias"].norm_ratio, 2)
    1.5
    """
    names, sizes = zip(*((name, p.numel()) for name, p in model.named_parameters()), strict=True)
    return {name: distance(g, r) for name, g, r in zip(names, wrong.split(sizes), right.split(sizes), strict=True)}


def gradient(model: nn.Module) -> list[Tensor]:
    """The gradient that a model's parameters hold, one tensor a parameter, zeros where there is none.

    >>> gradient(nn.Linear(2, 1, bias=False))
    [tensor([[0., 0.]])]
    """
    return [torch.zeros_like(p.data) if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def gradient_of(model: nn.Module, loss: Tensor) -> Tensor:
    """The gradient of one loss in all of a model's parameters, flat, float64 on the CPU; .grad is left alone.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> gradient_of(model, model(torch.tensor([3.0, 4.0])).sum())
    tensor([3., 4.], dtype=torch.float64)
    """
    return flat(torch.autograd.grad(loss, list(model.parameters())))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors as one float64 vector on the CPU, in order.

    >>> flat([torch.ones(1, 2), torch.zeros(1)])
    tensor([1., 1., 0.], dtype=torch.float64)
    """
    parts = [each.detach().reshape(-1).to("cpu", torch.float64) for each in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def coordinates(sizes: Sequence[int], sample: int = SAMPLE, seed: int = 0) -> list[Tensor]:
    """The coordinates of each layer that a fit uses: all, or a seeded sample in proportion to the layers' sizes.

    >>> [len(each) for each in coordinates([60, 30, 10], sample=20)]
    [12, 6, 2]

    A layer is cut into as many equal stretches as it gives coordinates, one drawn from each: none comes twice,
    every layer gives at least one, and together they are at least `sample`, or all of them.
    """
    total = sum(sizes)
    if total <= sample:
        return [torch.arange(size) for size in sizes]
    generator = torch.Generator().manual_seed(seed)
    return [_stretches(size, -(-sample * size // total), generator) for size in sizes]


def _stretches(size: int, count: int, generator: torch.Generator) -> Tensor:
    edges = torch.arange(count + 1) * size // max(count, 1)
    inside = torch.rand(count, generator=generator, dtype=torch.float64) * edges.diff()
    return edges[:-1] + inside.long()


def _layers(gradient: Gradient) -> list[Tensor]:
    return [gradient] if isinstance(gradient, Tensor) else list(gradient)


def _together(layers: list[Tensor], stacks: list[list[Tensor]], sample: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Gradient [P] and references [m, P] in float64, sampled alike; and the coarsest unit round-off among them."""
    _check(layers, stacks)
    dtypes = {each.dtype for stack in (layers, *stacks) for each in stack}
    sizes = [each.numel() for each in layers]
    if any([each.numel() for each in stack] != sizes for stack in stacks):
        layers, stacks, sizes = [flat(layers)], [[flat(stack)] for stack in stacks], [sum(sizes)]
    if sum(sizes) > sample:
        chosen = coordinates(sizes, sample, seed)
        layers, *stacks = [
            [each.reshape(-1)[at.to(each.device)] for each, at in zip(stack, chosen, strict=True)]
            for stack in (layers, *stacks)
        ]
    return flat(layers), torch.stack([flat(stack) for stack in stacks]), max(torch.finfo(t).eps / 2 for t in dtypes)


def _check(layers: list[Tensor], stacks: list[list[Tensor]]) -> None:
    size = sum(each.numel() for each in layers)
    if not stacks or not size:
        raise LabError(f"{len(stacks)} references for {size} values: try at least one of each")
    for m, stack in enumerate(stacks):
        if (count := sum(each.numel() for each in stack)) != size:
            raise LabError(f"reference {m} has {count} values, the gradient {size}: try the same parameters for both")
    for each in (*layers, *(each for stack in stacks for each in stack)):
        if not each.is_floating_point():
            raise LabError(f"a gradient of dtype {each.dtype} is no gradient: try .double()")


def _finite(norm: Tensor, norms: Tensor) -> None:
    names = ("the gradient", *(f"reference {m}" for m in range(len(norms))))
    for name, finite in zip(names, torch.cat([norm[None], norms]).isfinite().tolist(), strict=True):
        if not finite:
            raise LabError(f"{name} has values that are not finite: try a loss without NaN and overflow")


def _noise(length: int, unit: float) -> float:
    """A relative singular value below this is rounding, not a direction of the references."""
    return 32 * math.sqrt(length) * unit


def _groups(null: Tensor, noise: float, zero: Tensor) -> tuple[tuple[int, ...], ...]:
    """Which references can trade weight along the null space; a reference of zero trades with none."""
    ties = null.T @ null
    rest = [m for m in range(len(ties)) if ties[m, m] > noise**2 and not zero[m]]
    groups = []
    while rest:
        group = rest[:1]
        while more := [m for m in rest if m not in group and bool((ties[m, group].abs() > noise).any())]:
            group += more
        rest = [m for m in rest if m not in group]
        groups.append(tuple(sorted(group)))
    return tuple(groups)


def _total(null: Tensor, scaled: Tensor, scale: Tensor, noise: float) -> float:
    """The sum of a group's weights, NaN where a trade within the group changes it."""
    each = 1 / scale
    return float(scaled @ each) if (null @ each).norm() <= 2 * noise * each.norm() else math.nan
