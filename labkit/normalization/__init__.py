"""BatchNorm depends on the batch: how accumulation changes it, and the remedies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.declare import Choice, Range, quantity
from labkit.fit import Distance, distance, per_layer
from labkit.gradients import Gradients, composed
from labkit.images import NORMS, Composition, ConvNet, Depth, Images, Seed, grouped, split
from labkit.normalization.running_statistics import GroupVariance as GroupVariance
from labkit.normalization.running_statistics import Momentum
from labkit.normalization.running_statistics import Padding as Padding
from labkit.normalization.running_statistics import Running as Running
from labkit.normalization.running_statistics import effective_momentum as effective_momentum
from labkit.normalization.running_statistics import group_variance as group_variance
from labkit.normalization.running_statistics import padding as padding
from labkit.normalization.running_statistics import running as running
from labkit.normalization.sync_batchnorm import METHODS as METHODS
from labkit.normalization.sync_batchnorm import Ranks as Ranks
from labkit.normalization.sync_batchnorm import accumulated, bound, first_moments, in_lockstep, one_batch, run
from labkit.normalization.sync_batchnorm import pooled as pooled
from labkit.normalization.sync_batchnorm import ranks as ranks
from labkit.tolerance import Tolerance

Norm = Annotated[str, Choice(NORMS, help="BatchNorm, GroupNorm, LayerNorm, or BatchNorm with frozen statistics")]
Steps = Annotated[int, Range(1, 16, unit="microbatches", help="K, microbatches of one optimizer step")]


@dataclass(frozen=True, eq=False)
class Statistics:
    """K microbatches beside one physical batch of the same images, from the same weights."""

    norm: str = quantity("the normalisation")
    composition: str = quantity("how the images are grouped")
    images: Tensor = quantity("the images in the order grouped, B × 16 × 16, 0 is black, 1 white")
    labels: Tensor = quantity("class of each image")
    microbatch: Tensor = quantity("which microbatch each image stands in")
    means: Tensor = quantity("mean that each microbatch gives at the first normalisation, K × channels")
    variances: Tensor = quantity("biased variance that each microbatch gives there, K × channels")
    mean: Tensor = quantity("mean that the one batch gives there, each channel")
    variance: Tensor = quantity("biased variance that the one batch gives there, each channel")
    outputs: float = quantity("‖logits − right‖ / ‖right‖, the right ones of one batch")
    loss: float = quantity("mean loss of the K microbatches", "nat per image")
    right_loss: float = quantity("mean loss of the one batch", "nat per image")
    gradient: Distance = quantity("the gradient of the K microbatches, against that of one batch")
    per_layer: Mapping[str, Distance] = quantity("the same distance for every parameter tensor")
    running_mean: float = quantity("relative error of all running means after the window; NaN: none are kept")
    running_variance: float = quantity("relative error of all running variances after it; NaN: none are kept")
    tolerance: Tolerance = quantity("relative error of the gradient that rounding alone explains")
    gradients: Gradients = quantity("both gradients, and what each part contributes to them")

    @property
    def equal(self) -> bool:
        """Whether rounding explains the whole difference of the gradients."""
        return self.gradient.relative_error <= self.tolerance.value


def statistics(
    *,
    norm: Norm = "batch",
    composition: Composition = "shuffled",
    accumulation_steps: Steps = 4,
    images: Images = 32,
    momentum: Momentum = 0.1,
    depth: Depth = 2,
    seed: Seed = 0,
) -> Statistics:
    """K microbatches beside one physical batch: the same images, weights and weighting, other statistics.

    >>> statistics(norm="batch").equal, statistics(norm="group").equal
    (False, True)

    float64. Raises LabError for more microbatches than images.
    """
    batch, labels = grouped(seed, images, composition)
    microbatches = split(batch, labels, accumulation_steps)
    model, large = (ConvNet(seed, norm, depth, momentum) for _ in range(2))
    window, right = run(accumulated, model, microbatches), run(one_batch, large, microbatches)
    mean, variance = first_moments(large, [(batch, labels)])
    rounding = bound(large, window.parts, images, float(right.gradient.norm()))
    return Statistics(
        norm,
        composition,
        batch[:, 0],
        labels,
        torch.repeat_interleave(torch.tensor([len(each) for _, each in microbatches])),
        *first_moments(large, microbatches),
        mean=mean[0],
        variance=variance[0],
        outputs=distance(window.logits, right.logits).relative_error,
        loss=F.cross_entropy(window.logits, labels).item(),
        right_loss=F.cross_entropy(right.logits, labels).item(),
        gradient=distance(window.gradient, right.gradient),
        per_layer=per_layer(model, window.gradient, right.gradient),
        running_mean=_kept("running_mean", model, large),
        running_variance=_kept("running_var", model, large),
        tolerance=rounding,
        gradients=composed(
            window.gradient,
            window.parts,
            right.gradient[None],
            [f"{len(each)} images" for _, each in microbatches],
            rounding.value,
            model=large,
            names=("one batch", f"{len(microbatches)} microbatches"),
        ),
    )


def _kept(name: str, model: ConvNet, large: ConvNet) -> float:
    """Relative error of the running statistics of all BatchNorms, NaN where none updates them."""
    if not all(type(norm) is nn.BatchNorm2d for norm in model.norms):
        return math.nan
    small, right = (torch.cat([getattr(norm, name) for norm in each.norms]) for each in (model, large))
    return distance(small, right).relative_error


@dataclass(frozen=True)
class Remedy:
    """One way to combine normalisation with accumulation."""

    name: str = quantity("what normalises")
    relative_error: float = quantity("‖g − G‖ / ‖G‖, G of the same network in one physical batch")
    tolerance: float = quantity("relative error that rounding alone explains")
    equal: bool = quantity("whether rounding explains the difference")
    cost: str = quantity("what it costs")


@dataclass(frozen=True)
class Remedies:
    """Every remedy on the same images."""

    rows: tuple[Remedy, ...] = quantity("the remedies, the fault itself first")
    gradients: Gradients = quantity("the one batch, and its statistics held constant")


COSTS = {
    "microbatch statistics": "nothing, and it is not the one batch",
    "batch statistics held constant": "a forward pass of the whole window before; no gradient flows through them",
    "synchronised": "the whole window in memory at once; across ranks, an exchange at every layer, there and back",
    "frozen": "statistics of other images, that must be good before the training begins",
    "group": "another network: chosen before the training, never in the middle of it",
    "layer": "another network: chosen before the training, never in the middle of it",
}


def remedies(
    *,
    composition: Composition = "shuffled",
    accumulation_steps: Steps = 4,
    images: Images = 24,
    depth: Depth = 2,
    seed: Seed = 0,
) -> Remedies:
    """Remedies for microbatch statistics: the gradient of K microbatches against that of one batch.

    >>> [row.name for row in remedies().rows if row.equal]
    ['synchronised', 'frozen', 'group', 'layer']

    Each against the same network in one physical batch. Statistics held constant give every image the correct
    output and still a different gradient. float64. Raises LabError for more microbatches than images.
    """
    microbatches = split(*grouped(seed, images, composition), accumulation_steps)
    nets = {norm: ConvNet(seed, norm, depth) for norm in NORMS}
    constant = ConvNet(seed, "frozen", depth)
    constant.calibrate(torch.cat([each for each, _ in microbatches]))
    loops: dict[str, tuple[Callable[..., None], ConvNet, str]] = {
        "microbatch statistics": (accumulated, nets["batch"], "batch"),
        "batch statistics held constant": (accumulated, constant, "batch"),
        "synchronised": (in_lockstep, nets["batch"], "batch"),
        **{norm: (accumulated, nets[norm], norm) for norm in ("frozen", "group", "layer")},
    }
    right = {norm: run(one_batch, net, microbatches).gradient for norm, net in nets.items()}
    rows, windows = [], {}
    for name, (loop, net, norm) in loops.items():
        window = run(loop, net, microbatches)
        error = distance(window.gradient, right[norm]).relative_error
        limit = bound(net, window.parts, images, float(right[norm].norm())).value
        rows.append(Remedy(name, error, limit, error <= limit, COSTS[name]))
        windows[name] = window
    held, labels = windows["batch statistics held constant"], [f"{len(each)} images" for _, each in microbatches]
    names = "one batch", "its statistics held constant"
    both = composed(
        held.gradient, held.parts, right["batch"][None], labels, rows[1].tolerance, model=constant, names=names
    )
    return Remedies(tuple(rows), both)
