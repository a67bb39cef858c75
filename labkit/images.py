"""Made images, no download: six shapes in grey, the ways to group them, and the small net that tells them apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.declare import Choice, Range
from labkit.errors import LabError

SIZE = 16
SHADES = 0.04  # standard deviation of the noise
WIDTH = 8  # channels of every convolution
COMPOSITIONS = ("shuffled", "sorted")
NORMS = ("batch", "group", "layer", "frozen")

Images = Annotated[int, Range(8, 64, unit="images", help="B, images of one optimizer step")]
Composition = Annotated[str, Choice(COMPOSITIONS, help="in random order, or all of one class together")]
Depth = Annotated[int, Range(1, 4, unit="layers", help="convolutions, each followed by a normalisation")]
Seed = Annotated[int, Range(0, 9999, help="draws the images and the model's weights")]


# How far each place (u, v), seen from the middle, lies outside the shape of radius r: negative is inside.


def disc(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """A filled circle."""
    return u.hypot(v) - r


def ring(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """The rim of a circle."""
    return (u.hypot(v) - r).abs() - 0.7


def cross(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """One upright and one level beam."""
    return torch.maximum(square(u, v, r), torch.minimum(u.abs(), v.abs()) - 1)


def bars(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """Upright stripes, one every 4."""
    return torch.maximum(square(u, v, r), ((u - r).remainder(4) - 2).abs() - 1.3)


def frame(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """The rim of a square."""
    return square(u, v, r).abs() - 0.8


def checks(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """Every other field of a board, 3 wide."""
    odd = (u.div(3).floor() + v.div(3).floor()).remainder(2)
    return torch.maximum(square(u, v, r), 1 - 2 * odd)


def square(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """The square that bars and checks are cut from."""
    return torch.maximum(u.abs(), v.abs()) - r


SHAPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    each.__name__: each for each in (disc, ring, cross, bars, frame, checks)
}
CLASSES = tuple(SHAPES)


def draw(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Images of one shape each, and which shape it is.

    >>> images, labels = draw(0, 12)
    >>> images.shape, labels.bincount().tolist()
    (torch.Size([12, 1, 16, 16]), [2, 2, 2, 2, 2, 2])

    Place, radius, brightness and noise are random, and the ground is darker from class to class, so that classes
    differ in their mean. The classes come equally often up to the remainder, in random order.
    Shapes: images [count, 1, 16, 16], float64, from 0 (black) to 1; labels [count], int64, an index into CLASSES.
    Raises LabError for a count below 1.
    """
    if count < 1:
        raise LabError(f"count = {count} images is none: try 1")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randperm(count, generator=generator) % len(CLASSES)
    across, down, size, light = torch.rand(4, count, 1, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, SIZE, SIZE, generator=generator, dtype=torch.float64)
    place = torch.arange(SIZE, dtype=torch.float64) + 0.5
    u, v, r = place - 6.5 - 3 * across, place[:, None] - 6.5 - 3 * down, 4.5 + 1.5 * size
    outside = torch.empty_like(noise)
    for label, shape in enumerate(SHAPES.values()):
        own = labels == label
        outside[own] = shape(*torch.broadcast_tensors(u[own], v[own], r[own]))
    ground = 0.3 - 0.05 * labels[:, None, None]  # each class has its own brightness
    images = ground + (0.35 + 0.3 * light) * (0.5 - outside).clamp(0, 1) + SHADES * noise
    return images.clamp(0, 1)[:, None], labels


def grouped(seed: int, count: int, composition: str) -> tuple[Tensor, Tensor]:
    """The same images as `draw`, in its random order ("shuffled") or by class ("sorted").

    >>> grouped(0, 8, "sorted")[1].tolist()
    [0, 0, 1, 1, 2, 3, 4, 5]

    Shapes as in `draw`. Raises LabError for a count below 1, or another composition.
    """
    Choice(COMPOSITIONS).check("composition", composition, str)
    images, labels = draw(seed, count)
    order = labels.argsort(stable=True) if composition == "sorted" else torch.arange(count)
    return images[order], labels[order]


def split(images: Tensor, labels: Tensor, accumulation_steps: int) -> list[tuple[Tensor, Tensor]]:
    """A batch as K microbatches, in order; where K does not divide it, the first hold one image more.

    >>> [len(labels) for _, labels in split(*draw(0, 8), 3)]
    [3, 3, 2]

    Raises LabError for more microbatches than images, or none.
    """
    if not 1 <= accumulation_steps <= len(labels):
        near = max(1, min(len(labels), accumulation_steps))
        allowed = f"outside 1 … {len(labels)}, the number of images"
        raise LabError(f"accumulation steps = {accumulation_steps} is {allowed}: try {near}")
    return list(zip(images.tensor_split(accumulation_steps), labels.tensor_split(accumulation_steps), strict=True))


class Frozen(nn.BatchNorm2d):
    """BatchNorm that normalises by its running statistics and never updates them; weight and bias are trained."""

    def forward(self, input: Tensor) -> Tensor:
        """Shape [b, C, h, w] in and out."""
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class ConvNet(nn.Module):
    """Convolution, normalisation and relu, `depth` times; the mean over places; six logits.

    >>> ConvNet(seed=0, norm="batch", depth=2)(draw(0, 5)[0]).shape
    torch.Size([5, 6])

    float64. The first convolution keeps 16 × 16 places, each later one halves both sides. Frozen statistics are
    those of 64 other images. Every weight comes from a generator of its own seed. Raises LabError for another norm.
    """

    def __init__(self, seed: int, norm: str = "batch", depth: int = 2, momentum: float = 0.1) -> None:
        super().__init__()
        Choice(NORMS).check("norm", norm, str)
        generator = torch.Generator().manual_seed(seed)
        self.kernels = nn.ParameterList(_drawn((WIDTH, WIDTH if at else 1, 3, 3), generator) for at in range(depth))
        self.norms = nn.ModuleList(_norm(norm, momentum) for _ in range(depth))
        self.head = _drawn((len(CLASSES), WIDTH), generator)
        if norm == "frozen":
            self.calibrate(draw(10_000 + seed, 64)[0])

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, 6] of images [b, 1, 16, 16]."""
        x = images
        for at, norm in enumerate(self.norms):
            x = norm(self.convolve(at, x)).relu()
        return x.mean((2, 3)) @ self.head.T

    def convolve(self, at: int, x: Tensor) -> Tensor:
        """The input of the normalisation of layer `at`."""
        return F.conv2d(x, self.kernels[at], stride=2 if at else 1, padding=1)

    @torch.no_grad()
    def calibrate(self, images: Tensor) -> None:
        """Set every running statistic to that of these images, in one forward pass."""
        x = images
        for at, norm in enumerate(self.norms):
            x = self.convolve(at, x)
            norm.running_mean, norm.running_var = moments(x)
            x = norm(x).relu()


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> nn.Parameter:
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return nn.Parameter(values / math.sqrt(values[0].numel()))


def _norm(norm: str, momentum: float) -> nn.Module:
    if norm in ("batch", "frozen"):
        kind = nn.BatchNorm2d if norm == "batch" else Frozen
        return kind(WIDTH, momentum=momentum, dtype=torch.float64)
    return nn.GroupNorm(4 if norm == "group" else 1, WIDTH, dtype=torch.float64)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel, by which a BatchNorm normalises.

    >>> moments(torch.tensor([1.0, 3.0]).reshape(2, 1, 1, 1))
    (tensor([2.]), tensor([1.]))

    Shapes: [b, C, h, w] into twice [C].
    """
    return x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
