"""What is wrong with a step, from the evidence: every fault with the numbers that show it."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.audit.cadence import cadence_faults, layer_faults, step_faults
from labkit.audit.candidate_rules import objective
from labkit.audit.clips import judged_gradient
from labkit.audit.explain_weights import fits_another_rule, name_faults
from labkit.audit.measurements import (
    SCALELESS,
    Evidence,
    Fault,
    Judgement,
    first_of_each,
    near,
    solve,
    unknown_weights,
)
from labkit.audit.window import Window

ORDER = (
    *("non-finite", "no-step"),
    *("token-mean", "mean-of-means", "sum-of-means", "token-sum", "double-division", "padded-count"),
    *("unshifted-count", "sequence-means", "last-microbatch-only", "tail-divided-by-k", "unknown", "carried-over"),
    *("stale-gradient", "clip-per-microbatch", "unscale-early", "clip-scaled"),
    *("step-per-microbatch", "adam-count-per-microbatch", "moments-per-microbatch", "momentum-per-microbatch"),
    *("decay-per-microbatch", "ema-per-microbatch", "schedule-per-microbatch", "schedule-per-process"),
    *("batch-dependent-layer", "nondeterministic"),
)


def judge(evidence: Evidence) -> tuple[tuple[Fault, ...], Judgement]:
    """All faults, the weightiest first, and the judgement of the first window that has one, else of the first."""
    judgements = [_window(evidence, at) for at in range(len(evidence.windows))]
    faults = [fault for each in judgements for fault in each.faults]
    faults += [*cadence_faults(evidence), *layer_faults(evidence)]
    return first_of_each(faults, ORDER), next((each for each in judgements if each.faults), judgements[0])


def _window(evidence: Evidence, at: int) -> Judgement:
    window, references = evidence.windows[at], evidence.references[at]
    target = objective(evidence.objective, references, evidence.sequences[at] if evidence.sequences else None)
    gradient, clip_faults = judged_gradient(evidence, window)
    lost = not window.steps and window.skipped > 0  # a scaler saw an overflow, and left the step out
    finite = lost or bool(gradient.isfinite().all() and window.end.isfinite().all())
    if not finite or lost or (not window.steps and not gradient.any()) or not target.any():
        faults = [] if finite else [Fault("non-finite", "The gradient or a weight is not finite.")]
        return Judgement(at, gradient, target, unknown_weights(evidence.K), [*faults, *step_faults(window)])
    faults = [*step_faults(window), *clip_faults]
    scaleless = _scaleless(window, gradient, faults)
    if scaleless and (scale := float(gradient @ target / (target @ target))) > 0:
        gradient = gradient / scale
    judgement = Judgement(at, gradient, target, solve(gradient, references.gradients), faults, scaleless)
    if not near(gradient, target, evidence.tolerance) or fits_another_rule(evidence, judgement):
        faults += name_faults(evidence, judgement)
    return judgement


def _scaleless(window: Window, gradient: Tensor, faults: list[Fault]) -> bool:
    """Whether the length of the gradient is not the one that was stepped with."""
    if any(fault.word in SCALELESS for fault in faults):
        return window.scale == 1.0
    if window.without_gradient:
        return True
    summed = sum((step.gradient for step in window.effective_steps if step.summed), torch.zeros_like(gradient))
    return bool(summed.any()) and torch.equal(summed, gradient)
