"""How often things happened in a window, and what in the model makes its microbatches more than a sum."""

from __future__ import annotations

import math
from collections import Counter

import torch

from labkit.audit.measurements import Evidence, Fault
from labkit.audit.window import Window
from labkit.wording import percent, three, times


def step_faults(window: Window) -> list[Fault]:
    """Faults in how often the optimizers stepped."""
    steps = window.effective_steps
    moves, calls = (Counter(step.optimizer for step in steps if step.moved), Counter(step.optimizer for step in steps))
    if not window.steps and torch.equal(window.start, window.end):
        skipped = f" A loss scaler skipped {times(window.skipped)}." if window.skipped else ""
        return [Fault("no-step", f"No optimizer made a step, and no weight moved.{skipped}")]
    if not window.steps and window.moves > 1:
        return [Fault("step-per-microbatch", f"The weights were moved by hand {times(window.moves)} in one window.")]
    most, often = max(moves.values(), default=0), max(calls.values(), default=0)
    if most > 1:
        return [Fault("step-per-microbatch", f"The optimizer stepped {times(most)} in one window.")]
    if often > 1:
        return [
            Fault(_memory(window), f"The optimizer was called {times(often)}, and moved the weights {times(most)}.")
        ]
    decays = max((window.buffer_decays.get(each, 0) for each in window.gradient_buffers), default=0)
    if decays > 1:
        word = "moments-per-microbatch" if window.square_buffers else "momentum-per-microbatch"
        return [Fault(word, f"A buffer that takes in gradients was updated {times(decays)} in one window.")]
    return []


def _memory(window: Window) -> str:
    adam = any("adam" in step.kind.lower() for step in window.steps)
    adam |= any(end for _, end in window.adam_counts.values())
    return "moments-per-microbatch" if adam else "momentum-per-microbatch"


def cadence_faults(evidence: Evidence) -> list[Fault]:
    """Counts, schedules, averages and decay that advanced more often than the optimizer stepped."""
    faults = []
    window = evidence.windows[-1]
    calls = Counter(step.optimizer for step in window.effective_steps)
    for key, advance in _advances(evidence).items():
        if calls[key] and advance != calls[key]:
            what = f"Adam's own count advanced by {three(advance)}, and the optimizer stepped {times(calls[key])}"
            faults.append(Fault("adam-count-per-microbatch", f"{what}."))
    faults += _schedules(evidence, window)
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


def _advances(evidence: Evidence) -> dict[int, float]:
    """By how much each optimizer that counts its steps advanced that count in the last window."""
    counts = evidence.windows[-1].adam_counts
    # An optimizer that was made by `build` has counted nothing; one that was loaded has counted much.
    before = {key: first if first > evidence.K else 0.0 for key, (first, _) in counts.items()}
    if len(evidence.windows) > 1:
        before |= {key: end for key, (_, end) in evidence.windows[-2].adam_counts.items()}
    return {key: end - before[key] for key, (_, end) in counts.items() if end > 0}


def _schedules(evidence: Evidence, window: Window) -> list[Fault]:
    often = max(window.schedule_steps.values(), default=0)
    if often > 1:
        rerun = evidence.rerun_without_last()
        other = often - (often == evidence.K)  # where K is fixed in the code
        if rerun and rerun[-1].steps:
            other = max(rerun[-1].schedule_steps.values(), default=0)
        if other == often:
            what = f"The schedule stepped {times(often)} in a window, whatever the number of microbatches"
            lookalikes = ("schedule-per-microbatch with a K fixed in the code",) if often == evidence.K else ()
            return [Fault("schedule-per-process", f"{what}.", lookalikes)]
        return [Fault("schedule-per-microbatch", f"The schedule stepped {times(often)} in one window.")]
    rates = [each.steps[0].rate for each in evidence.windows if each.steps]
    if often or len(set(rates)) < 2:
        return []
    rerun = evidence.rerun_without_last()
    others = [each.steps[0].rate for each in rerun if each.steps] if rerun else rates
    if len(others) == len(rates) and others != rates:
        what = f"With {evidence.K} microbatches the second learning rate is {three(rates[1])}"
        return [Fault("schedule-per-microbatch", f"{what}, with one fewer it is {three(others[1])}.")]
    return []


def layer_faults(evidence: Evidence) -> list[Fault]:
    """What a second run and one forward of the whole batch show of the layers."""
    rerun, together = rerun_distance(evidence), one_forward_distance(evidence)
    if rerun > max(evidence.tolerance, 1e-6):
        what = f"A second run with other random numbers differs from the first by {percent(rerun)}"
        return [Fault("nondeterministic", f"{what}.")]
    if together > max(evidence.tolerance, 1e-9):
        difference = f"{percent(together)} off the sum of the microbatches'"
        return [Fault("batch-dependent-layer", f"In one forward the same examples give a gradient {difference}.")]
    return []


def rerun_distance(evidence: Evidence) -> float:
    """How far the gradient of a run with other random numbers is from the first, NaN where there is none."""
    if not evidence.windows[0].passes or not evidence.rerun_other_seed.passes:
        return math.nan
    runs = evidence.windows[0], evidence.rerun_other_seed
    one, other = (torch.stack([p.gradient for p in each.passes]).sum(0) for each in runs)
    return float((one - other).norm() / one.norm())


def one_forward_distance(evidence: Evidence) -> float:
    """How far one forward of all microbatches is from the sum of theirs, NaN without `concat`."""
    if evidence.one_forward is None:
        return math.nan
    summed, one = evidence.references_at_start.gradients.sum(0), evidence.one_forward.gradients[0]
    return float((summed - one).norm() / one.norm())


def adam_count(evidence: Evidence) -> float:
    """By how much the optimizers' own count of steps advanced in the last window, NaN where none keeps one."""
    return max(_advances(evidence).values(), default=math.nan)
