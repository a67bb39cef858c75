"""What a step did: the gradient at every optimizer step, and the parameters, averages and counts after each window."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.audit.steps import Step


@dataclass(frozen=True)
class Event:
    """The parameters that one optimizer step is for, the gradient it found, flat, and the learning rates it had."""

    owned: tuple[int, ...]
    gradient: Tensor
    rates: tuple[float, ...]


@dataclass
class Window:
    """One logical update."""

    before: Tensor
    events: list[Event] = field(default_factory=list)
    after: Tensor = field(default_factory=lambda: torch.zeros(0))
    average: Tensor = field(default_factory=lambda: torch.zeros(0))
    rates: tuple[float, ...] = ()  # with which the next window begins
    counts: tuple[float, ...] = ()  # Adam's step, of every parameter that has one


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().double().reshape(-1) for each in tensors])


def weights_of(model: nn.Module) -> Tensor:
    return flat(list(model.parameters()))


@contextmanager
def watched(model: nn.Module, events: list[Event], seen: list[Optimizer]) -> Iterator[None]:
    """Note the gradient at every optimizer step of the model's parameters; after the closure, where there is one."""
    parameters = list(model.parameters())

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        groups = optimizer.param_groups
        theirs = {id(p) for group in groups for p in group["params"]}
        owned = tuple(at for at, p in enumerate(parameters) if id(p) in theirs)
        if not owned:
            return None
        if optimizer not in seen:
            seen.append(optimizer)

        def note() -> None:
            scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler for optimizers that unscale themselves
            rates = tuple(float(group["lr"]) for group in groups)
            found = [parameters[at] for at in owned]
            total = flat([torch.zeros_like(p) if p.grad is None else p.grad for p in found])
            events.append(Event(owned, total / (1.0 if scale is None else float(scale)), rates))

        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            return note()

        def noted() -> Any:
            loss = closure()
            note()
            return loss

        return (args[0], noted), {}

    handle = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


def held(step: Any, name: str) -> Any:
    """What a step holds under a name: an attribute of its object, or a variable of its closure."""
    owner = getattr(step, "__self__", step)
    if hasattr(owner, name):
        return getattr(owner, name)
    return inspect.getclosurevars(step).nonlocals.get(name) if inspect.isfunction(step) else None


def averaged(average: Any) -> Tensor:
    if average is None:
        return torch.zeros(0)
    if isinstance(average, dict):
        average = list(average.values())
    return flat(list(average.parameters()) if isinstance(average, nn.Module) else average)


def run(entry: Step) -> list[Window]:
    """Make the step and let it take its windows."""
    model, step = entry.build()
    found: list[Window] = []
    seen: list[Optimizer] = []
    for _ in range(entry.windows):
        window = Window(weights_of(model))
        with watched(model, window.events, seen):
            step(list(entry.microbatches))
        closed(window, model, seen, held(step, "average"))
        found.append(window)
    return found


def closed(window: Window, model: nn.Module, optimizers: list[Optimizer], average: Any) -> None:
    window.after, window.average = weights_of(model), averaged(average)
    window.rates = tuple(float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups)
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    window.counts = tuple(float(state["step"]) for state in states if "step" in state)


def gap(found: list[Window], expected: list[Window]) -> float:
    """The largest relative difference in anything that was noted; infinite where the numbers of steps differ."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if len(a.events) != len(b.events):
            return math.inf
        for x, y in zip(in_order(a.events), in_order(b.events), strict=True):
            worst = max(worst, apart(x.gradient, y.gradient), apart(torch.tensor(x.rates), torch.tensor(y.rates)))
        worst = max(
            worst,
            apart(a.after, b.after, b.after - b.before),
            apart(a.average, b.average, b.after - b.before),
            apart(torch.tensor(a.rates), torch.tensor(b.rates)),
            apart(torch.tensor(a.counts), torch.tensor(b.counts)),
        )
    return worst


def in_order(events: list[Event]) -> list[Event]:
    """The steps of one optimizer in their order; which of several comes first makes no difference."""
    return sorted(events, key=lambda event: event.owned)


def apart(x: Tensor, y: Tensor, size: Tensor | None = None) -> float:
    """‖x − y‖ over the size of y, or of what it has changed by."""
    if x.shape != y.shape:
        return math.inf
    if not len(x):
        return 0.0
    difference, length = float((x - y).norm()), float((y if size is None else size).norm())
    if not math.isfinite(difference) or (difference and not length):
        return math.inf
    return difference / length if difference else 0.0
