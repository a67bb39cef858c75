"""One side of the test: its step run with seeded random numbers, watched or traced, and its gradient in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.audit import Report, audit, inspect
from labkit.audit.references import LossSum, Model64, References
from labkit.audit.runs import Build, Step, seeded
from labkit.audit.watch import Watch
from labkit.audit.window import Sampled, Window
from labkit.errors import LabError

Nudge = Callable[[nn.Module], AbstractContextManager[None]]
SEED = 0  # of both sides
EVERY = 2**62  # coordinates looked at


@dataclass(frozen=True, eq=False)
class Trace:
    """A training run: the mean loss and the length of its gradient before and after each update."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    first: Tensor  # how the parameters moved in the first update
    skipped: int  # updates that moved no weight


@dataclass(frozen=True, eq=False)
class TestedStep:
    """The base or the candidate, with its audit and its first update."""

    name: str
    build: Build
    microbatches: list[Any]
    model: nn.Module
    report: Report
    window: Window  # the first update, watched
    random_layers: tuple[str, ...]
    batch_layers: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Valid tokens of one update."""
        return sum(self.report.counts)

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest that it computes in."""
        kinds = [p.dtype for p in self.model.parameters() if p.is_floating_point()]
        return max([*kinds, *([self.window.autocast] if self.window.autocast else [])], key=_eps)

    @property
    def gradient(self) -> Tensor:
        """The gradient that reached the optimizer in the first update, before a clip in the right place; float64."""
        window = self.window
        clips = [clip for clip in window.clips if clip.passes == len(window.passes_before_step)]
        if clips:
            return clips[0].gradient
        parts = window.steps or window.passes
        return torch.stack([each.gradient for each in parts]).sum(0) if parts else torch.zeros_like(window.start)

    @property
    def delta(self) -> Tensor:
        """How the parameters moved in the first update."""
        return self.window.end - self.window.start


def examine(
    name: str, build: Build, microbatches: Sequence[Any], loss_sum: LossSum, concat: Any, windows: int, objective: str
) -> TestedStep:
    """A side, audited, inspected and watched in its first update. LabError names the side that raises."""
    try:
        report = audit(build, microbatches, loss_sum, concat=concat, windows=windows, objective=objective)
        with seeded(SEED):
            model, step = build()
            findings = inspect(model)
            window = Watch(model, Sampled(model, EVERY)).call(step, list(microbatches))
    except LabError as error:
        raise LabError(f"the {name}: {error}") from error
    except Exception as error:
        raise LabError(f"the {name} raises {type(error).__name__}: {error}: try it by itself first") from error
    layers = [
        tuple(f"{each.name or 'the model'} ({each.layer})" for each in findings if each.kind == kind)
        for kind in ("draws random numbers", "looks at the batch")
    ]
    return TestedStep(name, build, list(microbatches), model, report, window, *layers)


class Twin:
    """A float64 copy of a side's model, which takes the weights of either side."""

    def __init__(self, side: TestedStep, loss_sum: LossSum) -> None:
        self.side, self.sampled = side, Sampled(side.model, EVERY)
        self.copy = Model64(side.model, self.sampled, loss_sum)

    @torch.no_grad()
    def at(self, weights: Tensor) -> References:
        """The gradient of each of its microbatches' summed loss at these weights, [K, P]."""
        for p, values in zip(self.copy.model.parameters(), weights.split(self.sampled.sizes), strict=True):
            p.copy_(values.view_as(p))
        return self.copy.references(self.side.microbatches)


def trace(side: TestedStep, twin: Twin, windows: int, nudge: Nudge | None = None) -> Trace:
    """The first `windows` updates of a side, judged by the twin; with a nudge, of moved gradients."""
    losses, norms, skipped = [], [], 0
    with seeded(SEED):
        model, step = side.build()
        weights = [twin.sampled.read(model.parameters())]
        with nudge(model) if nudge else nullcontext():
            for _ in range(windows):
                update(step, side.microbatches)
                weights.append(twin.sampled.read(model.parameters()))
                skipped += torch.equal(weights[-1], weights[-2])
    for each in weights:
        loss, norm = _loss_and_norm(twin, each)
        losses.append(loss)
        norms.append(norm)
    return Trace(tuple(losses), tuple(norms), weights[1] - weights[0], skipped)


def update(step: Step, microbatches: list[Any]) -> None:
    """One update."""
    try:
        step(list(microbatches))
    except Exception as error:
        raise LabError(f"the step raises {type(error).__name__}: {error}: try it by itself first") from error


def _loss_and_norm(twin: Twin, weights: Tensor) -> tuple[float, float]:
    if not weights.isfinite().all():
        return math.nan, math.nan
    references = twin.at(weights)
    N = float(references.counts.sum())
    return float(references.losses.sum()) / N, float(references.gradients.sum(0).norm()) / N


def _eps(kind: torch.dtype) -> float:
    return torch.finfo(kind).eps
