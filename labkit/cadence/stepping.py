"""The loops of one optimizer step, correct and faulty: what must advance once per window of K microbatches.

A loop takes the loss of a microbatch, the microbatches of one window, and what it steps; it finds the gradients clear
and leaves them so. The weights of the microbatches are correct in all of them; the fault is how often things advance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from labkit.declare import Range

Loss = Callable[[Any], Tensor]
Seed = Annotated[int, Range(0, 9999, help="draws the made examples")]


class Average:
    """An exponential moving average of parameters.

    >>> weight = torch.zeros(1)
    >>> average = Average([weight], decay=0.9)
    >>> _ = weight.fill_(1.0)
    >>> average.update()
    >>> average.values
    [tensor([0.1000])]
    """

    def __init__(self, parameters: Iterable[Tensor], decay: float) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.values = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Move by 1 − decay of the way to the parameters."""
        for value, p in zip(self.values, self.parameters, strict=True):
            value.lerp_(p, 1 - self.decay)


@dataclass(frozen=True)
class Training:
    """What a loop steps: an optimizer, and where there are any a schedule and an average of the weights."""

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    average: Average | None = None
    world_size: int = 1

    def step_schedule(self) -> None:
        """One step of the schedule, if there is one."""
        if self.scheduler:
            self.scheduler.step()

    def update_average(self) -> None:
        """One update of the average, if there is one."""
        if self.average:
            self.average.update()


def adam_states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Adam's state of every parameter that has a gradient, made where it is missing.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> weight.sum().backward()
    >>> adam_states(torch.optim.Adam([weight]))
    [{'step': tensor(0.), 'exp_avg': tensor([0.]), 'exp_avg_sq': tensor([0.])}]

    torch makes it at the first step and starts to count there: anything set before is lost.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for p in parameters:
        if not optimizer.state[p]:
            zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}
    return [optimizer.state[p] for p in parameters]


@contextmanager
def learning_rate_times(factor: float, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer with other learning rates, for a while."""
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate


# The loops. K: microbatches of the window.


def once_per_window(loss: Loss, microbatches: Sequence[Any], training: Training) -> None:
    """K backward passes; then everything advances once."""
    for microbatch in microbatches:
        (loss(microbatch) / len(microbatches)).backward()
    training.optimizer.step()
    training.step_schedule()
    training.update_average()
    training.optimizer.zero_grad()


def adam_count_per_microbatch(loss: Loss, microbatches: Sequence[Any], training: Training) -> None:
    """The t of Adam's bias correction counts microbatches; m, v and the parameters advance once."""
    for microbatch in microbatches:
        (loss(microbatch) / len(microbatches)).backward()
    for state in adam_states(training.optimizer):
        state["step"] += len(microbatches) - 1  # the optimizer's step counts the last
    training.optimizer.step()
    training.step_schedule()
    training.update_average()
    training.optimizer.zero_grad()


def memory_per_microbatch(loss: Loss, microbatches: Sequence[Any], training: Training) -> None:
    """What the optimizer remembers (a momentum; m, v and t) advances K times; the parameters move with the last."""
    for at, microbatch in enumerate(microbatches, 1):
        (loss(microbatch) / len(microbatches)).backward()
        with learning_rate_times(1.0 if at == len(microbatches) else 0.0, training.optimizer):
            training.optimizer.step()
        training.optimizer.zero_grad()
    training.step_schedule()
    training.update_average()


def step_per_microbatch(loss: Loss, microbatches: Sequence[Any], training: Training) -> None:
    """The optimizer steps at every microbatch, with 1/K of the learning rate."""
    with learning_rate_times(1 / len(microbatches), training.optimizer):
        for microbatch in microbatches:
            loss(microbatch).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    training.step_schedule()
    training.update_average()


def decay_per_microbatch(loss: Loss, microbatches: Sequence[Any], training: Training) -> None:
    """The weights are multiplied by 1 − ηλ at every microbatch; all else advances once."""
    for at, microbatch in enumerate(microbatches, 1):
        (loss(microbatch) / len(microbatches)).backward()
        if at < len(microbatches):  # the optimizer's step does the last
            for group in training.optimizer.param_groups:
                for p in group["params"]:
                    p.data *= 1 - group["lr"] * group["weight_decay"]
    training.optimizer.step()
    training.step_schedule()
    training.update_average()
    training.optimizer.zero_grad()


def ema_per_microbatch(loss: Loss, microbatches: Sequence[Any], training: Training) -> None:
    """The average of the weights is updated at every microbatch, K − 1 times with weights that have not moved."""
    for at, microbatch in enumerate(microbatches, 1):
        (loss(microbatch) / len(microbatches)).backward()
        if at == len(microbatches):
            training.optimizer.step()
        training.update_average()
    training.step_schedule()
    training.optimizer.zero_grad()


def schedule_per_microbatch(loss: Loss, microbatches: Sequence[Any], training: Training) -> None:
    """The schedule takes K steps for one of the optimizer."""
    for microbatch in microbatches:
        (loss(microbatch) / len(microbatches)).backward()
    training.optimizer.step()
    for _ in microbatches:
        training.step_schedule()
    training.update_average()
    training.optimizer.zero_grad()


def schedule_per_process(loss: Loss, microbatches: Sequence[Any], training: Training) -> None:
    """The schedule takes W steps for one of the optimizer: a wrapper steps it once for every process."""
    for microbatch in microbatches:
        (loss(microbatch) / len(microbatches)).backward()
    training.optimizer.step()
    for _ in range(training.world_size):
        training.step_schedule()
    training.update_average()
    training.optimizer.zero_grad()
