"""The exercises of the clipping lab: a whole step with a loss scaler and a clip, and the scale after a step."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD

from labkit.clipping import scaling, taken_apart
from labkit.clipping.exercises.faults import ALL, ORDER, Slips, predict, story
from labkit.clipping.ordering import Parts, once
from labkit.corpus import Batch, batch, split
from labkit.device import quota_threads
from labkit.exercise import sandbox
from labkit.exercise.formula import Exercise
from labkit.exercise.verdict import ROUNDED, Function, Verdict, aside, exercise, join, refusal, within
from labkit.fit import fit, flat
from labkit.nets import Transformer
from labkit.wording import three, times

# The hidden windows: check, seeds (one a window, on the same model), K, log2 S, max_norm, and whether the first window
# overflows. All sequences are equally long, so a mean of means is right.
CASES = (
    ("nothing to clip", (3,), 4, 10, 1e5, False),
    ("a gradient that is too long", (4,), 4, 10, 0.5, False),
    ("another number of microbatches", (5,), 2, 4, 1e5, False),
    ("the window after", (6, 7), 3, 3, 0.75, False),
    ("an overflow, and the window after", (8, 9), 3, 3, 0.75, True),
)
NAMES = ("model", "optimizer", "scaler", "microbatches", "max_norm")
RATE = 0.1
NEAR = 1e-5  # a slip is named within this: a clip of other gradients adds its 10⁻⁶ to other norms
RIGHT = "Right: unscaled once, clipped once, one step and one update a window, and no step after an overflow."


class Counted(GradScaler):
    """torch's own scaler, and how often it was asked to step and to update."""

    steps = updates = 0

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Count, then step."""
        self.steps += 1
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Count, then update."""
        self.updates += 1
        super().update(new_scale)


@dataclass(frozen=True, eq=False)
class Run:
    """What a function did in one window."""

    check: str
    at: int  # which of the check's windows
    parts: Parts
    outcome: sandbox.Outcome
    stepped: list[Tensor]  # the gradient at every step of the optimizer, flat
    before: Tensor | None  # the gradient that the window before stepped with
    moved: float  # ‖weights − what the optimizer's steps explain‖ / ‖weights‖
    counts: tuple[int, int, int]  # backward passes, and how often the scaler was asked to step and to update
    scales: tuple[float, float]
    overflow: bool

    @property
    def right(self) -> bool:
        """One step with clip-once's gradient, or none after an overflow, and one update of the scaler."""
        factor = 0.5 if self.overflow else 1.0
        quiet = not self.outcome.error and self.counts[2] == 1 and self.scales[1] == factor * self.scales[0]
        return quiet and self.moved <= ROUNDED and (not self.stepped if self.overflow else self.exact)

    @property
    def exact(self) -> bool:
        """Whether the optimizer stepped once, with the right gradient."""
        right = once(self.parts) @ self.parts.rows
        return len(self.stepped) == 1 and bool((self.stepped[0] - right).norm() <= ROUNDED * right.norm())


