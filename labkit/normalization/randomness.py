"""Random layers, random images and recomputation: what should stay equal when the batch is cut differently."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit.declare import Choice, Range, Switch, quantity
from labkit.fit import Distance, distance, gradient_of
from labkit.images import ConvNet, Images, Seed, draw, split
from labkit.normalization.random_streams import (
    UNITS,
    Net,
    augment,
    augmentation,
    contributions,
    draw_keyed,
    draw_stream,
    dropout,
)
from labkit.normalization.sync_batchnorm import accumulated, one_batch, run
from labkit.rules import Microbatches
from labkit.tolerance import Tolerance, depth, tolerance
from labkit.wording import percent


def redraw(model: nn.Module, microbatches: Microbatches) -> None:
    """Every forward draws new dropout masks, in the order of the microbatches."""
    B = sum(len(labels) for _, labels in microbatches)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for images, labels in microbatches:
            loss = F.cross_entropy(model(images), labels, reduction="sum") / B
            loss.backward()


# One batch, and K microbatches of it.


@dataclass(frozen=True)
class Setting:
    """A net, B images with labels, the sizes of K microbatches, and the probability of each random change."""

    net: Net
    images: Tensor
    labels: Tensor
    sizes: list[int]
    probability: float
    seed: int
    aligned: bool

    def numbers(self, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The uniform numbers of one batch, and those of its microbatches."""
        B = len(self.labels)
        if self.aligned:
            return draw_keyed(B, widths, self.seed), draw_keyed(B, widths, self.seed)
        return draw_stream([B], widths, self.seed), draw_stream(self.sizes, widths, self.seed)


Met = tuple[Tensor, Tensor, Tensor, Tensor]


def by_dropout(s: Setting) -> Met:
    """Masks of one batch and of its microbatches; the contribution of each microbatch; and the correct gradient."""
    one, parts = (dropout(numbers, s.probability) for numbers in s.numbers(UNITS))
    gradients = contributions(s.net, s.images, s.labels, parts, s.sizes)
    right = contributions(s.net, s.images, s.labels, one, [len(one)])
    return one.sign(), parts.sign(), gradients, right[0]


def by_augmentation(s: Setting) -> Met:
    """The same for random images, with the changes to each in place of masks."""
    one, parts = (augmentation(numbers, s.probability) for numbers in s.numbers([1] * 5))
    whole = torch.ones(len(one), sum(UNITS))
    gradients = contributions(s.net, augment(s.images, parts), s.labels, whole, s.sizes)
    right = contributions(s.net, augment(s.images, one), s.labels, whole, [len(one)])
    return one, parts, gradients, right[0]


def by_recomputation(s: Setting) -> Met:
    """The same for masks of torch's own dropout, in the forward and in the recomputation that the backward makes."""
    masks: list[Tensor] = []

    def masked(images: Tensor) -> Tensor:
        masks.append(F.dropout(images.new_ones(len(images), sum(UNITS)), s.probability))
        logits: Tensor = s.net(images, masks[-1])
        return logits

    gradients = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(s.seed)
        for images, labels in zip(s.images.split(s.sizes), s.labels.split(s.sizes), strict=True):
            logits = checkpoint(masked, images, use_reentrant=False, preserve_rng_state=s.aligned)
            loss = F.cross_entropy(logits, labels, reduction="sum") / len(s.labels)
            gradients.append(gradient_of(s.net, loss))
    forward, again = torch.cat(masks[::2]), torch.cat(masks[1::2])
    right = contributions(s.net, s.images, s.labels, forward, [len(forward)])
    return forward.sign(), again.sign(), torch.stack(gradients), right[0]


SOURCES: dict[str, Callable[[Setting], Met]] = {
    "dropout": by_dropout,
    "augmentation": by_augmentation,
    "recomputation": by_recomputation,
}


@dataclass(frozen=True, eq=False)
class Randomness:
    """K microbatches beside one batch, from the same seed: the random numbers of each image."""

    source: str = quantity("what is random")
    aligned: bool = quantity("whether the numbers belong to the image, or recomputation restores the stream")
    one: Tensor = quantity("in one batch: units kept (1) or dropped (0), images × units; or flip, shift, brightness")
    parts: Tensor = quantity("the same in K microbatches; for recomputation `one` is forward, `parts` recomputed")
    differ: float = quantity("share of these entries that differ")
    gradient: Distance = quantity("the gradient of K microbatches, against the right one")
    tolerance: Tolerance = quantity("relative error of the gradient that rounding alone explains")

    @property
    def equal(self) -> bool:
        """Whether rounding explains the whole difference of the gradients."""
        return self.gradient.relative_error <= self.tolerance.value


