"""Which gradient is judged: the one that reached the optimizer, before a clip in the right place; and other clips."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.audit.measurements import Evidence, Fault, near, solve
from labkit.audit.window import Clip, Window
from labkit.wording import three, times


def judged_gradient(evidence: Evidence, window: Window) -> tuple[Tensor, list[Fault]]:
    """The gradient that reached the optimizer, before a clip in the right place, and the faults of clips elsewhere."""
    passes = window.passes_before_step
    brought = sum((each.gradient for each in passes), torch.zeros_like(window.start))
    if not window.steps:
        return _without_optimizer(evidence, window, brought)
    steps = window.effective_steps
    if len({step.optimizer for step in steps}) < len(steps):
        return brought, []
    final = sum((step.gradient for step in steps), torch.zeros_like(window.start))
    if any(step.summed for step in steps):
        return _summed(window, final), []
    early = [each for each in window.unscales if each[0] < len(passes)]
    if early:
        what = f"unscale_ ran after {early[0][0]} of {len(passes)} backward passes"
        return brought / window.scale, [
            Fault("unscale-early", f"{what}: those that came later kept the scale {three(window.scale)}.")
        ]
    return _clipped(evidence, window, final, brought)


def _without_optimizer(evidence: Evidence, window: Window, brought: Tensor) -> tuple[Tensor, list[Fault]]:
    """Without a step of a torch optimizer: the gradient that the weights followed, or that .grad held as they moved."""
    movement = window.start - window.end
    if window.moves > 1:
        return brought, []
    if window.without_gradient:  # of gradients inside a function transform only this can be seen
        return movement, []
    for each in (window.leftover, window.manual_gradient, brought):
        rate = float(movement @ each / (each @ each)) if len(each) and each.any() else 0.0
        if rate > 0 and near(movement, rate * each, 1e-4):
            return each, []
    if len(window.manual_gradient) and window.manual_gradient.any():
        return _clipped(evidence, window, window.manual_gradient, brought)
    if not movement.any() or window.leftover.any():
        return brought, []
    return movement * float(brought.norm() / movement.norm()), []


def _summed(window: Window, total: Tensor) -> Tensor:
    """The gradient of an optimizer that accumulates internally: the sum, or the share of it that moved the weights."""
    movement, rate = window.start - window.end, max(step.rate for step in window.effective_steps)
    share = float(movement @ total / (total @ total)) if rate and total.any() else 0.0
    return total * share / rate if share > 0 and near(movement, share * total, 1e-4) else total


def _clipped(evidence: Evidence, window: Window, final: Tensor, brought: Tensor) -> tuple[Tensor, list[Fault]]:
    """The gradient before it was clipped, and whether the clip belongs where it ran."""
    passes = window.passes_before_step
    inside = [clip for clip in window.clips if clip.passes < len(passes) and _bites(clip)]
    if inside:
        limit = three(inside[0].limit)
        what = f"The gradient was clipped to {limit} after {inside[0].passes} of {len(passes)} backward passes"
        unclipped = _unclipped(window, final)
        return unclipped, [Fault("clip-per-microbatch", f"{what}, {times(len(inside))} in all.")]
    after = [clip for clip in window.clips if clip.passes == len(passes) and clip.size > 0]
    if after:
        clip = after[0]
        unscaled_later = any(clock > clip.clock for _, clock in window.unscales)
        shrunk = float(final.norm() / clip.gradient.norm()) < 0.5 * min(clip.limit / clip.size, 1.0)
        if _bites(clip) and clip.kind == "norm" and (unscaled_later or shrunk):
            factor = float(clip.gradient.norm() / max(float(final.norm()), 1e-300))
            what = f"The gradient was clipped to {three(clip.limit)} while it still had its scale"
            return final, [
                Fault("clip-scaled", f"{what}: what reached the optimizer is {three(factor)} times shorter.")
            ]
        return clip.gradient, []
    pattern = _by_hand(evidence, window, final)
    return (brought, [pattern]) if pattern else (final, [])


def _unclipped(window: Window, final: Tensor) -> Tensor:
    """The gradient without the clips between passes: what is left of each pass, over what the clips left of it."""
    rows = torch.stack([each.gradient for each in window.passes_before_step])
    if any(clip.kind != "norm" for clip in window.clips):
        return rows.sum(0)
    shares = solve(final, rows).values.nan_to_num()
    factors = torch.ones(len(rows), dtype=torch.float64)
    for clip in window.clips:
        if 0 < clip.passes <= len(rows) and clip.size > clip.limit:
            alone = near(clip.gradient, rows[clip.passes - 1], 1e-6)
            factors[clip.passes - 1 if alone else 0 : clip.passes] *= clip.limit / (clip.size + 1e-6)
    return (shares / factors) @ rows


def _bites(clip: Clip) -> bool:
    return clip.size > clip.limit * (1 + 1e-6)


def _by_hand(evidence: Evidence, window: Window, final: Tensor) -> Fault | None:
    """A clip or an unscale between the passes, recognised by how much of each pass is left."""
    passes = window.passes_before_step
    rows = torch.stack([each.gradient for each in passes]) if passes else final[None]
    if len(rows) < 2 or not rows.isfinite().all() or not final.isfinite().all():
        return None
    fitted = solve(final, rows)
    q = fitted.values
    if fitted.residual > evidence.tolerance or q.isnan().any() or bool((q < 1e-12).any()):
        return None
    if float(q.max() / q.min()) <= 1 + 10 * evidence.tolerance:
        return None
    ratios = (q[1:] / q[:-1]).tolist()
    steep = [ratio for ratio in ratios if ratio > 7.9]
    if steep and max(steep) / min(steep) < 1 + 1e-3 and all(ratio > 7.9 or abs(ratio - 1) < 1e-3 for ratio in ratios):
        what = f"Of the {len(q)} backward passes the first kept {three(float(q[0]))} of its length"
        return Fault("unscale-early", f"{what}, and the last {three(float(q[-1]))}.")
    return _clip_by_hand(rows, torch.tensor([each.size for each in passes], dtype=torch.float64), q)


def _clip_by_hand(rows: Tensor, sizes: Tensor, q: Tensor) -> Fault | None:
    scale = float(q.max())
    lengths = q * sizes / scale
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
