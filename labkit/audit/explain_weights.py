"""Why a window's gradient is not the one that was meant."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.audit.candidate_rules import Prediction, inverse, objective, predictions, whole_number
from labkit.audit.measurements import SCALELESS, Evidence, Fault, Judgement, near, solve
from labkit.audit.references import References
from labkit.wording import percent, three


def name_faults(evidence: Evidence, judgement: Judgement) -> list[Fault]:
    """Faults in the weights of one window."""
    at, gradient = judgement.window, judgement.gradient
    if not gradient.any() and evidence.windows[at].passes and not evidence.windows[at].leftover.any():
        what = "The gradients were cleared between the last backward and the step: nothing reached the optimizer"
        return [Fault("unknown", f"{what}.")]
    if carried := _carried(evidence, at, gradient):
        return carried
    references = evidence.references[at]
    fitting = _nearest(_within(evidence, at, gradient), gradient)
    rare = tuple(dict.fromkeys(each.word for each in fitting if each.rare))
    fitting = [each for each in fitting if not each.rare] or fitting
    words = list(dict.fromkeys(each.word for each in fitting))
    factors = _factors(judgement, references)
    if len(words) > 1:
        return [Fault("unknown", f"{factors}. {' and '.join(words)} look the same here: {CHOOSE}.")]
    if words:
        others = tuple(word for word in rare if word != words[0])
        return [Fault(words[0], f"{factors}. {fitting[0].detail}".strip(), others)]
    for explain in (_scaled, _partly, _elsewhere):
        faults = explain(evidence, judgement, references)
        if faults is not None:
            return faults
    return []


def _nearest(rules: list[Prediction], gradient: Tensor) -> list[Prediction]:
    """Rules that nothing tells apart: where digits are few, several may lie within what rounding explains."""
    return [each for each in rules if not any(_rather(gradient, other.gradient, each.gradient, 0.2) for other in rules)]


def _rather(gradient: Tensor, one: Tensor, other: Tensor, least: float) -> bool:
    """Whether a gradient is the one prediction and not the other, which lie `least` times its rounding apart."""
    distance, error = float((one - other).norm()), float((gradient - one).norm())
    share = (float((gradient - other).norm()) ** 2 - error**2) / max(distance**2, 1e-300)  # 1: the one, -1: the other
    return share > 0.5 and distance > max(least * error, 1e-12 * float(gradient.norm()))


def fits_another_rule(evidence: Evidence, judgement: Judgement) -> bool:
    """Whether a rule other than the objective fits better, although rounding could explain the difference."""
    rules = _within(evidence, judgement.window, judgement.gradient)
    return any(_rather(judgement.gradient, each.gradient, judgement.target, 1.0) for each in rules)


def _within(evidence: Evidence, at: int, gradient: Tensor) -> list[Prediction]:
    """The rules whose prediction is the gradient, up to rounding."""
    sequences = evidence.sequences[at] if evidence.sequences else None
    rules = predictions(
        evidence.references[at],
        sequences,
        evidence.microbatch_of_sequence,
        evidence.microbatches,
        evidence.windows[at].inputs,
    )
    return [each for each in rules if near(gradient, each.gradient, evidence.tolerance)]


CHOOSE = "choose microbatches of unequal counts, K at least 3"
WHOLE = 0.02  # a factor this near to a whole number is one


def _factors(judgement: Judgement, references: References) -> str:
    weights = judgement.weights.values * references.counts.sum()
    known = weights[~weights.isnan()]
    if not len(known):
        return "The weights cannot be told"
    low, high = float(known.min()), float(known.max())
    if math.isclose(low, high, rel_tol=1e-4):
        return f"The gradient is {three(low)} times the right one"
    listed = ", ".join("0" if abs(each) < 1e-6 * known.abs().max() else three(float(each)) for each in weights)
    return f"The microbatches got {listed} times their right weight"


def _scaled(evidence: Evidence, judgement: Judgement, references: References) -> list[Fault] | None:
    """A gradient in the correct or another known direction, with a length of its own."""
    gradient, rows, K = judgement.gradient, references.gradients, evidence.K
    factors = _factors(judgement, references)
    loose = judgement.scaleless or any(fault.word in SCALELESS for fault in judgement.faults)
    directions = [("", judgement.target), ("mean-of-means", inverse(references.counts) @ rows), ("", rows.sum(0))]
    if loose and evidence.sequences:
        sequences = evidence.sequences[judgement.window]
        directions.append(("sequence-means", objective("sequence-mean", references, sequences)))
    for word, direction in directions:
        factor = float(gradient @ direction / (direction @ direction)) if direction.any() else 0.0
        if factor <= 0 or not near(gradient, factor * direction, evidence.tolerance):
            continue
        digits = min(10 * evidence.tolerance, WHOLE)
        divisor = whole_number(1 / factor, digits)
        if _clipped_by_hand(evidence, judgement.window):
            return [Fault(word, f"{factors}; then the length was cut.")] if word else []
        if loose:
            either = judgement.scaleless and word == "mean-of-means" and not judgement.faults
            return [Fault(word, f"{factors}.", ("sum-of-means",) if either else ())] if word else []
        if word and divisor and divisor > K:
            return [Fault("tail-divided-by-k", f"{factors}: {K} means were divided by {divisor}.")]
        declared = whole_number(K / factor, digits)
        if not word and divisor and (divisor >= K or not declared):
            return [Fault("double-division", f"{factors}: divided by {divisor} once more.")]
        if not word and declared and declared > K:
            return [Fault("tail-divided-by-k", f"{factors}: {K}/{declared} of it.")]
        return [Fault("unknown", f"{factors}, a factor that no rule gives.")]
    return None


def _clipped_by_hand(evidence: Evidence, at: int) -> bool:
    """Whether the gradient keeps its length when a microbatch is left out: then it was cut to that length."""
    rerun = evidence.rerun_without_last()
    if evidence.windows[at].clips or not evidence.windows[at].steps or not rerun or not rerun[0].steps:
        return False
    one, other = (math.hypot(*(step.size for step in each.steps)) for each in (evidence.windows[at], rerun[0]))
    return math.isclose(one, other, rel_tol=max(1e-4, evidence.tolerance))


def _partly(evidence: Evidence, judgement: Judgement, references: References) -> list[Fault] | None:
    """Some microbatches did not reach the step."""
    weights, K = judgement.weights, evidence.K
    if weights.residual > evidence.tolerance or weights.values.isnan().any():
        return None
    values = weights.values * references.counts.sum()
    lost = values.abs() <= 1e-6 * values.abs().max()
    if not lost.any():
        return None
    window, factors = evidence.windows[judgement.window], _factors(judgement, references)
    if lost.all():
        what = "The step saw none of this window's gradient, which was there only after it"
        return [Fault("stale-gradient", f"{what}.")] if window.leftover.any() else None
    leftover = solve(window.leftover, references.gradients) if window.leftover.any() else None
    if leftover and leftover.residual <= evidence.tolerance and bool((leftover.values[lost].abs() > 0).all()):
        what = f"{int(lost.sum())} of {K} microbatches are not in the step and stay in .grad"
        inside = References(references.gradients[~lost], references.counts[~lost], references.losses[~lost])
        rules = predictions(inside, None, evidence.microbatch_of_sequence, ())
        fitting = [each.word for each in rules if near(judgement.gradient, each.gradient, evidence.tolerance)]
        beside = [Fault(word, f"{factors}.") for word in fitting[:1] if word != "token-mean"]
        return [Fault("carried-over", f"{factors}: {what}."), *beside]
    if int((~lost).sum()) == 1:
        last = solve(window.passes[-1].gradient, references.gradients) if window.passes else None
        survivor = int((~lost).nonzero()[0])
        if survivor == K - 1 or (last and int(last.values.abs().nan_to_num().argmax()) == survivor):
            return [Fault("last-microbatch-only", f"{factors}.")]
    return [Fault("unknown", f"{factors}: {int(lost.sum())} of {K} did not reach the step.")]


def _carried(evidence: Evidence, at: int, gradient: Tensor) -> list[Fault]:
    """Gradients of the window before in this one."""
    if at == 0:
        return []
    own, earlier = evidence.references[at], evidence.windows[at - 1]
    brought = sum((each.gradient for each in earlier.passes), torch.zeros_like(gradient))
    before = earlier.leftover if earlier.leftover.any() else brought  # in buffers that only the step knows
    if not before.any() or (before is brought and solve(gradient, own.gradients).residual <= evidence.tolerance):
        return []
    parts = torch.stack([before * step.mask for step in evidence.windows[at].steps] or [before])
    rows = torch.cat([own.gradients, parts[parts.any(1)]])
    fitted = solve(gradient, rows)
    old = fitted.values[evidence.K :].nan_to_num()
    share = float(old.abs().max())
    carried = float((old @ rows[evidence.K :]).norm())
    if fitted.residual > evidence.tolerance or carried <= 10 * evidence.tolerance * gradient.norm():
        return []
    inside = solve(before, evidence.references[at - 1].gradients)
    sizes = inside.values.nan_to_num().abs()
    some = sizes > 1e-3 * sizes.max()
    if inside.residual <= max(evidence.tolerance, 1e-6) and not bool(some.all()):
        word, what = "carried-over", f"{int(some.sum())} of the microbatches of the window before"
    else:
        word, what = "stale-gradient", "the gradient of the window before"
    return [Fault(word, f"Window {at + 1} still holds {what}, with {three(share)} times its weight.")]


def _elsewhere(evidence: Evidence, judgement: Judgement, references: References) -> list[Fault] | None:
    """One forward of all microbatches explains the gradient, or nothing does."""
    if (one := evidence.one_forward) and near(judgement.gradient, one.gradients[0] / one.counts[0], evidence.tolerance):
        return []
    if judgement.weights.residual > evidence.tolerance:
        share = percent(judgement.weights.residual)
        return [Fault("unknown", f"{share} of the gradient is no weighted sum of the microbatches' gradients.")]
    return [Fault("unknown", f"{_factors(judgement, references)}: weights that no rule gives.")]
