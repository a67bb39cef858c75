"""Random numbers by microbatch or by image: a small net with dropout, image augmentation, and their streams."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.fit import gradient_of
from labkit.images import CLASSES, SIZE

UNITS = (24, 12)  # of the two hidden layers, both followed by dropout


class Net(nn.Module):
    """Two hidden layers of relu units, each multiplied by a dropout mask.

    >>> Net(seed=0)(torch.zeros(5, 1, 16, 16, dtype=torch.float64), torch.ones(5, 36)).shape
    torch.Size([5, 6])

    float64; weights from a generator of its own seed. The bias of the logits leaves a gradient even where every unit
    is dropped.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        widths = (SIZE * SIZE, *UNITS, len(CLASSES))
        self.weights = nn.ParameterList(
            torch.randn(after, before, generator=generator, dtype=torch.float64) / math.sqrt(before)
            for before, after in itertools.pairwise(widths)
        )
        self.bias = nn.Parameter(torch.randn(len(CLASSES), generator=generator, dtype=torch.float64))

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        """Logits [b, 6] of images [b, 1, 16, 16]; the masks of both layers stand side by side, [b, 36]."""
        first, second, head = self.weights
        x = ((images.flatten(1) - 0.5) @ first.T).relu() * masks[:, : UNITS[0]]
        x = (x @ second.T).relu() * masks[:, UNITS[0] :]
        logits: Tensor = x @ head.T + self.bias
        return logits


def draw_stream(counts: Sequence[int], widths: Sequence[int], seed: int) -> Tensor:
    """Uniform numbers [B, Σ widths] from one stream, in the order in which microbatches of these sizes draw them.

    >>> draw_stream([2], [1, 1], 0).flatten()[[0, 2, 1, 3]].equal(draw_stream([4], [1], 0).flatten())
    True

    A forward draws layer by layer, for all its images at once: another partition gives an image other numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [[torch.rand(b, width, generator=generator, dtype=torch.float64) for width in widths] for b in counts]
    return torch.cat([torch.cat(row, 1) for row in rows])


def draw_keyed(images: int, widths: Sequence[int], seed: int) -> Tensor:
    """The same from one stream per image, keyed by its index: no partition changes them."""
    return torch.cat([draw_stream([1], widths, 10_000 * (index + 1) + seed) for index in range(images)])


def dropout(numbers: Tensor, probability: float) -> Tensor:
    """Masks: 0 where a unit is dropped, else 1 / (1 − p)."""
    return (numbers >= probability).double() / (1 - probability)


def augmentation(numbers: Tensor, probability: float) -> Tensor:
    """Flip (0 or 1), shift in pixels (−2 … 2) and brightness (0.5 … 1.5) of each image, [b, 3]; numbers [b, 5]."""
    flip, moved, shift, lit, light = numbers.T
    shift = torch.where(moved < probability, (5 * shift).floor() - 2, 0.0)
    light = torch.where(lit < probability, 0.5 + light, 1.0)
    return torch.stack([(flip < probability).double(), shift, light], 1)


def augment(images: Tensor, changes: Tensor) -> Tensor:
    """The images, each flipped, shifted sideways and lit as chosen; shapes [b, 1, 16, 16] and [b, 3]."""
    rows = []
    for image, (flip, shift, light) in zip(images, changes.tolist(), strict=True):
        turned = image.flip(2) if flip else image
        rows.append(light * turned.roll(int(shift), 2))
    return torch.stack(rows)


def contributions(net: Net, images: Tensor, labels: Tensor, masks: Tensor, sizes: list[int]) -> Tensor:
    """The contribution of each microbatch to the gradient of the mean loss, [K, P]."""
    rows = []
    for x, y, mask in zip(images.split(sizes), labels.split(sizes), masks.split(sizes), strict=True):
        loss = F.cross_entropy(net(x, mask), y, reduction="sum") / len(labels)
        rows.append(gradient_of(net, loss))
    return torch.stack(rows)
