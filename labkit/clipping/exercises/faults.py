"""The slips of a step with a loss scaler and a clip: what each does to the weights, how it is said, and the fix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labkit.clipping.ordering import Parts, clip_weight

ORDER = "after the loop scaler.unscale_(optimizer) once, then clip_grad_norm_ once, then scaler.step and scaler.update"

TWICE = "it was unscaled twice, as by hand and by the scaler"
RUNNING = "the clip stands in the loop, and clips the sum so far again and again"
SHORTER = "multiply by min(1, max_norm / norm), as clip_grad_norm_ does"


@dataclass(frozen=True)
class Slip:
    """In words, with {K} and {S} where the window's own go, and the fix."""

    words: str = ""
    fix: str = ""


SHARED = {
    "": Slip(),
    "sum": Slip("the means of the {K} microbatches are added and not divided by {K}", "divide each loss by {K}"),
    "again": Slip("the mean over the microbatches is divided by {K} once more", "divide by {K} once"),
    "last": Slip("only the last microbatch is left, as if zero_grad stood in the loop", "clear .grad once a window"),
}
UNSCALED = {
    "": Slip(),
    "early": Slip(
        "the first microbatch was unscaled, and the later ones never were: they are S = {S} times larger", ORDER
    ),
    "every": Slip("the sum so far was unscaled after every microbatch, so the first one was {K} times", ORDER),
    "never": Slip("nothing was unscaled, so all is S = {S} times too large before the clip", ORDER),
    "twice": Slip(TWICE, ORDER),
    "twice before": Slip(TWICE, ORDER),
}
CLIPPED = {
    "": Slip(),
    "none": Slip("nothing was clipped before the step", ORDER),
    "scaled": Slip("it was clipped while still scaled, so that the threshold is max_norm / S", ORDER),
    "running": Slip(RUNNING, ORDER),
    "running scaled": Slip(RUNNING, ORDER),
    "each": Slip("each microbatch was clipped by itself", ORDER),
    "each scaled": Slip("each microbatch was clipped by itself, and while still scaled", ORDER),
    "always": Slip("it was brought to the length max_norm even where it is shorter", SHORTER),
}
Slips = tuple[str, str, str]
ALL: Sequence[Slips] = sorted(itertools.product(SHARED, UNSCALED, CLIPPED), key=lambda slips: sum(map(bool, slips)))


def predict(slips: Slips, parts: Parts) -> Tensor:
    """The weights [K] of S_m / N in the gradient that is stepped with, by the algebra of these slips.

    >>> parts = Parts(torch.eye(2).double(), torch.tensor([0.5, 0.5]).double(), 8.0, 100.0)
    >>> predict(("", "early", ""), parts)
    tensor([1., 8.], dtype=torch.float64)
    """
    shared, unscaled, clipped = slips
    K, S = len(parts.share), parts.scale
    in_loop = {"running": replace(parts, max_norm=S * parts.max_norm), "running scaled": parts}.get(clipped)
    weights = torch.zeros(K, dtype=torch.float64)
    for m in range(K):
        weights[m] = S * K ** {"sum": 1, "again": -1}.get(shared, 0)
        if shared == "last":
            weights[:m] = 0
        if unscaled == "every" or (unscaled == "early" and m == 0):
            weights /= S
        if in_loop:
            weights = in_loop.clipped(weights)
    if clipped in BEFORE:
        weights = BEFORE[clipped](parts, weights)
    weights *= {"": 1 / S, "twice": 1 / S, "twice before": 1 / S**2}.get(unscaled, 1.0)
    if clipped in AFTER:
        weights = AFTER[clipped](parts, weights)
    return weights / S if unscaled == "twice" else weights


def _each(parts: Parts, weights: Tensor) -> Tensor:
    norms = (weights * parts.rows.norm(dim=1)).tolist()
    factors = torch.tensor([clip_weight(norm, parts.max_norm) for norm in norms], dtype=torch.float64)
    return weights * factors


def _always(parts: Parts, weights: Tensor) -> Tensor:
    length = float((weights @ parts.rows).norm())
    return weights * (parts.max_norm / length)


BEFORE = {"scaled": Parts.clipped, "each scaled": _each}  # the scaled gradient
AFTER = {"": Parts.clipped, "each": _each, "always": _always}  # the unscaled one


def story(slips: Slips, parts: Parts) -> str:
    """The slips and their fixes.

    >>> story(("", "", "none"), Parts(torch.eye(2), torch.ones(2), 8.0, 1.0))[:58]
    'nothing was clipped before the step. The fix: after the lo'
    """
    steps = [table[word] for table, word in zip((SHARED, UNSCALED, CLIPPED), slips, strict=True) if word]
    words, fixes = "; ".join(slip.words for slip in steps), "; ".join(dict.fromkeys(slip.fix for slip in steps))
    return f"{words}. The fix: {fixes}.".format(K=len(parts.share), S=f"{parts.scale:g}")
