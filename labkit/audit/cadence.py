"""How often things happened in a window, and what in the model makes its microbatches more than a sum."""

from __future__ import annotations

import math

import torch

from labkit.audit.measurements import Fault, Seen
from labkit.audit.window import Window
from labkit.wording import percent, three, times


def steps(window: Window) -> list[Fault]:
    """How often the optimizers stepped."""
    moved: dict[int, int] = {}
    called: dict[int, int] = {}
    for step in window.real:
        moved[step.optimizer] = moved.get(step.optimizer, 0) + step.moved
        called[step.optimizer] = called.get(step.optimizer, 0) + 1
    if not window.steps and torch.equal(window.start, window.end):
        skipped = f" A loss scaler skipped {times(window.skipped)}." if window.skipped else ""
        return [Fault("no-step", f"No optimizer made a step, and no weight moved.{skipped}")]
    if not window.steps and window.moves > 1:
        return [Fault("step-per-microbatch", f"The weights were moved by hand {times(window.moves)} in one window.")]
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


def cadence(seen: Seen) -> list[Fault]:
    """What else advanced, and how often."""
    faults = []
    window = seen.windows[-1]
    stepped = {step.optimizer: 0 for step in window.steps}
    for step in window.real:
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


def layers(seen: Seen) -> list[Fault]:
    """What a second run, and one forward of the whole batch, have to say."""
    again, together = second_run(seen), one_forward(seen)
    if again > max(seen.tolerance, 1e-6):
        said = f"A second run with other random numbers is {percent(again)} off the first"
        return [Fault("nondeterministic", f"{said}.")]
    if together > max(seen.tolerance, 1e-9):
        said = f"In one forward the same examples give a gradient {percent(together)} off the sum of theirs"
        return [Fault("batch-dependent-layer", f"{said}.")]
    return []


def second_run(seen: Seen) -> float:
    """How far the gradient of a run with other random numbers is from the first, NaN where there is none."""
    if not seen.windows[0].passes or not seen.again.passes:
        return math.nan
    one, other = (torch.stack([p.gradient for p in each.passes]).sum(0) for each in (seen.windows[0], seen.again))
    return float((one - other).norm() / one.norm())


def one_forward(seen: Seen) -> float:
    """How far one forward of all microbatches is from the sum of theirs, NaN where nobody can join them."""
    if seen.whole is None:
        return math.nan
    summed, one = seen.still.gradients.sum(0), seen.whole.gradients[0]
    return float((summed - one).norm() / one.norm())


def counted(seen: Seen) -> float:
    """By how much the optimizers' own count of steps advanced in the last window, NaN where none keeps one."""
    window = seen.windows[-1]
    before = seen.windows[-2].counts if len(seen.windows) > 1 else {}
    advanced = [
        end - before.get(key, (0.0, _fresh(first, seen.K)))[1] for key, (first, end) in window.counts.items() if end
    ]
    return max(advanced, default=math.nan)
