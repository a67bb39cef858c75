"""Training steps as people write them, right and faulty: what an entry of the corpus is, and all of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.audit.tasks import Task

FILES = (
    "right_loops",
    "right_data",
    "right_structures",
    "right_optimizers",
    "right_models",
    "faulty_weights",
    "faulty_counts",
    "faulty_clipping",
    "faulty_cadence",
    "faulty_memory",
    "faulty_schedules",
    "faulty_state",
    "faulty_layers",
    "faulty_pairs",
    "faulty_more_pairs",
    "untellable",
)
Run = Callable[[list[Any]], object]


@dataclass(frozen=True)
class Plan:
    """What one logical update is meant to be, and how a fault is done where its word leaves a choice."""

    optimizers: Callable[[nn.Module], list[Optimizer]]
    max_norm: float | None = None
    max_value: float | None = None
    schedule: Callable[[int], float] | None = None  # the learning rate over its base, by updates made
    average: float | None = None  # the decay of an average that the step holds under the name `average`
    first_copied: bool = False  # whether the first update of the average copies the weights
    scale: float = 1.0  # of the loss
    precision: torch.dtype | None = None  # what the matmuls are rounded to, where it is coarser than the model
    declared: int = 0  # K of the code, where the window has another number of microbatches
    processes: int = 1  # W of the code
    clips: str = "running"  # what a clip in the loop sees: the running sum, each microbatch's "part", or its own "mean"
    cleared: bool = True  # whether a step in the loop is followed by zero_grad
    unmoved: bool = False  # whether steps that only feed what the optimizer remembers keep the learning rate
    shared_tail: bool = False  # whether the tokens of a tail weigh alike
    delayed: bool = False  # whether a stale gradient comes alone, one window late, and not on top of the new one
    kept: Callable[[str], bool] = lambda name: True  # the parameters whose gradient goes stale


@dataclass(frozen=True)
class Step:
    """One step, what it is judged with, and the judgement it must get.

    faults: the words that must be found, weightiest first. readings: where it cannot be told, the sets of faults
    that explain what was measured equally well.
    """

    name: str
    structure: str
    build: Callable[[], tuple[nn.Module, Run]]
    microbatches: list[Any]
    loss_sum: Callable[[nn.Module, Any], tuple[Tensor, int | Tensor]]
    concat: Callable[[list[Any]], Any] | None
    windows: int
    objective: str
    verdict: str
    faults: tuple[str, ...]
    cannot_tell: bool = False
    readings: tuple[tuple[str, ...], ...] = ()
    task: Task = field(kw_only=True, repr=False)
    plan: Plan = field(kw_only=True, repr=False)


STEPS: list[Step] = []
Made = Callable[[nn.Module], Run]


def faulty(
    *faults: str,
    structure: str,
    task: Task,
    plan: Plan,
    windows: int = 1,
    objective: str = "token-mean",
    readings: Iterable[tuple[str, ...]] = (),
) -> Callable[[Made], Made]:
    """Put a function that makes the step for a model into the corpus."""

    def add(made: Made) -> Made:
        def build() -> tuple[nn.Module, Run]:
            model = task.model()
            return model, made(model)

        STEPS.append(
            Step(
                made.__name__,
                structure,
                build,
                list(task.microbatches),
                task.loss_sum,
                task.concat,
                windows,
                objective,
                faults[0] if faults else objective,
                faults,
                bool(readings),
                tuple(readings),
                task=task,
                plan=plan,
            )
        )
        return made

    return add


def right(structure: str, task: Task, plan: Plan, **rest: Any) -> Callable[[Made], Made]:
    """The same for a step in which there is nothing to find."""
    return faulty(structure=structure, task=task, plan=plan, **rest)


def one(kind: Callable[..., Optimizer], **options: Any) -> Callable[[nn.Module], list[Optimizer]]:
    """One optimizer for every parameter that wants a gradient."""
    return lambda model: [kind([p for p in model.parameters() if p.requires_grad], **options)]


def steps() -> list[Step]:
    """Every entry of the corpus."""
    for name in FILES:
        importlib.import_module(f"tests.audit.{name}")
    return STEPS
