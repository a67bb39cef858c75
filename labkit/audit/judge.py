"""What is wrong with a step, from what was seen of it: every fault with the numbers that show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.audit.naming import named, objective, whole
from labkit.audit.references import References
from labkit.audit.watch import Window
from labkit.declare import percent, three, times
from labkit.errors import LabError
from labkit.fit import Weights, fit
from labkit.rules import TABLE, rule


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    word: str
    said: str
    alike: tuple[str, ...] = ()  # other words that would look the same here

    @property
    def fix(self) -> str:
        """What to do about it, by the rule table."""
        try:
            return rule(self.word).fix
        except LabError:
            return FIXES.get(self.word, "")


FIXES = {
    "no-step": "call the optimizer's step once, after the window's last backward",
    "stale-gradient": "clear the gradients once a window, before its first backward or after the step",
    "non-finite": "sum over valid tokens and divide by their number in the whole window; skip a step that overflowed",
    "unknown": "compare the weights with those you meant",
}
ORDER = (
    *("non-finite", "no-step"),
    *("token-mean", "mean-of-means", "sum-of-means", "token-sum", "double-division", "padded-count"),
    *("unshifted-count", "sequence-means", "last-microbatch-only", "tail-divided-by-k", "unknown", "carried-over"),
    *("stale-gradient", "clip-per-microbatch", "unscale-early", "clip-scaled"),
    *("step-per-microbatch", "adam-count-per-microbatch", "moments-per-microbatch", "momentum-per-microbatch"),
    *("decay-per-microbatch", "ema-per-microbatch", "schedule-per-microbatch", "schedule-per-process"),
    *("batch-dependent-layer", "nondeterministic"),
)


@dataclass(frozen=True, eq=False)
class Seen:
    """Everything that was measured of a step."""

    windows: list[Window]
    references: list[References]
    still: References  # those of the first window at the weights before it
    sequences: list[References] | None  # one for each window, of single sequences
    owner: Tensor  # which microbatch each sequence stands in
    microbatches: Sequence[Any]
    meant: str
    tolerance: float
    again: Window | None  # one window with other random numbers
    same: bool  # whether random numbers are all that may differ in it
    whole: References | None  # all microbatches in one forward
    fewer: Callable[[], list[Window] | None]  # the same windows without their last microbatch

    @property
    def K(self) -> int:
        """Microbatches of a window."""
        return len(self.microbatches)


@dataclass(frozen=True, eq=False)
class Judged:
    """One window's gradient, and what it is made of."""

    gradient: Tensor  # before a clip that is allowed
    right: Tensor
    weights: Weights
    faults: list[Fault]

    @property
    def error(self) -> float:
        """‖g − G‖ / ‖G‖."""
        return float((self.gradient - self.right).norm() / self.right.norm())


