"""The loops of the BatchNorm lab, and statistics that microbatches or ranks share, all in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.declare import Choice, Range, quantity
from labkit.errors import LabError
from labkit.fit import Distance, distance, flat, gradient
from labkit.images import SIZE, Composition, ConvNet, Depth, Images, Seed, grouped, moments
from labkit.rules import Microbatches
from labkit.tolerance import Tolerance, tolerance
from labkit.wording import show

Share = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def pooled(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the union of groups, from theirs.

    >>> pooled(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 1.0]), torch.tensor([3, 1]))
    (tensor(1.), tensor(4.))

    The variance is that within the groups plus that between their means; both are biased, divided by the count.
    Shapes: means and variances [R, ...], counts [R], results [...]. Source: the law of total variance.
    """
    share = (counts.to(means) / counts.sum()).reshape(-1, *[1] * (means.dim() - 1))
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean) ** 2)).sum(0)


def own(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Every part normalises by its own statistics."""
    return means, variances


def rank_means(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """All parts by the same statistics, as if every part had equally many images."""
    return weighted(means, variances, torch.ones_like(counts))


def weighted(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """All parts by the statistics of all images."""
    mean, variance = pooled(means, variances, counts)
    return mean.expand_as(means), variance.expand_as(variances)


METHODS: dict[str, Share] = {"own": own, "rank means": rank_means, "weighted": weighted}

Method = Annotated[
    str, Choice(tuple(METHODS), help="each rank's own statistics, their plain mean, or weighted by images")
]


def lockstep(model: ConvNet, parts: Sequence[Tensor], share: Share) -> Tensor:
    """Logits of all parts, in step at every normalisation, where `share` computes the statistics of each."""
    counts = torch.tensor([len(x) for x in parts])
    for at, norm in enumerate(model.norms):
        parts = [model.convolve(at, x) for x in parts]
        means, variances = (torch.stack(each) for each in zip(*map(moments, parts), strict=True))
        inputs = zip(parts, *share(means, variances, counts), strict=True)
        parts = [normalise(norm, x, mean, variance).relu() for x, mean, variance in inputs]
    return torch.cat([x.mean((2, 3)) for x in parts]) @ model.head.T


def normalise(norm: Any, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The output of a BatchNorm for x [b, C, h, w] with these statistics [C]; gradient flows through them."""
    bias: Tensor = norm.bias
    scale: Tensor = norm.weight / (variance + norm.eps).sqrt()
    return (x - mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]


@torch.no_grad()
def first_moments(model: ConvNet, parts: Microbatches) -> tuple[Tensor, Tensor]:
    """Mean and biased variance that each part gives at the first normalisation, [R, C]."""
    pairs = [moments(model.convolve(0, images)) for images, _ in parts]
    means, variances = (torch.stack(each) for each in zip(*pairs, strict=True))
    return means, variances


# The loops: B images, every loss divided by that B.


def accumulated(model: nn.Module, microbatches: Microbatches) -> None:
    """Perfectly weighted accumulation: a layer that looks at the batch sees one microbatch at a time."""
    B = sum(len(labels) for _, labels in microbatches)
    for images, labels in microbatches:
        loss = F.cross_entropy(model(images), labels, reduction="sum") / B
        loss.backward()


def one_batch(model: nn.Module, microbatches: Microbatches) -> None:
    """The same images in one physical batch."""
    images, labels = (torch.cat(each) for each in zip(*microbatches, strict=True))
    loss = F.cross_entropy(model(images), labels, reduction="sum") / len(labels)
    loss.backward()


def in_lockstep(model: ConvNet, microbatches: Microbatches, share: Share = weighted) -> None:
    """All microbatches pass the layers together, and all stay in memory until the backward."""
    images, labels = zip(*microbatches, strict=True)
    logits = lockstep(model, images, share)
    loss = F.cross_entropy(logits, torch.cat(labels), reduction="sum") / len(logits)
    loss.backward()


@dataclass(frozen=True, eq=False)
class Run:
    """The result of one loop."""

    gradient: Tensor
    parts: Tensor
    logits: Tensor


def run(loop: Callable[..., None], model: nn.Module, microbatches: Microbatches) -> Run:
    """Run a loop from clear gradients; `parts`, [K, P], are the contributions of each backward; logits [B, 6]."""
    before: list[Tensor] = []
    logits: list[Tensor] = []
    hooks = (
        model.register_forward_pre_hook(lambda *_: before.append(flat(gradient(model)))),
        model.register_forward_hook(lambda module, inputs, output: logits.append(output.detach())),
    )
    model.zero_grad()
    loop(model, microbatches)
    for hook in hooks:
        hook.remove()
    g = flat(gradient(model))
    parts = torch.stack([*before, g]).diff(dim=0) if before else g[None]
    return Run(g, parts, torch.cat(logits) if logits else g.new_empty(0))


def bound(model: ConvNet, parts: Tensor, images: int, right: float) -> Tolerance:
    """Rounding between two ways to sum the same: places × images in every kernel's gradient and every statistic."""
    values = images * SIZE * SIZE
    fan_in = sum(p[0].numel() if p.dim() > 1 else 1 for p in model.parameters())
    behind = 2 * (fan_in + len(model.norms) * values)
    return tolerance(parts, count=values, depth=behind, dtype=torch.float64, result=right)


@dataclass(frozen=True)
class Ranks:
    """Data-parallel ranks of uneven size, beside one physical batch."""

    method: str = quantity("where the statistics come from")
    counts: tuple[int, ...] = quantity("images of each rank", "images")
    channel: int = quantity("channel of the first normalisation whose means lie furthest apart; those below are its")
    rank_means: tuple[float, ...] = quantity("mean of each rank")
    rank_variances: tuple[float, ...] = quantity("biased variance of each rank")
    mean: float = quantity("mean that the first rank normalises by")
    variance: float = quantity("variance that the first rank normalises by")
    right_mean: float = quantity("mean of all images")
    right_variance: float = quantity("biased variance of all images")
    gradient: Distance = quantity("the summed gradient of the ranks, against that of one batch")
    tolerance: Tolerance = quantity("relative error of the gradient that rounding alone explains")

    @property
    def equal(self) -> bool:
        """Whether rounding explains the whole difference of the gradients."""
        return self.gradient.relative_error <= self.tolerance.value


def ranks(
    *,
    method: Method = "rank means",
    ranks: Annotated[int, Range(2, 4, unit="ranks", help="data-parallel ranks, all in this process")] = 2,
    images: Images = 24,
    first_share: Annotated[float, Range(0.05, 0.9, help="share of the images that the first rank has")] = 0.25,
    composition: Composition = "sorted",
    depth: Depth = 2,
    seed: Seed = 0,
) -> Ranks:
    """Data-parallel ranks whose BatchNorms exchange statistics, or do not; the loss is weighted perfectly.

    >>> [ranks(method=method).equal for method in METHODS]
    [False, False, True]

    All ranks are computed in this one process, in lockstep; the other ranks share the rest of the images evenly.
    float64. Raises LabError where a rank would have no image.
    """
    counts, model = _counts(images, first_share, ranks), ConvNet(seed, "batch", depth)
    batch, labels = grouped(seed, images, composition)
    parts = list(zip(batch.split(counts), labels.split(counts), strict=True))
    window = run(functools.partial(in_lockstep, share=METHODS[method]), model, parts)
    right = run(one_batch, model, parts)
    means, variances = first_moments(model, parts)
    channel = int((means.amax(0) - means.amin(0)).argmax())
    mean, variance = METHODS[method](means, variances, torch.tensor(counts))
    right_means, right_variances = first_moments(model, [(batch, labels)])
    return Ranks(
        method,
        tuple(counts),
        channel,
        tuple(means[:, channel].tolist()),
        tuple(variances[:, channel].tolist()),
        mean[0, channel].item(),
        variance[0, channel].item(),
        right_means[0, channel].item(),
        right_variances[0, channel].item(),
        gradient=distance(window.gradient, right.gradient),
        tolerance=bound(model, right.parts, images, float(right.gradient.norm())),
    )


def _counts(images: int, first_share: float, ranks: int) -> list[int]:
    first = round(first_share * images)
    if not 1 <= first <= images - ranks + 1:
        near = max(1, min(images - ranks + 1, first)) / images
        uneven = f"{first} of {images} images, and {images - first} to the other {ranks - 1} ranks"
        raise LabError(f"first share = {show(first_share)} gives it {uneven}, none may be empty: try {near:.4f}")
    rest = torch.arange(images - first).tensor_split(ranks - 1)
    return [first, *map(len, rest)]
