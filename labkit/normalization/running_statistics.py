"""The state and the inputs of a BatchNorm: running statistics, the variance of small groups, and padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from labkit.declare import Choice, Range, quantity
from labkit.errors import LabError
from labkit.images import draw
from labkit.tolerance import Tolerance, tolerance

VALUES = 128  # of one update, so that 32 microbatches hold 4 each

Momentum = Annotated[float, Range(0.01, 1, log=True, help="m, the weight of the new in a running statistic")]


def effective_momentum(momentum: float, accumulation: int) -> float:
    """How much of a running statistic one update of K microbatches replaces: 1 − (1 − m)^K.

    >>> round(effective_momentum(0.1, 8), 2)
    0.57

    Source: K times r ← (1 − m) r + m x leaves (1 − m)^K of r.
    """
    return 1 - (1 - momentum) ** accumulation


@dataclass(frozen=True, eq=False)
class Running:
    """A BatchNorm that is called K times an update, beside one that is called once."""

    updates: Tensor = quantity("updates made, 0 … U", "updates")
    right: Tensor = quantity("running mean of the layer that sees the whole batch once, measured")
    wrong: Tensor = quantity("running mean of the layer that sees K microbatches, measured")
    right_formula: Tensor = quantity("the same by Σ m (1 − m)^age · mean of the batch")
    wrong_formula: Tensor = quantity("the same by Σ m (1 − m)^age · mean of the microbatch, age in microbatches")
    momentum: float = quantity("m, share that one call replaces")
    effective_momentum: float = quantity("1 − (1 − m)^K, share that one update replaces")
    measured_momentum: float = quantity("share that one update replaced: two layers, one starting 1 higher")
    right_variance: float = quantity("running variance after the last update, whole batch")
    wrong_variance: float = quantity("running variance after the last update, K microbatches")
    tolerance: Tolerance = quantity("relative difference of run and formula that rounding alone explains")


def running(
    *,
    momentum: Momentum = 0.1,
    accumulation_steps: Annotated[
        int, Range(1, 32, unit="microbatches", help="K, microbatches of one optimizer step")
    ] = 8,
    updates: Annotated[int, Range(1, 100, unit="updates", help="optimizer steps")] = 20,
    seed: Annotated[int, Range(0, 9999, help="draws the data")] = 0,
) -> Running:
    """The running mean of a BatchNorm, updated K times a step, on its way from 0 to the data's mean of 3.

    >>> momentum = running()
    >>> round(momentum.effective_momentum, 2), round(momentum.measured_momentum, 2)
    (0.57, 0.57)

    A torch BatchNorm1d in float64, 128 values an update, drawn from N(3, 2²).
    """
    m, K = momentum, accumulation_steps
    generator = torch.Generator().manual_seed(seed)
    data = 3 + 2 * torch.randn(updates, VALUES, 1, generator=generator, dtype=torch.float64)
    right, wrong, higher = (nn.BatchNorm1d(1, momentum=m, affine=False, dtype=torch.float64) for _ in range(3))
    higher.load_state_dict({**higher.state_dict(), "running_mean": torch.ones(1)})
    one, parts = list(data), [part for batch in data for part in batch.tensor_split(K)]
    (right_mean, right_variance), (wrong_mean, wrong_variance) = kept(right, one), kept(wrong, parts)
    higher_mean, _ = kept(higher, parts[:K])
    terms = _decay(m, len(parts), every=K) * torch.stack([part.mean() for part in parts])
    wrong_formula = terms.sum(1)
    return Running(
        torch.arange(updates + 1),
        right_mean,
        wrong_mean[::K],
        right_formula=_decay(m, updates) @ data.mean((1, 2)),
        wrong_formula=wrong_formula,
        momentum=m,
        effective_momentum=effective_momentum(m, K),
        measured_momentum=1 - float(higher_mean[-1] - wrong_mean[K]),
        right_variance=right_variance,
        wrong_variance=wrong_variance,
        tolerance=_bound(terms, float(wrong_formula.norm())),
    )


def _bound(terms: Tensor, result: float) -> Tolerance:
    """Rounding in n calls, terms [U + 1, n]: three roundings a call, and those of its mean."""
    calls = terms.shape[1]
    depth = 2 * calls + VALUES
    return tolerance([terms.abs().sum(1)], count=calls, depth=depth, dtype=torch.float64, result=result)


def kept(layer: nn.BatchNorm1d, parts: list[Tensor]) -> tuple[Tensor, float]:
    """The running mean before the first of these parts and after each of them, and the running variance at the end."""
    mean, variance = layer.running_mean, layer.running_var
    assert mean is not None and variance is not None
    means = [mean.item()]
    for part in parts:
        layer(part)
        means.append(mean.item())
    return torch.tensor(means, dtype=torch.float64), variance.item()


def _decay(m: float, calls: int, every: int = 1) -> Tensor:
    """Weight of each call in the running mean after 0, K, 2 K … calls: m (1 − m)^age, 0 for those to come."""
    age = torch.arange(0, calls + 1, every)[:, None] - 1 - torch.arange(calls)
    return torch.where(age >= 0, m * (1 - m) ** age.clamp(min=0).double(), 0.0)


@dataclass(frozen=True, eq=False)
class GroupVariance:
    """Variance of the microbatches of many random partitions, by their size."""

    sizes: Tensor = quantity("b, values of one microbatch", "values")
    biased: Tensor = quantity("mean of the biased variance, by which the layer normalises")
    biased_error: Tensor = quantity("standard error of that mean over the draws")
    predicted: Tensor = quantity("(b − 1)/b · S²")
    unbiased: Tensor = quantity("mean of the unbiased variance, which the running statistic is given")
    sorted: Tensor = quantity("mean of the biased variance where microbatches are cut from the images sorted by class")
    whole: float = quantity("S², unbiased variance of all values")


def group_variance(
    *,
    images: Annotated[int, Range(8, 256, unit="images", help="images, one value each: its mean brightness")] = 64,
    draws: Annotated[int, Range(10, 400, unit="draws", help="random partitions")] = 100,
    seed: Annotated[int, Range(0, 9999, help="draws the images and the partitions")] = 0,
) -> GroupVariance:
    """A small group varies less than all: by (b − 1)/b on average over random partitions.

    >>> variance = group_variance()
    >>> (variance.biased / variance.whole)[:3], (variance.predicted / variance.whole)[:3]
    (tensor([0.4969, 0.7504, 0.8773], dtype=torch.float64), tensor([0.5000, 0.7500, 0.8750], dtype=torch.float64))

    One value an image, its mean brightness. Where b does not divide the images, a rest is left out of each draw.
    Source: a random group is a sample without replacement, whose unbiased variance is S² on average (Cochran,
    Sampling Techniques, theorem 2.4).
    """
    pictures, labels = draw(seed, images)
    values = pictures.mean((1, 2, 3))
    generator = torch.Generator().manual_seed(seed)
    partitions = values[torch.rand(draws, images, generator=generator).argsort(1)]
    by_class = values[labels.argsort(stable=True)][None]
    sizes = [2**k for k in range(1, 9) if 2**k < images] + [images]
    biased = torch.stack([variances(partitions, b, correction=0) for b in sizes])
    b, whole = torch.tensor(sizes), values.var()
    return GroupVariance(
        b,
        biased=biased.mean(1),
        biased_error=biased.std(1) / math.sqrt(draws),
        predicted=(1 - 1 / b.double()) * whole,
        unbiased=torch.stack([variances(partitions, size, correction=1).mean() for size in sizes]),
        sorted=torch.stack([variances(by_class, size, correction=0).mean() for size in sizes]),
        whole=whole.item(),
    )


def variances(rows: Tensor, size: int, correction: int) -> Tensor:
    """Mean variance of the groups that each row [D, n] is cut into, [D]."""
    whole = rows.shape[1] // size * size
    groups = rows[:, :whole].reshape(len(rows), -1, size)
    return groups.var(2, correction=correction).mean(1)


@dataclass(frozen=True, eq=False)
class Padding:
    """Sequences of unequal length in microbatches, each padded to its longest."""

    lengths: Tensor = quantity("tokens of each sequence", "tokens")
    microbatch: Tensor = quantity("which microbatch each sequence stands in")
    share: Tensor = quantity("share of padding in each microbatch")
    one_batch_share: float = quantity("share of padding in one batch")
    total_share: float = quantity("share of padding in all microbatches together")
    means: Tensor = quantity("mean of each microbatch, the padding counted as zeros")
    one_batch_mean: float = quantity("mean of the one batch, the padding counted as zeros")
    true_mean: float = quantity("mean of the tokens alone")


LONGEST = 32


def padding(
    *,
    sequences: Annotated[int, Range(4, 64, unit="sequences", help="sequences of one optimizer step")] = 16,
    accumulation_steps: Annotated[
        int, Range(1, 16, unit="microbatches", help="K, microbatches of one optimizer step")
    ] = 4,
    composition: Annotated[str, Choice(("shuffled", "sorted"), help="in random order, or by length")] = "shuffled",
    shortest: Annotated[int, Range(1, LONGEST, unit="tokens", help="shortest length drawn; at 32 all are equal")] = 4,
    seed: Annotated[int, Range(0, 9999, help="draws the lengths and the values")] = 0,
) -> Padding:
    """Regrouping changes the padding, and with it the statistics of a normalisation that counts padding.

    >>> share = padding(composition="sorted")
    >>> share.total_share < share.one_batch_share, share.one_batch_mean < share.true_mean
    (True, True)

    Lengths are drawn evenly on a log scale from `shortest` to 32, one value a token from N(1, 1), padding is 0.
    Raises LabError for more microbatches than sequences.
    """
    K, B = accumulation_steps, sequences
    if K > B:
        raise LabError(f"accumulation steps = {K} is outside 1 … {B}, the number of sequences: try {B}")
    lengths, values = _sequences(B, shortest, seed)
    order = lengths.argsort(stable=True) if composition == "sorted" else torch.arange(B)
    lengths, values = lengths[order], values[order]
    parts = list(zip(lengths.tensor_split(K), values.tensor_split(K), strict=True))
    places = torch.tensor([len(part) * int(part.max()) for part, _ in parts], dtype=torch.float64)
    tokens = torch.tensor([int(part.sum()) for part, _ in parts])
    total, one = float(tokens.sum()), float(B * lengths.max())
    return Padding(
        lengths,
        microbatch=torch.repeat_interleave(torch.tensor([len(part) for part, _ in parts])),
        share=1 - tokens / places,
        one_batch_share=1 - total / one,
        total_share=1 - total / float(places.sum()),
        means=torch.stack([part.sum() for _, part in parts]) / places,
        one_batch_mean=float(values.sum()) / one,
        true_mean=float(values.sum()) / total,
    )


def _sequences(B: int, shortest: int, seed: int) -> tuple[Tensor, Tensor]:
    """Lengths [B], and values [B, 32] that are 0 beyond them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = shortest * (LONGEST / shortest) ** torch.rand(B, generator=generator, dtype=torch.float64)
    lengths = drawn.round().long()
    values = 1 + torch.randn(B, LONGEST, generator=generator, dtype=torch.float64)
    return lengths, values.masked_fill(torch.arange(LONGEST) >= lengths[:, None], 0.0)