def near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two gradients are the same, up to rounding."""
    return float((one - other).norm()) <= tolerance * max(float(one.norm()), float(other.norm()))


def judge(seen: Seen) -> tuple[list[Fault], Judged]:
    """All faults, the weightiest first, and the window whose weights tell most."""
    judged = [_window(seen, at) for at in range(len(seen.windows))]
    faults = [fault for each in judged for fault in each.faults]
    faults += [*_cadence(seen), *_layers(seen)]
    if any(fault.word in HIDING for fault in faults):
        faults = [fault for fault in faults if fault.word != "unknown"]
    first: dict[str, Fault] = {}
    for fault in faults:
        first.setdefault(fault.word, fault)
    ordered = sorted(first.values(), key=lambda fault: ORDER.index(fault.word))
    shown = next((each for each in judged if each.faults), judged[0])
    return ordered, shown


HIDING = ("nondeterministic", "clip-per-microbatch", "unscale-early", "clip-scaled")  # what explains what is unknown
SCALELESS = ("step-per-microbatch", "unscale-early", "clip-scaled")  # beside these a common factor says nothing


def _window(seen: Seen, at: int) -> Judged:
    window, found = seen.windows[at], seen.references[at]
    right = objective(seen.meant, found, seen.sequences[at] if seen.sequences else None)
    gradient, allowed = _reached(seen, window, found)
    lost = not window.steps and window.skipped > 0  # a scaler saw an overflow, and left the step out
    finite = lost or bool(gradient.isfinite().all() and window.end.isfinite().all())
    if not finite or lost or (not window.steps and not gradient.any()) or not right.any():
        nothing = Weights(torch.full((seen.K,), math.nan), math.nan, math.nan, (), (), ())
        faults = [] if finite else [Fault("non-finite", "The gradient or a weight is not finite.")]
        return Judged(gradient, right, nothing, [*faults, *_steps(seen, window)])
    faults = [*_steps(seen, window), *allowed]
    judged = Judged(gradient, right, _weights(gradient, found), faults)
    if any(fault.word in SCALELESS for fault in faults) and window.scale == 1.0:
        scale = float(gradient @ right / (right @ right))
        judged = Judged(gradient / scale if scale > 0 else gradient, right, judged.weights, faults)
        gradient = judged.gradient
    if not near(gradient, right, seen.tolerance):
        faults += _name(seen, at, judged)
    return judged


def _weights(gradient: Tensor, found: References) -> Weights:
    return fit(gradient, found.gradients, sample=len(gradient) + 1)


# Which gradient is judged.


def _reached(seen: Seen, window: Window, found: References) -> tuple[Tensor, list[Fault]]:
    """The gradient that is judged: what reached the optimizer, before a clip in its place; and clips out of place."""
    passes = window.before
    brought = sum((each.gradient for each in passes), torch.zeros_like(window.start))
    per_optimizer: dict[int, int] = {}
    for step in window.steps:
        per_optimizer[step.optimizer] = per_optimizer.get(step.optimizer, 0) + 1
    if not window.steps or max(per_optimizer.values()) > 1:
        return brought, []
    final = sum((step.gradient for step in window.steps), torch.zeros_like(window.start))
    early = [each for each in window.unscaled if each[0] < len(passes)]
    if early:
        what = f"unscale_ ran after {early[0][0]} of {len(passes)} backward passes"
        return brought / window.scale, [
            Fault("unscale-early", f"{what}: those that came later kept the scale {three(window.scale)}.")
        ]
    return _clipped(seen, window, found, final, brought)


def _clipped(
    seen: Seen, window: Window, found: References, final: Tensor, brought: Tensor
) -> tuple[Tensor, list[Fault]]:
    """What was clipped, and whether it was in its place."""
    passes = window.before
    inside = [clip for clip in window.clips if clip.passes < len(passes) and _bites(clip)]
    if inside:
        limit = three(inside[0].limit)
        what = f"The gradient was clipped to {limit} after {inside[0].passes} of {len(passes)} backward passes"
        unclipped = _unclipped(window, final)
        return unclipped, [Fault("clip-per-microbatch", f"{what}, {times(len(inside))} in all.")]
    after = [clip for clip in window.clips if clip.passes == len(passes)]
    if after:
        clip = after[0]
        unscaled_later = any(clock > clip.clock for _, clock in window.unscaled)
        shrunk = float(final.norm()) < 0.5 * min(clip.limit, float(clip.gradient.norm()))
        if _bites(clip) and clip.kind == "norm" and (unscaled_later or shrunk):
            factor = float(clip.gradient.norm() / max(float(final.norm()), 1e-300))
            what = f"The gradient was clipped to {three(clip.limit)} while it still had its scale"
            return final, [
                Fault("clip-scaled", f"{what}: what reached the optimizer is {three(factor)} times shorter.")
            ]
        return clip.gradient, []
    pattern = _by_hand(seen, window, final)
    return (brought, [pattern]) if pattern else (final, [])


def _unclipped(window: Window, final: Tensor) -> Tensor:
    """The gradient without the clips in between: what is left of each pass, over what the clips left of it."""
    rows = torch.stack([each.gradient for each in window.before])
    if any(clip.kind != "norm" for clip in window.clips):
        return rows.sum(0)
    kept = fit(final, rows, sample=rows.shape[1] + 1).values.nan_to_num()
    factors = torch.ones(len(rows), dtype=torch.float64)
    for clip in window.clips:
        size = float(clip.gradient.norm())
        if clip.kind == "norm" and 0 < clip.passes <= len(rows) and size > clip.limit:
            alone = near(clip.gradient, rows[clip.passes - 1], 1e-6)
            factors[clip.passes - 1 if alone else 0 : clip.passes] *= clip.limit / (size + 1e-6)
    return (kept / factors) @ rows


def _bites(clip: Any) -> bool:
    size = float(clip.gradient.norm()) if clip.kind == "norm" else float(clip.gradient.abs().max())
    return bool(size > clip.limit * (1 + 1e-6))


def _by_hand(seen: Seen, window: Window, final: Tensor) -> Fault | None:
    """A clip or an unscale between the passes, found in how much is left of each pass."""
    rows = torch.stack([each.gradient for each in window.before]) if window.before else final[None]
    if len(rows) < 2 or not rows.isfinite().all() or not final.isfinite().all():
        return None
    kept = fit(final, rows, sample=rows.shape[1] + 1)
    q = kept.values
    if kept.residual > seen.tolerance or q.isnan().any() or bool((q < 1e-12).any()):
        return None
    if float(q.max() / q.min()) <= 1 + 10 * seen.tolerance:
        return None
    ratios = (q[1:] / q[:-1]).tolist()
    steep = [ratio for ratio in ratios if ratio > 7.9]
    if steep and max(steep) / min(steep) < 1 + 1e-3 and all(ratio > 7.9 or abs(ratio - 1) < 1e-3 for ratio in ratios):
        what = f"Of the {len(q)} backward passes the first kept {three(float(q[0]))} of its length"
        return Fault("unscale-early", f"{what}, and the last {three(float(q[-1]))}.")
    return _clip_by_hand(rows, q)


def _clip_by_hand(rows: Tensor, q: Tensor) -> Fault | None:
    scale = float(q.max())
    alone = q[:, None] * rows / scale
    lengths = alone.norm(dim=1)
    cut = q < scale * (1 - 1e-6)
    same = lengths[cut]
    if float(same.max() / same.min()) < 1 + 1e-4 and bool((lengths[~cut] <= same.max() * (1 + 1e-4)).all()):
        return _clip_fault(float(same[0]), int(cut.sum()), len(q))
    factors = [*(q[:-1] / q[1:]).tolist(), float(q[-1])]
    running, limits = torch.zeros_like(rows[0]), []
    for row, factor in zip(rows, factors, strict=True):
        running = factor * (running + row)
        if factor < 1 - 1e-6:
            limits.append(float(running.norm()))
    if limits and max(limits) / min(limits) < 1 + 1e-4:
        return _clip_fault(limits[0], len(limits), len(q))
    return None


def _clip_fault(limit: float, cut: int, passes: int) -> Fault:
    return Fault("clip-per-microbatch", f"{cut} of {passes} backward passes were cut to the length {three(limit)}.")


# What its weights are.


def _name(seen: Seen, at: int, judged: Judged) -> list[Fault]:
    """Faults in the weights of one window."""
    found, gradient = seen.references[at], judged.gradient
    if not gradient.any() and seen.windows[at].passes and not seen.windows[at].left.any():
        said = "The gradients were cleared between the last backward and the step: nothing reached the optimizer"
        return [Fault("unknown", f"{said}.")]
    sequences = seen.sequences[at] if seen.sequences else None
    for left in _carried(seen, at, gradient):
        return left
    names = [
        each
        for each in named(found, sequences, seen.owner, seen.microbatches, seen.windows[at].inputs)
        if near(gradient, each.gradient, seen.tolerance)
    ]
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


CHOOSE = "choose microbatches of unequal counts, K at least 3"


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
    means = torch.where(n > 0, 1 / n.clamp(min=1), 0.0) @ found.gradients
    loose = any(fault.word in SCALELESS for fault in judged.faults)
    directions = [("", judged.right), ("mean-of-means", means), ("", found.gradients.sum(0))]
    if loose and seen.sequences:
        directions.append(("sequence-means", objective("sequence-mean", found, seen.sequences[at])))
    for word, direction in directions:
        factor = float(gradient @ direction / (direction @ direction)) if direction.any() else 0.0
        if factor <= 0 or not near(gradient, factor * direction, seen.tolerance):
            continue
        divisor = whole(1 / factor, 10 * seen.tolerance)
        if _clipped_by_hand(seen, gradient):
            return [Fault(word, f"{_factors(judged, found)}; then the length was cut.")] if word else []
        if loose:
            return [Fault(word, f"{_factors(judged, found)}.")] if word else []
        if word and divisor and divisor > seen.K:
            said = f"{seen.K} means were divided by {divisor}"
            return [Fault("tail-divided-by-k", f"{_factors(judged, found)}: {said}.")]
        declared = whole(seen.K / factor, 10 * seen.tolerance)
        if not word and divisor and (divisor >= seen.K or not declared):
            return [Fault("double-division", f"{_factors(judged, found)}: divided by {divisor} once more.")]
        if not word and declared and declared > seen.K:
            return [Fault("tail-divided-by-k", f"{_factors(judged, found)}: {seen.K}/{declared} of it.")]
        return [Fault("unknown", f"{_factors(judged, found)}, a factor that no rule gives.")]
    return None


def _clipped_by_hand(seen: Seen, gradient: Tensor) -> bool:
    """Whether the gradient keeps its length when a microbatch is left out: then it was cut to that length."""
    fewer = seen.fewer()
    if not fewer or not fewer[0].steps:
        return False
    other = sum((step.gradient for step in fewer[0].steps), torch.zeros_like(gradient))
    return math.isclose(float(other.norm()), float(gradient.norm()), rel_tol=max(1e-4, seen.tolerance))


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
    left = fit(window.left, found.gradients, sample=len(window.left) + 1) if window.left.any() else None
    if left is not None and left.residual <= seen.tolerance and bool((left.values[gone].abs() > 0).all()):
        said = f"{int(gone.sum())} of {seen.K} microbatches are not in the step and stay in .grad"
        inside = References(found.gradients[~gone], found.counts[~gone], found.losses[~gone])
        names = [
            each for each in named(inside, None, seen.owner, ()) if near(judged.gradient, each.gradient, seen.tolerance)
        ]
        beside = [Fault(each.word, f"{_factors(judged, found)}.") for each in names[:1] if each.word != "token-mean"]
        return [Fault("carried-over", f"{_factors(judged, found)}: {said}."), *beside]
    if int((~gone).sum()) == 1:
        last = fit(window.passes[-1].gradient, found.gradients) if window.passes else None
        survivor = int((~gone).nonzero()[0])
        if survivor == seen.K - 1 or (last is not None and int(last.values.abs().nan_to_num().argmax()) == survivor):
            return [Fault("last-microbatch-only", f"{_factors(judged, found)}.")]
    return [Fault("unknown", f"{_factors(judged, found)}: {int(gone.sum())} of {seen.K} did not reach the step.")]


def _carried(seen: Seen, at: int, gradient: Tensor) -> list[list[Fault]]:
    """Gradients of the window before in this one."""
    if at == 0:
        return []
    own, before = seen.references[at], seen.windows[at - 1].left
    if not before.any():
        return []
    apart = torch.stack([before * step.mine for step in seen.windows[at].steps] or [before])
    rows = torch.cat([own.gradients, apart[apart.any(1)]])
    found = fit(gradient, rows, sample=rows.shape[1] + 1)
    old = found.values[seen.K :].nan_to_num()
    share = float(old.abs().max())
    if found.residual > seen.tolerance or float((old @ rows[seen.K :]).norm()) <= 10 * seen.tolerance * gradient.norm():
        return []
    inside = fit(before, seen.references[at - 1].gradients, sample=rows.shape[1] + 1)
    sizes = inside.values.nan_to_num().abs()
    some = sizes > 1e-3 * sizes.max()
    if inside.residual <= max(seen.tolerance, 1e-6) and not bool(some.all()):
        word, what = "carried-over", f"{int(some.sum())} of the microbatches of the window before"
    else:
        word, what = "stale-gradient", "the gradient of the window before"
    faults = [Fault(word, f"Window {at + 1} still holds {what}, with {three(share)} times its weight.")]
    return [faults]


def _elsewhere(seen: Seen, at: int, judged: Judged, found: References) -> list[Fault] | None:
    """Nothing explains it."""
    if seen.whole is not None and near(judged.gradient, seen.whole.gradients[0] / seen.whole.counts[0], seen.tolerance):
        return []
    if judged.weights.residual > seen.tolerance:
        share = percent(judged.weights.residual)
        return [Fault("unknown", f"{share} of the gradient is no weighted sum of the microbatches' gradients.")]
    return [Fault("unknown", f"{_factors(judged, found)}: weights that no rule gives.")]


# How often things happen.


def _steps(seen: Seen, window: Window) -> list[Fault]:
    """How often the optimizers stepped."""
    moved: dict[int, int] = {}
    called: dict[int, int] = {}
    for step in window.steps:
        moved[step.optimizer] = moved.get(step.optimizer, 0) + step.moved
        called[step.optimizer] = called.get(step.optimizer, 0) + 1
    if not window.steps and torch.equal(window.start, window.end):
        skipped = f" A loss scaler skipped {times(window.skipped)}." if window.skipped else ""
        return [Fault("no-step", f"No optimizer made a step, and no weight moved.{skipped}")]
    most, often = max(moved.values(), default=0), max(called.values(), default=0)
    if most > 1:
        return [Fault("step-per-microbatch", f"The optimizer stepped {times(most)} in one window.")]
    if often > 1:
        return [
            Fault(_memory(window), f"The optimizer was called {times(often)}, and moved the weights {times(most)}.")
        ]
    hand = max((window.forgot.get(each, 0) for each in window.fed), default=0)
    if hand > 1:
        word = "moments-per-microbatch" if window.squares else "momentum-per-microbatch"
        return [Fault(word, f"A buffer that takes gradients in was updated {times(hand)} in one window.")]
    return []


def _memory(window: Window) -> str:
    adam = any("adam" in step.kind.lower() for step in window.steps) or any(end for _, end in window.counts.values())
    return "moments-per-microbatch" if adam else "momentum-per-microbatch"


def _cadence(seen: Seen) -> list[Fault]:
    """What else advanced, and how often."""
    faults = []
    window = seen.windows[-1]
    stepped = {step.optimizer: 0 for step in window.steps}
    for step in window.steps:
        stepped[step.optimizer] += 1
    for key, (first, end) in window.counts.items():
        before = seen.windows[-2].counts.get(key, (0.0, 0.0))[1] if len(seen.windows) > 1 else _fresh(first, seen.K)
        if stepped[key] and end - before != stepped[key] and end > 0:
            what = (
                f"Adam's own count advanced by {three(end - before)}, and the optimizer stepped {times(stepped[key])}"
            )
            faults.append(Fault("adam-count-per-microbatch", f"{what}."))
    faults += _schedules(seen, window)
    often = max(window.averages.values(), default=0)
    if often > 1:
        faults.append(
            Fault("ema-per-microbatch", f"The average of the weights was updated {times(often)} in one window.")
        )
    often = max(window.decays.values(), default=0)
    often += bool(often) and any(step.decay for step in window.steps)
    if often > 1:
        faults.append(Fault("decay-per-microbatch", f"The weights were decayed {times(often)} in one window."))
    return faults


def _fresh(first: float, K: int) -> float:
    """An optimizer that was made by `build` has counted nothing; one that was loaded has counted much."""
    return 0.0 if first <= K else first


def _schedules(seen: Seen, window: Window) -> list[Fault]:
    often = max(window.schedule.values(), default=0)
    if often > 1:
        fewer = seen.fewer()
        told = fewer is not None and bool(fewer[-1].steps)  # else K stands in the code
        other = max(fewer[-1].schedule.values(), default=0) if fewer and told else often - (often == seen.K)
        if other == often:
            what = f"The schedule stepped {times(often)} in a window, whatever the number of microbatches"
            alike = ("schedule-per-microbatch with a K fixed in the code",) if often == seen.K else ()
            return [Fault("schedule-per-process", f"{what}.", alike)]
        return [Fault("schedule-per-microbatch", f"The schedule stepped {times(often)} in one window.")]
    rates = [each.steps[0].rate for each in seen.windows if each.steps]
    if often or len(set(rates)) < 2:
        return []
    fewer = seen.fewer()
    others = [each.steps[0].rate for each in fewer if each.steps] if fewer else rates
    if len(others) == len(rates) and others != rates:
        what = f"With {seen.K} microbatches the second learning rate is {three(rates[1])}"
        return [Fault("schedule-per-microbatch", f"{what}, with one less it is {three(others[1])}.")]
    return []


# What is in the model.


def _layers(seen: Seen) -> list[Fault]:
    faults = []
    first = seen.windows[0]
    if seen.again is not None and first.passes and seen.again.passes:
        one, other = (
            sum((p.gradient for p in each.passes), torch.zeros_like(first.start)) for each in (first, seen.again)
        )
        if one.isfinite().all() and other.isfinite().all() and not near(one, other, max(seen.tolerance, 1e-6)):
            off = percent(float((one - other).norm() / one.norm()))
            faults.append(Fault("nondeterministic", f"A second run with other random numbers is {off} off the first."))
    if seen.whole is not None and not faults:
        summed, one = seen.still.gradients.sum(0), seen.whole.gradients[0]
        if not near(summed, one, max(seen.tolerance, 1e-9)):
            off = percent(float((summed - one).norm() / one.norm()))
            faults.append(
                Fault(
                    "batch-dependent-layer",
                    f"In one forward the same examples give a gradient {off} off the sum of theirs.",
                )
            )
    return faults


assert TABLE
