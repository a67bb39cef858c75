"""The entries of one parameter's gradient: the correct ones, this loop's, and their difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.declare import quantity
from labkit.errors import LabError

ROWS, COLUMNS = 16, 32


@dataclass(frozen=True, eq=False)
class Entries:
    """The rows and columns of one parameter in which the gradients are largest, in their own order."""

    parameter: str = quantity("name of the parameter")
    rows: tuple[str, ...] = quantity("what each row is")
    columns: tuple[int, ...] = quantity("index of each column")
    shape: tuple[int, int] = quantity("rows and columns of the whole parameter")
    reference: Tensor = quantity("entries of the correct gradient, rows × columns")
    gradient: Tensor = quantity("entries of this gradient, rows × columns")

    @property
    def difference(self) -> Tensor:
        """This gradient's entries less the correct ones."""
        return self.gradient - self.reference

    @property
    def largest(self) -> float:
        """The largest entry of either in size: the end of the colour scale that the three share."""
        return float(torch.stack([self.reference, self.gradient]).abs().max())


def entries(
    gradient: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    parameter: str,
    names: Sequence[str] = (),
    *,
    rows: int = ROWS,
    columns: int = COLUMNS,
) -> Entries:
    """The entries of a parameter in two gradients, cut to the rows and columns that matter.

    >>> G, g = torch.tensor([[0.0, 3.0], [0, 0], [1, 0]]), torch.tensor([[0.0, 2.0], [0, 0], [1, 1]])
    >>> seen = entries({"weight": g}, {"weight": G}, "weight", ["a", "b", "c"], rows=2)
    >>> seen.rows, seen.difference
    (('a', 'c'), tensor([[ 0., -1.],
            [ 0.,  1.]], dtype=torch.float64))

    gradient, reference: each parameter's own, by name. Shapes: [r, c]; what has one dimension is one row, what has more
    is flattened behind the first. names: what each row is, by default its index. A row matters by the larger of its
    norms in the two. Raises LabError for a parameter that is not there or not of one shape in both.
    """
    if parameter not in gradient or parameter not in reference:
        raise LabError(f"there is no parameter {parameter!r}: try {', '.join(map(repr, reference))}")
    G, g = (_matrix(each[parameter]) for each in (reference, gradient))
    if G.shape != g.shape:
        sizes = f"{parameter!r} is {tuple(g.shape)} in one and {tuple(G.shape)} in the other"
        raise LabError(f"{sizes}: try gradients of the same model")
    row, column = _largest(g, G, 1, rows), _largest(g, G, 0, columns)
    labels = tuple(names[at] if at < len(names) else str(at) for at in row.tolist())
    shape = (G.shape[0], G.shape[1])
    return Entries(parameter, labels, tuple(column.tolist()), shape, G[row][:, column], g[row][:, column])


def _matrix(values: Tensor) -> Tensor:
    values = values.detach().double().cpu()
    return values.reshape(1, -1) if values.ndim < 2 else values.flatten(1)


def _largest(g: Tensor, G: Tensor, dim: int, count: int) -> Tensor:
    """Which rows (dim 1) or columns (dim 0) are largest in either, in their own order."""
    norms = torch.maximum(g.norm(dim=dim), G.norm(dim=dim))
    return norms.topk(min(count, len(norms))).indices.sort().values


def by_parameter(named: Sequence[tuple[str, Tensor]], flat: Tensor) -> dict[str, Tensor]:
    """A flat gradient cut into its parameters, by their names and shapes.

    >>> by_parameter([("w", torch.zeros(2, 1)), ("b", torch.zeros(1))], torch.tensor([1.0, 2.0, 3.0]))["w"]
    tensor([[1.],
            [2.]])
    """
    parts = flat.split([each.numel() for _, each in named])
    return {name: part.view(each.shape) for (name, each), part in zip(named, parts, strict=True)}