@exercise
@quota_threads(1)
def clipped_step(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `step(model, optimizer, scaler, microbatches, max_norm)`: one optimizer step on a list of (tokens, labels).

    >>> def step(model, optimizer, scaler, microbatches, max_norm):
    ...     from labkit.clipping.ordering import clip_once
    ...     clip_once(model, microbatches, optimizer, scaler, max_norm)
    ...     optimizer.zero_grad()
    >>> clipped_step(step).sentence
    'Right: unscaled once, clipped once, one step and one update a window, and no step after an overflow.'

    The model is a small float64 transformer, the optimizer SGD and the scaler torch.amp.GradScaler; the gradients are
    clear at the first window. All sequences are equally long. Judged by the weights fitted to the gradient that the
    optimizer stepped with, and by what became of scale and weights. `seconds`: for all windows together.
    """
    if why := refusal(function, *NAMES):
        return Verdict(False, tuple((check, False) for check, *_ in CASES), why, "")
    runs: list[Run] = []
    for case in CASES:
        remaining = seconds - sum(run.outcome.seconds for run in runs)
        runs += _windows(function, max(remaining, 0.01), *case)
    checks = tuple((check, all(run.right for run in runs if run.check == check)) for check, *_ in CASES)
    wrong = next((run for run in runs if not run.right), None)
    outcome = (wrong or runs[0]).outcome
    sentence = _fault(wrong, runs) if wrong else RIGHT
    return Verdict(wrong is None, checks, sentence + aside(outcome), outcome.printed)


def _windows(
    function: Function, seconds: float, check: str, seeds: tuple[int, ...], K: int, log: int, c: float, overflow: bool
) -> list[Run]:
    """Its windows, one after the other, on one model with one optimizer and scaler."""
    model, twin = (Transformer(seed=seeds[0], length=24, dtype=torch.float64) for _ in range(2))
    weights, spoiled = list(model.parameters()), [overflow]
    optimizer, scaler = SGD(weights, lr=RATE), Counted("cpu", init_scale=2.0**log)
    runs, passes, stepped = list[Run](), list[int](), list[Tensor]()
    optimizer.register_step_pre_hook(lambda *_: stepped.append(_gradient(weights)))
    weights[0].register_hook(lambda g: g * torch.inf if spoiled and spoiled.pop() else g)
    weights[0].register_post_accumulate_grad_hook(lambda _: passes.append(1))
    for at, seed in enumerate(seeds):
        microbatches = split(*batch(seed, 2 * K, 24, shortest=24, text="made"), K)
        twin.load_state_dict(dict(zip(twin.state_dict(), weights, strict=True)))
        parts = taken_apart(twin, microbatches, scaler.get_scale(), c)
        before = stepped[-1] if stepped else None
        stepped.clear()
        passes.clear()
        scaler.steps = scaler.updates = 0
        outcome = sandbox.run(function, model, optimizer, scaler, _copies(microbatches), c, seconds=seconds)
        moved = _moved(model, weights, flat(twin.parameters()) - RATE * sum(stepped, torch.zeros(1)))
        counts, scales = (len(passes), scaler.steps, scaler.updates), (parts.scale, scaler.get_scale())
        runs.append(Run(check, at, parts, outcome, [*stepped], before, moved, counts, scales, overflow and at == 0))
        if outcome.error or moved == math.inf:
            break
    return runs


def _gradient(weights: list[nn.Parameter]) -> Tensor:
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in weights)


def _moved(model: nn.Module, weights: list[nn.Parameter], explained: Tensor) -> float:
    """How far the weights are from where the optimizer's steps brought them; inf where they are others."""
    now = list(model.parameters())
    if [id(p) for p in now] != [id(p) for p in weights] or len(position := flat(now)) != len(explained):
        return math.inf
    return float((position - explained).norm() / explained.norm()) if explained.isfinite().all() else 0.0


def _copies(microbatches: list[Batch]) -> list[Batch]:
    return [(tokens.clone(), labels.clone()) for tokens, labels in microbatches]


# Saying it.

CLEAR = "clear it once a window: optimizer.zero_grad() before the loop or after the step"
MEANINGS = {  # a piece of what torch says, and what to do about it
    "unscale_() has already been called": "Unscale once a window, after the loop.",
    "unscale_() is being called after step()": "Unscale and clip before the step, or they come too late.",
    "step() has already been called": "Step once a window, after the loop, and then update.",
    "prior to update": "Call update after scaler.step, once a window.",
    "recorded for this optimizer": "There was no gradient to step with: does scaler.scale(loss).backward() run?",
    "_scale is None": "The loss was never scaled: scaler.scale(loss).backward().",
}


def _fault(run: Run, runs: list[Run]) -> str:
    """What befell the window, or else what the gradient is that it stepped with."""
    if run.outcome.error:
        remedies = (fix for key, fix in MEANINGS.items() if key in run.outcome.error)
        return _within(run, " ".join([run.outcome.error, *remedies]))
    if inspect.isgenerator(run.outcome.value) or inspect.iscoroutine(run.outcome.value):
        return "Nothing in your function ran: with yield or async it only gives back an object, so leave that out."
    if run.overflow and run.stepped:
        return _within(run, "The optimizer stepped with inf: scaler.step(optimizer) skips such a step.")
    if not run.overflow and not run.exact:
        return _within(run, _steps(run) or _left(run) or _weights(run, runs))
    if not run.moved <= ROUNDED:
        return _within(run, "The weights changed by more than the optimizer's step: leave them to the optimizer.")
    if (updates := run.counts[2]) != 1:
        often = (
            "is never called: after an overflow the scale would stay too large"
            if not updates
            else (f"is called {times(updates)}: the scale counts optimizer steps")
        )
        return _within(run, f"The step is right, but scaler.update() {often}. The fix: once, after scaler.step.")
    before, after = map(three, run.scales)
    return _within(run, f"The scale went from {before} to {after}: scaler.step has to find the overflow, then update.")


def _within(run: Run, what: str) -> str:
    return within(run.check, what) if run.check != CASES[0][0] else what


def _steps(run: Run) -> str:
    """Too few or too many steps."""
    if len(run.stepped) > 1:
        return f"The optimizer stepped {times(len(run.stepped))} in one window: step once, after the loop."
    if run.stepped:
        return "" if run.stepped[0].isfinite().all() else "The optimizer stepped with a gradient that is not finite."
    if run.counts[1]:
        return f"The step was skipped, though only the window before overflowed: its inf is still in .grad; {CLEAR}."
    return f"The optimizer never stepped, and backward() ran {times(run.counts[0])}: end with scaler.step(optimizer)."


def _left(run: Run) -> str:
    """The gradient of the window before, in this one."""
    if run.before is None:
        return ""
    weights = fit(run.stepped[0], torch.stack([*run.parts.rows, run.before]))
    if weights.residual > ROUNDED or abs(float(weights.values[-1])) <= ROUNDED:
        return ""
    share = three(float(weights.values[-1]))
    return f"The gradient of the window before is still in the step, with the weight {share}: {CLEAR}."


def _weights(run: Run, runs: list[Run]) -> str:
    """The fewest slips that give the gradient of every window, or the weights alone."""
    weights = fit(run.stepped[0], run.parts.rows)
    if weights.residual > ROUNDED:
        share = f"{three(100 * weights.residual)} % of its length come from elsewhere"
        return (
            f"The gradient of the step is no weighted sum of the microbatches' gradients: {share}. clip_grad_norm_ "
            "keeps the direction, clip_grad_value_ does not."
        )
    first = [each for each in runs if each.at == 0 and len(each.stepped) == 1 and not each.overflow]
    best = next((slips for slips in ALL if all(_gives(slips, each) for each in first)), None) if run in first else None
    why = story(best, run.parts) if best else f"an order that has no name here. The right one: {ORDER}."
    return f"{_weights_in_words(weights.values)} in the step, and {float(once(run.parts)[0]):.4g} is right: {why}"


def _gives(slips: Slips, run: Run) -> bool:
    expected = predict(slips, run.parts) @ run.parts.rows
    return bool((run.stepped[0] - expected).norm() <= NEAR * run.stepped[0].norm())


def _weights_in_words(weights: Tensor) -> str:
    """Who weighs what."""
    if float(weights.max() - weights.min()) <= ROUNDED * float(weights.abs().max()):
        return f"Each microbatch weighs {float(weights.mean()):.4g}"
    nothing = 1e-12 * float(weights.abs().max())
    figures = [f"{weight:.4g}" if abs(weight) > nothing else "0" for weight in weights.tolist()]
    return f"The microbatches weigh {join(figures)}"


NEVER = "it never grows, but with this step good_steps + 1 fill the interval"
NEXT_SCALE = Exercise(
    ("scale", "overflow", "good_steps", "interval"),
    {
        "a good step": (1024.0, False, 3, 8),
        "an overflow": (65536.0, True, 3, 8),
        "the last good step of an interval": (1024.0, False, 7, 8),
        "an overflow in its place": (4096.0, True, 7, 8),
        "an interval of one step": (4.0, False, 0, 1),
    },
    scaling.next_scale,
    {
        NEVER: lambda s, bad, n, of: s / 2 if bad else s,
        "it never shrinks": lambda s, bad, n, of: s if bad or n + 1 < of else 2 * s,
        "it doubles after every good step": lambda s, bad, n, of: s / 2 if bad else 2 * s,
        "it doubles after an overflow and halves after an interval": (
            lambda s, bad, n, of: 2 * s if bad else s / 2 if n + 1 == of else s
        ),
        "it doubles at the end of an interval although the step overflowed": (
            lambda s, bad, n, of: 2 * s if n + 1 == of else s / 2 if bad else s
        ),
        "an overflow brings it down to 1": lambda s, bad, n, of: 1.0 if bad else 2 * s if n + 1 == of else s,
        "it shrinks after every step without growth": (
            lambda s, bad, n, of: 2 * s if not bad and n + 1 == of else s / 2
        ),
        "it returns the factor and not the scale": lambda s, bad, n, of: 0.5 if bad else 2.0 if n + 1 == of else 1.0,
        "it grows by 2 and not by a factor of 2": lambda s, bad, n, of: s / 2 if bad else s + 2 * (n + 1 == of),
    },
)


@exercise
def next_scale(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `next_scale(scale, overflow, good_steps, interval)`: the loss scale after one optimizer step.

    >>> next_scale(lambda scale, overflow, good_steps, interval: scale / 2 if overflow else scale)
    3 of 5 checks
    For scale = 1024.0, overflow = False, good_steps = 7, interval = 8 your
    function gives 1024, and 2048 is right: it never grows, but with this
    step good_steps + 1 fill the interval.
      ✓ a good step
      ✓ an overflow
      ✗ the last good step of an interval
      ✓ an overflow in its place
      ✗ an interval of one step

    good_steps: steps without an overflow before this one, since the scale last changed.
    """
    return NEXT_SCALE.judge(function, seconds)
