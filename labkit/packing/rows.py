"""A row of several documents: positions, masks, labels, and the model that reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.corpus import batch
from labkit.fit import gradient_of
from labkit.nets import IGNORE, VOCABULARY, draw, norm
from labkit.tolerance import Tolerance, depth, tolerance


def positions_of(lengths: Sequence[int]) -> Tensor:
    """Positions [T] that restart with every document.

    >>> positions_of([3, 2])
    tensor([0, 1, 2, 0, 1])
    """
    return torch.cat([torch.arange(n) for n in lengths])


def document_of(lengths: Sequence[int]) -> Tensor:
    """The number of the document that each token belongs to, [T].

    >>> document_of([3, 2])
    tensor([0, 0, 0, 1, 1])
    """
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def block_causal(lengths: Sequence[int]) -> Tensor:
    """A token attends to itself and to earlier tokens of its own document.

    >>> block_causal([2, 1]).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)

    Shape: [T, T], bool; row: the token that attends, column: the token attended to.
    """
    document, at = document_of(lengths), torch.arange(sum(lengths))
    return (document[:, None] == document) & (at[:, None] >= at)


def plain_causal(lengths: Sequence[int]) -> Tensor:
    """A token attends to every earlier token of the row, whatever its document."""
    at = torch.arange(sum(lengths))
    return at[:, None] >= at


def block_both_ways(lengths: Sequence[int]) -> Tensor:
    """A token attends to all of its own document, including the targets it must predict."""
    document = document_of(lengths)
    return document[:, None] == document


def block_off_by_one(lengths: Sequence[int]) -> Tensor:
    """Every block begins one token too early: it holds the last token of the document before."""
    at = torch.arange(sum(lengths))
    first = at - positions_of(lengths)
    return (at >= first[:, None] - 1) & (at <= at[:, None])


MASKS: dict[str, Callable[[Sequence[int]], Tensor]] = {
    "plain causal": plain_causal,
    "block causal": block_causal,
    "block, both ways": block_both_ways,
    "block, off by one": block_off_by_one,
}


def apart(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Labels beside their tokens: the first token of a document is never a target.

    >>> apart(torch.tensor([7, 8, 9, 5, 6]), [3, 2])
    tensor([-100,    8,    9, -100,    6])
    """
    return tokens.masked_fill(positions_of(lengths) == 0, IGNORE)


def across(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Every token is a target: the last of a document must predict the first of the next."""
    return tokens.clone()


def wrong_end(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """The last token of each document is ignored, forgetting that the loss shifts the labels."""
    return tokens.masked_fill(positions_of(lengths).roll(-1) == 0, IGNORE)


def both_ends(tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """The first and the last token are ignored: nothing crosses, and one good target of each document is lost."""
    return wrong_end(apart(tokens, lengths), lengths)


LABELS: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "first ignored": apart,
    "nothing ignored": across,
    "last ignored": wrong_end,
    "both ignored": both_ends,
}


# The model.


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn pairs of coordinates by angles that grow with the position.

    >>> rotate(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])

    Shapes: x [..., T, width], positions [T]. Source: Su et al. 2021, RoFormer, section 3.2.2, halves as pairs.
    """
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x.split(half, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Layer(nn.Module):
    """Attention under a mask, then a two-layer network, each added to the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.empty(3 * width, width))
        self.out = nn.Parameter(torch.empty(width, width))
        self.up = nn.Parameter(torch.empty(2 * width, width))
        self.down = nn.Parameter(torch.empty(width, 2 * width))

    def forward(self, x: Tensor, may_look: Tensor, turned: Tensor | None) -> Tensor:
        """Stream [..., T, width] in and out; `turned`: the positions, where queries and keys are rotated by them."""
        q, k, v = F.linear(norm(x), self.qkv).chunk(3, -1)
        if turned is not None:
            q, k = rotate(q, turned), rotate(k, turned)
        scores = (q @ k.mT / math.sqrt(x.shape[-1])).masked_fill(~may_look, -math.inf)
        x = x + F.linear(scores.softmax(-1) @ v, self.out)
        return x + F.linear(F.gelu(F.linear(norm(x), self.up)), self.down)


class Reader(nn.Module):
    """A language model that takes every token's position and an attention mask.

    >>> model = Reader(seed=0)
    >>> x = model.embedding[torch.tensor([7, 8, 9])]
    >>> model(x, positions_of([2, 1]), block_causal([2, 1])).shape
    torch.Size([3, 128])

    Two layers, one head each, pre-LN, float64, positions learned or rotary, the embedding shared with the output.
    """

    def __init__(self, *, seed: int = 0, rotary: bool = False, length: int = 120, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, width))
        self.position = None if rotary else nn.Parameter(torch.empty(length, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.double()
        draw(self, seed)

    def forward(self, x: Tensor, positions: Tensor, may_look: Tensor) -> Tensor:
        """Logits [..., T, V] of embedded tokens [..., T, width], positions [T], and attention mask [T, T]."""
        if self.position is not None:
            x = x + self.position[positions]
        for layer in self.layers:
            x = layer(x, may_look, positions if self.position is None else None)
        return F.linear(norm(x), self.embedding)


def texts(seed: int, documents: int, longest: int) -> list[Tensor]:
    """Documents of unequal length, their tokens alone.

    >>> [len(text) for text in texts(0, 3, 16)] == [int((row != IGNORE).sum()) for row in batch(0, 3, 16)[1]]
    True
    """
    tokens, labels = batch(seed, documents, longest)
    return [row[label != IGNORE] for row, label in zip(tokens, labels, strict=True)]


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of all targets of a row, in nat: the logits at t are judged by the label at t + 1."""
    return F.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORE, reduction="sum")


@dataclass(frozen=True, eq=False)
class Alone:
    """The documents one by one, each in its own row: a packed row must equal this."""

    logits: Tensor
    losses: tuple[float, ...]
    gradients: Tensor
    targets: int

    @property
    def right(self) -> Tensor:
        """The gradient of the mean over all targets."""
        return self.gradients.sum(0) / self.targets

    def tolerance(self, model: Reader) -> Tolerance:
        """Rounding: of the sum over targets, of a layer's sums, and of angles, which err by u times the position."""
        roundings = depth(model) + 3 * len(self.logits)
        return tolerance(list(self.gradients), count=self.targets, depth=roundings, dtype=torch.float64)


def one_by_one(model: Reader, documents: Sequence[Tensor]) -> Alone:
    """Each document in its own forward, with plain causal attention and positions from 0."""
    logits = [model(model.embedding[text], torch.arange(len(text)), plain_causal([len(text)])) for text in documents]
    losses = [summed_loss(each, text) for each, text in zip(logits, documents, strict=True)]
    gradients = torch.stack([gradient_of(model, loss) for loss in losses])
    targets = sum(len(text) - 1 for text in documents)
    return Alone(torch.cat(logits).detach(), tuple(loss.item() for loss in losses), gradients, targets)
