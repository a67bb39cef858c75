"""Packing: documents of real lengths in one row, what that saves, and how they must be kept apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit import corpus
from labkit.corpus import Seed
from labkit.declare import Choice, Range, quantity
from labkit.fit import distance, gradient_of
from labkit.nets import IGNORE
from labkit.packing import rows
from labkit.packing.mixing import mixture as mixture
from labkit.packing.mixing import order as order
from labkit.packing.rows import Reader, document_of, one_by_one, positions_of, summed_loss, texts
from labkit.tolerance import Compared, Tolerance

Documents = Annotated[int, Range(2, 5, unit="documents", help="documents packed into one row")]
Longest = Annotated[int, Range(8, 24, unit="tokens", help="the longest document; the shortest may have 4")]


# Padding, and rows without it.


def newest(fitting: list[int], room: list[int]) -> int | None:
    """The row begun last, if it still has room."""
    return fitting[-1] if fitting and fitting[-1] == len(room) - 1 else None


def first(fitting: list[int], room: list[int]) -> int | None:
    """The oldest row with room."""
    return fitting[0] if fitting else None


def tightest(fitting: list[int], room: list[int]) -> int | None:
    """The row that is left with the least room."""
    return min(fitting, key=lambda row: room[row]) if fitting else None


HEURISTICS: dict[str, tuple[Callable[[list[int], list[int]], int | None], bool]] = {
    "next-fit": (newest, False),
    "first-fit": (first, False),
    "first-fit decreasing": (first, True),
    "best-fit decreasing": (tightest, True),
}


def packed(lengths: Sequence[int], row: int, heuristic: str = "best-fit decreasing") -> list[list[int]]:
    """Which documents each row holds: one after the other, each into a row with room for all of it.

    >>> packed([5, 3, 4, 2, 2], row=8)
    [[0, 1], [2, 3, 4]]

    Source: Johnson 1974, Worst-case performance bounds for simple one-dimensional packing algorithms; best-fit
    decreasing for language models: Ding et al. 2024, Fewer truncations improve language modeling, section 3.
    """
    choose, decreasing = HEURISTICS[heuristic]
    bins: list[list[int]] = []
    room: list[int] = []
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at] if decreasing else at):
        index = choose([each for each, space in enumerate(room) if space >= lengths[at]], room)
        if index is None:
            index = len(bins)
            bins.append([])
            room.append(row)
        bins[index].append(at)
        room[index] -= lengths[at]
    return bins


@dataclass(frozen=True)
class Waste:
    """The same documents padded and packed, and the share of padding in each."""

    length: int = quantity("T, tokens of a packed row", "tokens")
    lengths: tuple[int, ...] = quantity("tokens of each document", "tokens")
    widths: tuple[int, ...] = quantity("what each document is padded to: the longest of its batch", "tokens")
    rows: tuple[tuple[int, ...], ...] = quantity("documents of each packed row")
    fewest: int = quantity("rows below which no packing comes: all tokens / T, rounded up", "rows")
    to_length: float = quantity("share of padding where each document is padded to T")
    to_longest: float = quantity("share of padding where each is padded to the longest of its batch")
    in_rows: float = quantity("share of padding in the packed rows")


def waste(
    *,
    documents: Annotated[int, Range(4, 96, unit="documents", help="documents drawn from the standard library")] = 48,
    length: Annotated[
        int, Range(64, 1024, log=True, unit="tokens", help="T, tokens of a packed row; longer documents are cut")
    ] = 256,
    batch: Annotated[int, Range(1, 32, unit="documents", help="documents that are padded together")] = 8,
    order: Annotated[str, Choice(("as they come", "sorted by length"), help="order of the padded batches")] = (
        "as they come"
    ),
    heuristic: Annotated[str, Choice(tuple(HEURISTICS), help="how rows are filled")] = "best-fit decreasing",
    seed: Annotated[int, Range(0, 9999, help="draws the documents")] = 0,
) -> Waste:
    """Documents of real lengths, padded in batches and packed into rows.

    >>> padding = waste(documents=96)
    >>> padding.to_length > padding.to_longest > padding.in_rows
    True

    A document is one docstring of Python's standard library, every one as likely; a token is a character.
    """
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(len(corpus.documents()), generator=generator)[:documents].tolist()
    lengths = [min(length, len(corpus.documents()[at])) for at in indices]
    if order == "sorted by length":
        lengths.sort()
    widths = [max(lengths[at - at % batch :][:batch]) for at in range(documents)]
    bins = packed(lengths, length, heuristic)
    return Waste(
        length,
        tuple(lengths),
        tuple(widths),
        tuple(map(tuple, bins)),
        fewest=math.ceil(sum(lengths) / length),
        to_length=1 - sum(lengths) / (documents * length),
        to_longest=1 - sum(lengths) / sum(widths),
        in_rows=1 - sum(lengths) / (len(bins) * length),
    )


# The leak.


@dataclass(frozen=True, eq=False)
class Leak:
    """What the loss of each token has for a gradient in the inputs of each other."""

    lengths: tuple[int, ...] = quantity("tokens of each document", "tokens")
    map: Tensor = quantity("‖∂ loss of the target after t / ∂ input s‖, [T, T]: t down, s across; NaN: no target")
    between: Tensor = quantity("the same from document to document: whose loss down, whose inputs across")
    leaked: float = quantity("gradient of the last document's loss in the others' inputs, as a share of its own")
    ahead: float = quantity("largest gradient in an input that comes after the token that looks")


def leak(
    *,
    mask: Annotated[str, Choice(tuple(rows.MASKS), help="what a token may look at")] = "plain causal",
    documents: Documents = 3,
    longest: Longest = 16,
    seed: Seed = 0,
) -> Leak:
    """The gradient of each token's loss with respect to the embedded inputs of every token of the row.

    >>> leak(mask="block causal").leaked, leak(mask="plain causal").leaked > 0.1
    (0.0, True)

    One backward for each target. Targets across a boundary are ignored, positions restart: only the mask can leak.
    A masked score is −∞ before the softmax, so its weight is exactly 0, and so is the gradient behind it.
    """
    model, row = Reader(seed=seed), texts(seed, documents, longest)
    lengths = [len(text) for text in row]
    tokens, owner = torch.cat(row), document_of(lengths)
    T = len(tokens)
    x = model.embedding.detach()[tokens].expand(T - 1, T, -1).requires_grad_()  # a copy of the row for each target
    logits = model(x, positions_of(lengths), rows.MASKS[mask](lengths))
    at, labels = torch.arange(T - 1), rows.apart(tokens, lengths)[1:]
    losses = F.cross_entropy(logits[at, at], labels, ignore_index=IGNORE, reduction="none")
    (slopes,) = torch.autograd.grad(losses.sum(), x)
    of_documents = torch.stack([slopes[owner[:-1] == one].sum(0) for one in range(documents)])
    between = torch.stack([of_documents[:, owner == other].norm(dim=(1, 2)) for other in range(documents)], 1)
    sizes = slopes.norm(dim=2)
    return Leak(
        tuple(lengths),
        F.pad(sizes.masked_fill(labels[:, None] == IGNORE, math.nan), (0, 0, 0, 1), value=math.nan),
        between,
        leaked=float(between[-1, :-1].norm() / between[-1, -1]),
        ahead=float(sizes.triu(1).max()),
    )


# The target across a boundary.


@dataclass(frozen=True)
class Labelled:
    """What one way to label a packed row does."""

    name: str = quantity("which labels of each document are ignored")
    targets: int = quantity("targets that are counted", "targets")
    across: int = quantity("of those, the first token of a document, predicted by the last of another", "targets")
    lost: int = quantity("good targets that are not counted", "targets")
    loss: float = quantity("mean loss", "nat per token")
    relative_error: float = quantity("‖g − G‖ / ‖G‖, G of the documents one by one")


@dataclass(frozen=True)
class Boundary:
    """A packed row under each way to label it, beside the documents one by one."""

    lengths: tuple[int, ...] = quantity("tokens of each document", "tokens")
    loss: float = quantity("mean loss of the documents one by one", "nat per token")
    ways: tuple[Labelled, ...] = quantity("the result of each way to label")
    tolerance: Tolerance = quantity("relative error that rounding alone explains")


def boundary(*, documents: Documents = 4, longest: Longest = 16, seed: Seed = 0) -> Boundary:
    """Where one document ends and the next begins: a target there, or none.

    >>> [(way.name, way.across, way.lost) for way in boundary().ways]
    [('first ignored', 0, 0), ('nothing ignored', 3, 0), ('last ignored', 3, 4), ('both ignored', 0, 4)]

    The mask keeps the documents apart and positions restart. Untrained weights, float64.
    """
    model, row = Reader(seed=seed), texts(seed, documents, longest)
    right, lengths = one_by_one(model, row), [len(text) for text in row]
    ways = []
    for name, label in rows.LABELS.items():
        labels = label(torch.cat(row), lengths)
        targets, start = labels[1:] != IGNORE, positions_of(lengths)[1:] == 0
        loss = summed_loss(read(model, row), labels) / targets.sum()
        difference = distance(gradient_of(model, loss), right.right)
        across, lost = int((targets & start).sum()), int((~targets & ~start).sum())
        ways.append(Labelled(name, int(targets.sum()), across, lost, loss.item(), difference.relative_error))
    return Boundary(tuple(lengths), sum(right.losses) / right.targets, tuple(ways), right.tolerance(model))


def read(model: Reader, row: Sequence[Tensor], *, reset: bool = True) -> Tensor:
    """Logits of a packed row under the right mask; positions restart with every document, or run on."""
    lengths = [len(text) for text in row]
    positions = positions_of(lengths) if reset else torch.arange(sum(lengths))
    logits: Tensor = model(model.embedding[torch.cat(list(row))], positions, rows.block_causal(lengths))
    return logits


# Positions.


@dataclass(frozen=True)
class Positioned(Compared):
    """How far a packed row is from the documents one by one, for one kind of positions."""

    name: str = quantity("the kind of positions, and whether they restart")
    logits: float = quantity("‖logits − those one by one‖ / ‖those one by one‖")
    relative_error: float = quantity("‖g − G‖ / ‖G‖, G of the documents one by one")
    tolerance: Tolerance = quantity("relative error that rounding alone explains")


@dataclass(frozen=True)
class Positions:
    """Learned and rotary positions, each restarted and running on."""

    lengths: tuple[int, ...] = quantity("tokens of each document", "tokens")
    kinds: tuple[Positioned, ...] = quantity("how far each kind is off")


def positions(*, documents: Documents = 3, longest: Longest = 16, seed: Seed = 0) -> Positions:
    """Positions that restart with every document, or run on through the row, under the right mask.

    >>> [(kind.name, kind.equal) for kind in positions().kinds]
    [('learned, restart', True), ('learned, run on', False), ('rotary, restart', True), ('rotary, run on', True)]

    Rotary attention depends on the difference of two positions alone, and within a document that stays the same.
    """
    row = texts(seed, documents, longest)
    kinds = [
        _positioned(Reader(seed=seed, rotary=rotary), row, reset) for rotary in (False, True) for reset in (True, False)
    ]
    return Positions(tuple(len(text) for text in row), tuple(kinds))


def _positioned(model: Reader, row: Sequence[Tensor], reset: bool) -> Positioned:
    right, tokens, lengths = one_by_one(model, row), torch.cat(list(row)), [len(text) for text in row]
    logits = read(model, row, reset=reset)
    loss = summed_loss(logits, rows.apart(tokens, lengths)) / right.targets
    difference = distance(gradient_of(model, loss), right.right)
    name = f"{'learned' if model.position is not None else 'rotary'}, {'restart' if reset else 'run on'}"
    off = distance(logits.detach(), right.logits).relative_error
    return Positioned(name, off, difference.relative_error, right.tolerance(model))
