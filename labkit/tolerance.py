"""How far apart two correct answers may be: every equivalence tolerance comes from here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.declare import quantity
from labkit.errors import LabError


@dataclass(frozen=True)
class Tolerance:
    """A tolerance and the parts it is made of, so that it can be printed beside the result."""

    value: float = quantity("largest relative difference that rounding alone explains")
    unit_roundoff: float = quantity("u, half the distance from 1 to the next number")
    terms: int = quantity("n, roundings of one term on its way into the sum")
    cancellation: float = quantity("Σ|terms| / |Σ terms|")

    def __str__(self) -> str:
        parts = f"n = {self.terms:,}, u = {self.unit_roundoff:.2g}, Σ|terms|/|Σ| = {self.cancellation:.3g}"
        return f"2 · n u/(1 − n u) · Σ|terms|/|Σ| = {self.value:.2g}, with {parts}"


class Compared:
    """A result that holds how far it is from the correct one, and how far rounding alone may take it.

    >>> @dataclass(frozen=True)
    ... class Result(Compared):
    ...     relative_error: float
    ...     tolerance: Tolerance
    >>> Result(1e-13, tolerance([torch.ones(1)], count=1000, dtype=torch.float64)).equal
    True
    """

    relative_error: float
    tolerance: Tolerance

    @property
    def equal(self) -> bool:
        """Whether rounding explains the whole difference."""
        return self.relative_error <= self.tolerance.value


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounded operation.

    >>> unit_roundoff(torch.float64) == 2.0**-53
    True
    """
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, dtype: torch.dtype) -> float:
    """The bound γ_n = n u / (1 − n u) on the relative error that n roundings can add up to.

    >>> gamma(1000, torch.float64) < 1.2e-13
    True

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1.
    Raises LabError where n u ≥ 1, since there is no bound then.
    """
    nu = terms * unit_roundoff(dtype)
    if nu >= 1:
        raise LabError(f"{terms} roundings in {dtype} leave no digit (n u = {nu:.3g}, allowed below 1): try float32")
    return nu / (1 - nu)


def tolerance(
    terms: Iterable[Tensor], *, count: int, dtype: torch.dtype, depth: int = 0, result: float | None = None
) -> Tolerance:
    """The relative distance that two orders of summing the same terms may have.

    >>> terms = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, -3.0]])
    >>> print(tolerance(terms, count=1000, dtype=torch.float64))
    2 · n u/(1 − n u) · Σ|terms|/|Σ| = 7e-13, with n = 1,000, u = 1.1e-16, Σ|terms|/|Σ| = 3.16

    Each order errs by at most γ_n Σ|terms| (Higham 4.2, eq. 4.4), so the two differ by at most twice that:
    2 γ_n Σ‖terms‖ / ‖Σ terms‖, with n = `count` numbers added into each coordinate plus the `depth` roundings of a
    term before it is added. The first part is a bound for any order, blocked or threaded. The second is of first
    order: it assumes that every layer passes a relative error on without making it larger.
    `terms`: tensors of one shape. They may be coarser than the numbers added, a sequence's gradient for those of its
    tokens; what cancels inside a term is not counted then (on the labs' transformer that is a factor of 4).
    `result`: ‖Σ terms‖ where it is known, or where something else is compared than their sum.
    Raises LabError for no terms, a sum of zero, or n u ≥ 1.
    """
    rows = [each.detach().double() for each in terms]
    if not rows:
        raise LabError("0 terms have no sum: try at least one")
    total = float(torch.stack(rows).sum(0).norm()) if result is None else result
    if not total > 0:
        raise LabError(f"the terms add up to {total:g}, and nothing is relative to that: try terms that do not cancel")
    cancellation = sum(float(row.norm()) for row in rows) / total
    return Tolerance(2 * gamma(count + depth, dtype) * cancellation, unit_roundoff(dtype), count + depth, cancellation)


def depth(model: nn.Module) -> int:
    """Roundings in one token's gradient: every parameter's fan-in, once forward, once backward.

    >>> depth(nn.Linear(24, 96, bias=False))
    48

    A declared count, not a measured one: an inner product of n numbers rounds n times.
    """
    return 2 * sum(p.shape[-1] if p.dim() else 1 for p in model.parameters())