def randomness(
    *,
    source: Annotated[
        str, Choice(("dropout", "augmentation", "recomputation"), help="random layers, random images, or masks redrawn")
    ] = "dropout",
    aligned: Annotated[
        bool, Switch(help="on: numbers keyed by the image; a recomputation restores the stream")
    ] = False,
    accumulation_steps: Annotated[
        int, Range(1, 16, unit="microbatches", help="K, microbatches of one optimizer step")
    ] = 4,
    probability: Annotated[float, Range(0, 0.9, help="of dropping a unit, and of each change of an image")] = 0.5,
    images: Images = 24,
    seed: Seed = 0,
) -> Randomness:
    """The same seed, another partition, other random numbers; keyed by the image, the same again.

    >>> randomness().equal, randomness(aligned=True).equal
    (False, True)

    For recomputation the correct gradient is that of the forward that ran, and the masks are torch's own, in
    torch.utils.checkpoint. float64. Raises LabError for more microbatches than images.
    """
    x, y = draw(seed, images)
    net, sizes = Net(seed), [len(labels) for _, labels in split(x, y, accumulation_steps)]
    one, parts, gradients, right = SOURCES[source](Setting(net, x, y, sizes, probability, seed, aligned))
    bound = tolerance(gradients, count=images, depth=depth(net), dtype=torch.float64, result=float(right.norm()))
    differ = (one != parts).double().mean().item()
    return Randomness(source, aligned, one, parts, differ, distance(gradients.sum(0), right), bound)


# What should be equal?

IMAGES = 24


@dataclass(frozen=True, eq=False)
class Targets:
    """How far the accumulated gradient is from the correct one, both averaged over more and more draws."""

    source: str = quantity("what is random")
    draws: Tensor = quantity("draws averaged over, doubling", "draws")
    difference: Tensor = quantity("‖mean g − mean G‖ / ‖mean G‖ over so many; NaN: not yet")
    expected: Tensor = quantity("what chance alone would leave: spread of single draws / √draws; NaN: not yet")
    done: int = quantity("draws made so far", "draws")

    @property
    def progress(self) -> float:
        """Share of the work that is done."""
        return self.done / int(self.draws[-1])

    @property
    def measured(self) -> int:
        """How many of the points are measured."""
        return int(self.difference.isfinite().sum())

    @property
    def falls(self) -> bool:
        """Whether the excess of the last point over chance, difference² − expected², is less than expected²."""
        if self.measured < 2:
            return False
        at = self.measured - 1
        return bool(self.difference[at] ** 2 < 2 * self.expected[at] ** 2)

    @property
    def verdict(self) -> str:
        """The outcome in two sentences."""
        if self.measured < 2:
            return "Not enough draws yet."
        at = self.measured - 1
        outcome = (
            "The same distribution: equal on average, never draw by draw."
            if self.falls
            else "Not even equal on average: a bias that no number of draws removes."
        )
        return (
            f"Averaged over {self.draws[at]} draws the gradients differ by {percent(float(self.difference[at]))}, "
            f"where chance alone would leave {percent(float(self.expected[at]))}. {outcome}"
        )


def targets(
    *,
    source: Annotated[
        str, Choice(("dropout", "batch norm"), help="masks drawn anew, or statistics of random microbatches")
    ] = "dropout",
    accumulation_steps: Annotated[
        int, Range(2, 12, unit="microbatches", help="K, microbatches of one optimizer step")
    ] = 4,
    draws: Annotated[int, Range(16, 512, log=True, unit="draws", help="draws to average over")] = 128,
    seed: Seed = 0,
) -> Iterator[Targets]:
    """What should be equal: the function, or its distribution? The accumulated and the correct gradient, averaged.

    >>> *_, last = targets(draws=64)
    >>> last.falls, last.done
    (True, 64)

    A generator of the result so far, one draw each. 24 images in float64: a net with two layers of dropout, masks
    unaligned; or a ConvNet with BatchNorm, over random partitions. Chance: the mean of R independent draws of variance
    V has variance V / R; V is estimated from the draws themselves.
    """
    at = [*(count for count in (4, 8, 16, 32, 64, 128, 256) if count < draws), draws]
    counts, apart = torch.tensor(at), torch.full((len(at),), math.nan, dtype=torch.float64)
    off, right, squares = torch.zeros(1), torch.zeros(1), 0.0
    pairs = {"dropout": masks_anew, "batch norm": partitions}[source](accumulation_steps, seed)
    for done, (g, G) in zip(range(1, draws + 1), pairs, strict=False):
        off, right, squares = off + (g - G), right + G, squares + float((g - G).square().sum())
        if done in at:
            apart[at.index(done)] = off.norm() / done
        spread = (squares - float(off.square().sum()) / done) / (done - 1) if done > 1 else math.nan
        scale = right.norm() / done
        yield Targets(source, counts, apart / scale, (spread / counts.double()).sqrt() / scale, done)


def masks_anew(K: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Accumulated and correct gradient under dropout of one half, another seed each time."""
    x, y = draw(seed, IMAGES)
    net, sizes = Net(seed), [len(labels) for _, labels in split(x, y, K)]
    for number in itertools.count(1):
        _, _, gradients, right = by_dropout(Setting(net, x, y, sizes, 0.5, 10_000 * number + seed, aligned=False))
        yield gradients.sum(0), right


def partitions(K: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Accumulated and correct gradient of a ConvNet with BatchNorm, the images in another random order each time."""
    x, y = draw(seed, IMAGES)
    model, generator = ConvNet(seed), torch.Generator().manual_seed(seed)
    right = run(one_batch, model, [(x, y)]).gradient
    while True:
        order = torch.randperm(IMAGES, generator=generator)
        yield run(accumulated, model, split(x[order], y[order], K)).gradient, right
