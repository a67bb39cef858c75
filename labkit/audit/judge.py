"""What is wrong with a step, from what was seen of it: every fault with the numbers that show it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.audit.cadence import cadence, layers, steps
from labkit.audit.candidate_rules import objective
from labkit.audit.clips import reached
from labkit.audit.explain_weights import hidden, name
from labkit.audit.measurements import SCALELESS, Fault, Judged, Seen, near, solve
from labkit.audit.window import Window
from labkit.fit import Weights

ORDER = (
    *("non-finite", "no-step"),
    *("token-mean", "mean-of-means", "sum-of-means", "token-sum", "double-division", "padded-count"),
    *("unshifted-count", "sequence-means", "last-microbatch-only", "tail-divided-by-k", "unknown", "carried-over"),
    *("stale-gradient", "clip-per-microbatch", "unscale-early", "clip-scaled"),
    *("step-per-microbatch", "adam-count-per-microbatch", "moments-per-microbatch", "momentum-per-microbatch"),
    *("decay-per-microbatch", "ema-per-microbatch", "schedule-per-microbatch", "schedule-per-process"),
    *("batch-dependent-layer", "nondeterministic"),
)


HIDING = ("nondeterministic", "clip-per-microbatch", "unscale-early", "clip-scaled")  # what explains what is unknown


def judge(seen: Seen) -> tuple[list[Fault], Judged]:
    """All faults, the weightiest first, and the window whose weights tell most."""
    judged = [_window(seen, at) for at in range(len(seen.windows))]
    faults = [fault for each in judged for fault in each.faults]
    faults += [*cadence(seen), *layers(seen)]
    if any(fault.word in HIDING for fault in faults):
        faults = [fault for fault in faults if fault.word != "unknown"]
    first: dict[str, Fault] = {}
    for fault in faults:
        first.setdefault(fault.word, fault)
    ordered = sorted(first.values(), key=lambda fault: ORDER.index(fault.word))
    shown = next((each for each in judged if each.faults), judged[0])
    return ordered, shown


def _window(seen: Seen, at: int) -> Judged:
    window, found = seen.windows[at], seen.references[at]
    right = objective(seen.meant, found, seen.sequences[at] if seen.sequences else None)
    gradient, allowed = reached(seen, window)
    lost = not window.steps and window.skipped > 0  # a scaler saw an overflow, and left the step out
    finite = lost or bool(gradient.isfinite().all() and window.end.isfinite().all())
    if not finite or lost or (not window.steps and not gradient.any()) or not right.any():
        nothing = Weights(torch.full((seen.K,), math.nan), math.nan, math.nan, (), (), ())
        faults = [] if finite else [Fault("non-finite", "The gradient or a weight is not finite.")]
        return Judged(at, gradient, right, nothing, [*faults, *steps(window)])
    faults = [*steps(window), *allowed]
    judged = Judged(at, gradient, right, solve(gradient, found.gradients), faults)
    if _scaleless(window, gradient, faults):
        scale = float(gradient @ right / (right @ right))
        gradient = gradient / scale if scale > 0 else gradient
        judged = Judged(at, gradient, right, solve(gradient, found.gradients), faults, scaleless=True)
    if not near(gradient, right, seen.tolerance) or hidden(seen, at, judged):
        faults += name(seen, at, judged)
    return judged


def _scaleless(window: Window, gradient: Tensor, faults: list[Fault]) -> bool:
    """Whether the length of the gradient is not the one that was stepped with."""
    if any(fault.word in SCALELESS for fault in faults):
        return window.scale == 1.0
    if window.unseen:
        return True
    summed = sum((step.gradient for step in window.real if step.summed), torch.zeros_like(gradient))
    return bool(summed.any()) and torch.equal(summed, gradient)
