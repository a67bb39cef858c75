"""Why a window's gradient is not the one that was meant."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.audit.candidate_rules import Named, inverse, named, objective, whole
from labkit.audit.measurements import SCALELESS, Fault, Judged, Seen, near, solve
from labkit.audit.references import References
from labkit.wording import percent, three


def name(seen: Seen, at: int, judged: Judged) -> list[Fault]:
    """Faults in the weights of one window."""
    found, gradient = seen.references[at], judged.gradient
    if not gradient.any() and seen.windows[at].passes and not seen.windows[at].left.any():
        said = "The gradients were cleared between the last backward and the step: nothing reached the optimizer"
        return [Fault("unknown", f"{said}.")]
    if carried := _carried(seen, at, gradient):
        return carried
    names = _nearest(_within(seen, at, gradient), gradient)
    alike = tuple(dict.fromkeys(each.word for each in names if each.rare))
    names = [each for each in names if not each.rare] or names
    words = list(dict.fromkeys(each.word for each in names))
    if len(words) > 1:
        return [Fault("unknown", f"{_factors(judged, found)}. {' and '.join(words)} look the same here: {CHOOSE}.")]
    if words:
        others = tuple(word for word in alike if word != words[0])
        return [Fault(words[0], f"{_factors(judged, found)}. {names[0].said}".strip(), others)]
    for explain in (_scaled, _partly, _elsewhere):
        told = explain(seen, at, judged, found)
        if told is not None:
            return told
    return []


def _nearest(names: list[Named], gradient: Tensor) -> list[Named]:
    """Those that nothing tells apart: where digits are few, several may lie within what rounding explains."""
    return [each for each in names if not any(_rather(gradient, other.gradient, each.gradient, 0.2) for other in names)]


def _rather(gradient: Tensor, one: Tensor, other: Tensor, least: float) -> bool:
    """Whether a gradient is the one prediction and not the other, which lie `least` times its rounding apart."""
    apart, off = float((one - other).norm()), float((gradient - one).norm())
    share = (float((gradient - other).norm()) ** 2 - off**2) / max(apart**2, 1e-300)  # 1: the one, -1: the other
    return share > 0.5 and apart > max(least * off, 1e-12 * float(gradient.norm()))


def hidden(seen: Seen, at: int, judged: Judged) -> bool:
    """Whether a rule other than the right one fits better, although rounding could explain the difference."""
    return any(
        _rather(judged.gradient, each.gradient, judged.right, 1.0) for each in _within(seen, at, judged.gradient)
    )


def _within(seen: Seen, at: int, gradient: Tensor) -> list[Named]:
    """The rules whose prediction is the gradient, up to rounding."""
    sequences = seen.sequences[at] if seen.sequences else None
    every = named(seen.references[at], sequences, seen.owner, seen.microbatches, seen.windows[at].inputs)
    return [each for each in every if near(gradient, each.gradient, seen.tolerance)]


CHOOSE = "choose microbatches of unequal counts, K at least 3"


WHOLE = 0.02  # a factor this near to a whole number is one


def _factors(judged: Judged, found: References) -> str:
    weights = judged.weights.values * found.counts.sum()
    known = weights[~weights.isnan()]
    if not len(known):
        return "The weights cannot be told"
    low, high = float(known.min()), float(known.max())
    if math.isclose(low, high, rel_tol=1e-4):
        return f"The gradient is {three(low)} times the right one"
    listed = ", ".join("0" if abs(each) < 1e-6 * known.abs().max() else three(float(each)) for each in weights)
    return f"The microbatches got {listed} times their right weight"


def _scaled(seen: Seen, at: int, judged: Judged, found: References) -> list[Fault] | None:
    """A gradient in a right or known direction, with a length of its own."""
    n, gradient = found.counts, judged.gradient
    means = inverse(n) @ found.gradients
    loose = judged.scaleless or any(fault.word in SCALELESS for fault in judged.faults)
    directions = [("", judged.right), ("mean-of-means", means), ("", found.gradients.sum(0))]
    if loose and seen.sequences:
        directions.append(("sequence-means", objective("sequence-mean", found, seen.sequences[at])))
    for word, direction in directions:
        factor = float(gradient @ direction / (direction @ direction)) if direction.any() else 0.0
        if factor <= 0 or not near(gradient, factor * direction, seen.tolerance):
            continue
        digits = min(10 * seen.tolerance, WHOLE)
        divisor = whole(1 / factor, digits)
        if _clipped_by_hand(seen, at):
            return [Fault(word, f"{_factors(judged, found)}; then the length was cut.")] if word else []
        if loose:
            alike = ("sum-of-means",) if judged.scaleless and word == "mean-of-means" and not judged.faults else ()
            return [Fault(word, f"{_factors(judged, found)}.", alike)] if word else []
        if word and divisor and divisor > seen.K:
            said = f"{seen.K} means were divided by {divisor}"
            return [Fault("tail-divided-by-k", f"{_factors(judged, found)}: {said}.")]
        declared = whole(seen.K / factor, digits)
        if not word and divisor and (divisor >= seen.K or not declared):
            return [Fault("double-division", f"{_factors(judged, found)}: divided by {divisor} once more.")]
        if not word and declared and declared > seen.K:
            return [Fault("tail-divided-by-k", f"{_factors(judged, found)}: {seen.K}/{declared} of it.")]
        return [Fault("unknown", f"{_factors(judged, found)}, a factor that no rule gives.")]
    return None


def _clipped_by_hand(seen: Seen, at: int) -> bool:
    """Whether the gradient keeps its length when a microbatch is left out: then it was cut to that length."""
    fewer = seen.fewer()
    if seen.windows[at].clips or not seen.windows[at].steps or not fewer or not fewer[0].steps:
        return False
    one, other = (math.hypot(*(step.size for step in each.steps)) for each in (seen.windows[at], fewer[0]))
    return math.isclose(one, other, rel_tol=max(1e-4, seen.tolerance))


def _partly(seen: Seen, at: int, judged: Judged, found: References) -> list[Fault] | None:
    """Some microbatches did not reach the step."""
    weights = judged.weights
    if weights.residual > seen.tolerance or weights.values.isnan().any():
        return None
    values = weights.values * found.counts.sum()
    gone = values.abs() <= 1e-6 * values.abs().max()
    if not gone.any():
        return None
    window = seen.windows[at]
    if gone.all():
        said = "The step saw none of this window's gradient, which was there only after it"
        return [Fault("stale-gradient", f"{said}.")] if window.left.any() else None
    left = solve(window.left, found.gradients) if window.left.any() else None
    if left is not None and left.residual <= seen.tolerance and bool((left.values[gone].abs() > 0).all()):
        said = f"{int(gone.sum())} of {seen.K} microbatches are not in the step and stay in .grad"
        inside = References(found.gradients[~gone], found.counts[~gone], found.losses[~gone])
        names = [
            each for each in named(inside, None, seen.owner, ()) if near(judged.gradient, each.gradient, seen.tolerance)
        ]
        beside = [Fault(each.word, f"{_factors(judged, found)}.") for each in names[:1] if each.word != "token-mean"]
        return [Fault("carried-over", f"{_factors(judged, found)}: {said}."), *beside]
    if int((~gone).sum()) == 1:
        last = solve(window.passes[-1].gradient, found.gradients) if window.passes else None
        survivor = int((~gone).nonzero()[0])
        if survivor == seen.K - 1 or (last is not None and int(last.values.abs().nan_to_num().argmax()) == survivor):
            return [Fault("last-microbatch-only", f"{_factors(judged, found)}.")]
    return [Fault("unknown", f"{_factors(judged, found)}: {int(gone.sum())} of {seen.K} did not reach the step.")]


def _carried(seen: Seen, at: int, gradient: Tensor) -> list[Fault]:
    """Gradients of the window before in this one."""
    if at == 0:
        return []
    own, earlier = seen.references[at], seen.windows[at - 1]
    brought = sum((each.gradient for each in earlier.passes), torch.zeros_like(gradient))
    before = earlier.left if earlier.left.any() else brought  # in buffers that only the step knows
    if not before.any() or (before is brought and solve(gradient, own.gradients).residual <= seen.tolerance):
        return []
    apart = torch.stack([before * step.mine for step in seen.windows[at].steps] or [before])
    rows = torch.cat([own.gradients, apart[apart.any(1)]])
    found = solve(gradient, rows)
    old = found.values[seen.K :].nan_to_num()
    share = float(old.abs().max())
    if found.residual > seen.tolerance or float((old @ rows[seen.K :]).norm()) <= 10 * seen.tolerance * gradient.norm():
        return []
    inside = solve(before, seen.references[at - 1].gradients)
    sizes = inside.values.nan_to_num().abs()
    some = sizes > 1e-3 * sizes.max()
    if inside.residual <= max(seen.tolerance, 1e-6) and not bool(some.all()):
        word, what = "carried-over", f"{int(some.sum())} of the microbatches of the window before"
    else:
        word, what = "stale-gradient", "the gradient of the window before"
    return [Fault(word, f"Window {at + 1} still holds {what}, with {three(share)} times its weight.")]


def _elsewhere(seen: Seen, at: int, judged: Judged, found: References) -> list[Fault] | None:
    """Nothing explains it."""
    if seen.whole is not None and near(judged.gradient, seen.whole.gradients[0] / seen.whole.counts[0], seen.tolerance):
        return []
    if judged.weights.residual > seen.tolerance:
        share = percent(judged.weights.residual)
        return [Fault("unknown", f"{share} of the gradient is no weighted sum of the microbatches' gradients.")]
    return [Fault("unknown", f"{_factors(judged, found)}: weights that no rule gives.")]
