"""Two gradients of one model, this one and the correct one, and what each is made of: all that a picture needs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.direction import Direction, direction
from labkit.entries import Entries, by_parameter, entries
from labkit.nets import VOCABULARY

REST = "rest"


@dataclass(frozen=True, eq=False)
class Gradients:
    """A gradient and the correct one, [P], the contributions to each, [m, P], and the names that pictures need."""

    gradient: Tensor
    reference: Tensor
    contributions: Tensor
    reference_contributions: Tensor
    labels: tuple[str, ...]
    parameters: tuple[tuple[str, torch.Size], ...] = ()
    tolerance: float = 0.0
    names: tuple[str, str] = ("correct", "this loop")

    @property
    def drawable(self) -> bool:
        """Whether there are arrows to draw: both finite, the correct one not zero."""
        return bool(self.gradient.isfinite().all() and self.reference.isfinite().all() and self.reference.any())

    @functools.cached_property
    def plane(self) -> Direction:
        """Both in the plane that they span; LabError where they span none."""
        return direction(
            self.gradient,
            self.reference,
            self.contributions,
            self.reference_contributions,
            tolerance=self.tolerance,
        )

    def entries(self, parameter: str = "") -> Entries:
        """The entries of one parameter, by default the first; LabError for a name that is none."""
        shapes = [(name, torch.empty(shape, device="meta")) for name, shape in self.parameters]
        gradient, reference = (by_parameter(shapes, each) for each in (self.gradient, self.reference))
        name = parameter or (self.parameters[0][0] if self.parameters else "")
        return entries(gradient, reference, name, CHARACTERS if name == "embedding" else ())


def composed(
    gradient: Tensor,
    contributions: Tensor,
    reference_contributions: Tensor,
    labels: Sequence[str],
    tolerance: float,
    *,
    model: nn.Module | None = None,
    names: tuple[str, str] = ("correct", "this loop"),
) -> Gradients:
    """A gradient and what is known to be in it, beside the correct one, the sum of its contributions.

    >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> both = composed(torch.tensor([2.0, 0.5]), torch.diag(torch.tensor([2.0, 0.5])), rows, ["1", "3"], 1e-12)
    >>> both.plane.chain[1], both.labels
    (tensor([1., 1.], dtype=torch.float64), ('1', '3'))

    Shapes: gradient [P], contributions [m, P], their labels [m]. What they leave of the gradient is one more, the rest.
    tolerance: relative error that rounding alone explains. model: whose parameters the entries are.
    """
    g, parts, correct = gradient.double(), contributions.double(), reference_contributions.double()
    rest, words = g - parts.sum(0), tuple(labels)
    if bool(rest.isfinite().all()) and float(rest.norm()) > 1e-9 * float(g.norm()):
        parts, correct = torch.cat([parts, rest[None]]), torch.cat([correct, torch.zeros_like(rest)[None]])
        words = (*words, REST)
    shapes = tuple((name, p.shape) for name, p in model.named_parameters()) if model else ()
    return Gradients(g, correct.sum(0), parts, correct, words, shapes, tolerance, names)


def _character(code: int) -> str:
    return {9: "tab", 10: "line", 32: "space"}.get(code, chr(code) if 32 < code < 127 else f"#{code}")


CHARACTERS = tuple(map(_character, range(VOCABULARY)))
