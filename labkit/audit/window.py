"""The record of one call of a training step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.fit import SAMPLE, coordinates


class Sampled:
    """The coordinates of a model's parameters that are read: all, or a seeded sample of every layer."""

    def __init__(self, model: nn.Module, sample: int = SAMPLE) -> None:
        self.sizes = [p.numel() for p in model.parameters()]
        self.all = sum(self.sizes) <= sample
        self.at = coordinates(self.sizes, sample)

    def read(self, tensors: Iterable[Tensor | None]) -> Tensor:
        """Their values there, float64, 0 where a tensor is missing."""
        parts = []
        for each, size, at in zip(tensors, self.sizes, self.at, strict=True):
            if each is None:
                parts.append(torch.zeros(size if self.all else len(at), dtype=torch.float64))
                continue
            dense = each.detach().to_dense() if each.is_sparse else each.detach()
            values = dense.reshape(-1)
            parts.append((values if self.all else values[at.to(values.device)]).to("cpu", torch.float64))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    @staticmethod
    def size(tensors: Iterable[Tensor | None], kind: str = "norm") -> float:
        """Length of all their values together, or the largest of them."""
        values = [each.detach() for each in tensors if each is not None and each.numel()]
        if kind == "value":
            return max((float(each.abs().max()) for each in values), default=0.0)
        return math.hypot(*(float(each.double().norm()) for each in values))


@dataclass
class Pass:
    """One backward pass: the gradient it brought, and the weights it was run with."""

    gradient: Tensor
    size: float  # its length, all coordinates
    state: dict[str, Tensor] | None  # all weights, where they had moved since the window began and the model is small


@dataclass
class Step:
    """One step of an optimizer."""

    optimizer: int
    kind: str
    passes: int  # backward passes before it
    gradient: Tensor  # of its own parameters, 0 elsewhere
    size: float  # its length, all coordinates
    mask: Tensor  # which coordinates are its own
    rate: float
    decay: bool
    before: Tensor
    moved: bool = False
    inner: bool = False  # it called another step, with this gradient
    summed: bool = False  # its gradient is the sum of what it was called with, before what it makes of that
    gathers: bool = False  # it moved nothing, and only added its gradient to a buffer of the optimizer


@dataclass
class Clip:
    """One call of a clipping function."""

    kind: str
    passes: int
    gradient: Tensor  # before it
    size: float  # its length, or its largest value
    limit: float
    clock: int


@dataclass
class Window:
    """Everything that one call of the step did."""

    passes: list[Pass] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    schedule_steps: dict[int, int] = field(default_factory=dict)  # steps of each schedule
    averages: dict[Any, int] = field(default_factory=dict)  # updates of each average
    decays: dict[int, int] = field(default_factory=dict)  # how often each parameter was shrunk by hand
    gradient_buffers: set[int] = field(default_factory=set)  # buffers that took gradients in
    square_buffers: set[int] = field(default_factory=set)  # those that took their squares in
    buffer_decays: dict[int, int] = field(default_factory=dict)  # how often each buffer was made smaller
    unscales: list[tuple[int, int]] = field(default_factory=list)  # passes before each, and its clock
    scale: float = 1.0
    manual_gradient: Tensor = field(default_factory=lambda: torch.zeros(0))  # when weights were first moved by hand
    moves: int = 0  # how often the weights had moved when they were looked at
    skipped: int = 0  # optimizer steps that the scaler left out
    autocast: torch.dtype | None = None
    loss_dtypes: set[torch.dtype] = field(default_factory=set)  # in which backwards began
    inputs: list[tuple[int, int]] = field(default_factory=list)  # shape of the first [b, T] that each forward was given
    adam_counts: dict[int, tuple[float, float]] = field(default_factory=dict)  # Adam's own, at first and in the end
    start: Tensor = field(default_factory=lambda: torch.zeros(0))
    end: Tensor = field(default_factory=lambda: torch.zeros(0))
    leftover: Tensor = field(default_factory=lambda: torch.zeros(0))  # gradient that .grad holds at the end

    @property
    def passes_before_step(self) -> list[Pass]:
        """The backward passes that the last optimizer step could see; all, where there is no step."""
        return self.passes[: max((step.passes for step in self.steps), default=len(self.passes))]

    @property
    def without_gradient(self) -> bool:
        """Whether the weights were moved once by hand, and no gradient appeared anywhere."""
        gradient = self.passes or self.leftover.any() or self.manual_gradient.any()
        return not self.steps and not gradient and self.moves == 1

    @property
    def effective_steps(self) -> list[Step]:
        """The steps, without calls that only wait for the others of their window."""
        steps: list[Step] = []
        for key in dict.fromkeys(step.optimizer for step in self.steps):
            own = [step for step in self.steps if step.optimizer == key]
            moving = [step for step in own if step.moved]
            if any(step.inner for step in own):
                steps += [step for step in own if step.inner or step.moved]
            elif sum(step.gathers for step in own) > 1 and len(moving) == 1:
                total = torch.stack([step.gradient for step in own]).sum(0)
                steps.append(replace(moving[0], gradient=total, size=float(total.norm()), summed=True))
            else:
                steps += own
        return steps
