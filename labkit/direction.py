"""The plane of two gradients: two arrows, each a chain of what it is made of, and the error between their tips."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.declare import quantity
from labkit.errors import LabError
from labkit.wording import percent, three


@dataclass(frozen=True, eq=False)
class Direction:
    """A gradient beside the correct one, in the plane that holds both; the correct one is 1 long and points along x."""

    gradient: Tensor = quantity("tip of this gradient's arrow, [2]", "of the correct length")
    reference: Tensor = quantity("tip of the correct gradient's arrow, [2]: (1, 0)", "of the correct length")
    chain: Tensor = quantity(
        "joints of this gradient's contributions, head to tail, [m + 1, 2]", "of the correct length"
    )
    reference_chain: Tensor = quantity("joints of the correct one's contributions, [m + 1, 2]", "of the correct length")
    outside: float = quantity(
        "longest contribution's part outside the plane; in the sum it cancels", "of the correct length"
    )
    length_ratio: float = quantity("‖g‖ / ‖G‖")
    angle: float = quantity("angle between the two", "degrees")
    relative_error: float = quantity("‖g − G‖ / ‖G‖")
    tolerance: float = quantity("relative error that rounding alone explains")

    @property
    def equal(self) -> bool:
        """Whether rounding explains the whole difference."""
        return self.relative_error <= self.tolerance


def direction(
    gradient: Tensor,
    reference: Tensor,
    contributions: Tensor | None = None,
    reference_contributions: Tensor | None = None,
    *,
    tolerance: float = 0.0,
) -> Direction:
    """The plane that a gradient and the correct one span, and where the contributions to both of them lie in it.

    >>> G, g = torch.tensor([2.0, 0.0, 0.0]), torch.tensor([2.0, 0.0, 2.0])
    >>> plane = direction(g, G, torch.tensor([[2.0, 1, 0], [0, -1, 2]]))
    >>> plane.gradient, round(plane.angle), round(plane.length_ratio, 2), plane.relative_error
    (tensor([1., 1.], dtype=torch.float64), 45, 1.41, 1.0)
    >>> plane.chain[1], plane.outside
    (tensor([1., 0.], dtype=torch.float64), 0.5)

    Shapes: gradient and reference [P]; contributions [m, P], which sum to theirs; without them each is its own. Both
    arrows lie in the plane whole, so lengths and the angle are exact. Where they are parallel, the second axis is the
    one along which the contributions differ most. This gradient lies above the correct one. float64. Raises LabError
    for a correct gradient of zero, values that are not finite, and contributions that do not sum to their gradient.
    """
    g, G = gradient.detach().double().flatten(), reference.detach().double().flatten()
    length = float(G.norm())
    if not (length > 0 and math.isfinite(length) and bool(g.isfinite().all())):
        norms = f"‖G‖ = {length:g} spans no plane with ‖g‖ = {float(g.norm()):g}"
        raise LabError(f"{norms}: try finite gradients, and a correct one that is not zero")
    parts, reference_parts = _parts(g, contributions), _parts(G, reference_contributions)
    axes = _axes(g / length, G / length, torch.cat([parts, reference_parts]) / length, tolerance)
    tip = axes @ g / length
    flat = torch.cat([parts, reference_parts]) / length
    across = flat - flat @ axes.T @ axes
    return Direction(
        gradient=tip,
        reference=torch.tensor([1.0, 0.0], dtype=torch.float64),
        chain=_chain(parts @ axes.T / length),
        reference_chain=_chain(reference_parts @ axes.T / length),
        outside=float(across.norm(dim=1).max()),
        length_ratio=float(g.norm()) / length,
        angle=math.degrees(math.atan2(float(tip[1]), float(tip[0]))),
        relative_error=float((g - G).norm()) / length,
        tolerance=tolerance,
    )


def _parts(gradient: Tensor, contributions: Tensor | None) -> Tensor:
    """The contributions in float64, checked against their sum."""
    if contributions is None:
        return gradient[None]
    parts = contributions.detach().double()
    left = float((parts.sum(0) - gradient).norm())
    if left > 1e-6 * float(parts.norm(dim=1).sum()):
        raise LabError(f"the contributions miss their gradient by {left:.3g}: try parts that sum to it")
    return parts


def _axes(g: Tensor, G: Tensor, parts: Tensor, rounding: float) -> Tensor:
    """An orthonormal pair [2, P]: along G, and across it towards g; towards what differs most where g is parallel."""
    along = G / G.norm()
    across = g - (g @ along) * along
    across = across - (across @ along) * along  # once more: the first leaves rounding
    if float(across.norm()) > max(1e-12, rounding) * max(1.0, float(g.norm())):
        return torch.stack([along, across / across.norm()])
    spread = parts - torch.outer(parts @ along, along)
    _, sizes, directions = torch.linalg.svd(spread, full_matrices=False)
    if not len(sizes) or float(sizes[0]) <= 1e-12 * float(parts.norm()):
        return torch.stack([along, torch.zeros_like(along)])
    second = directions[0] - (directions[0] @ along) * along
    first = parts @ second
    return torch.stack([along, second * (1.0 if float(first[first.abs().argmax()]) > 0 else -1.0)])


def _chain(steps: Tensor) -> Tensor:
    """The joints of steps laid head to tail, from the origin on."""
    return torch.cat([steps.new_zeros(1, 2), steps.cumsum(0)])


def words(plane: Direction, this: str = "this loop") -> str:
    """Length, angle and error in a sentence.

    >>> words(direction(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])))
    'This loop: 1.41 times as long, turned by 45°, error 100 %.'
    >>> words(direction(torch.ones(2), torch.ones(2)), "the sum")
    'The sum: the correct gradient, as far as rounding goes.'
    """
    name = this[0].upper() + this[1:]
    if plane.equal:
        return f"{name}: the correct gradient, as far as rounding goes."
    turn = f"turned by {plane.angle:.0f}°" if plane.angle >= 0.5 else "not turned"
    return f"{name}: {three(plane.length_ratio)} times as long, {turn}, error {percent(plane.relative_error)}."
