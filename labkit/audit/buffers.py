"""Whether an optimizer only accumulates gradients internally, to step with their sum later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

DEEP = 4  # attribute, parameter, name, part
SMALL = 1_000_000  # parameters of an optimizer that is looked at


class Buffers:
    """The tensors that an optimizer holds beside its parameters, as they are before a step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        small = sum(p.numel() for p in parameters) <= SMALL
        self.gradients = [p.grad.detach().clone() for p in parameters if small]
        self.before = {path: each.detach().clone() for path, each in _held(optimizer)} if small else {}

    def accumulated(self) -> bool:
        """Whether some buffer of every parameter has grown by a multiple of its gradient, and by nothing else."""
        grown = [
            each.detach() - before if (before := self.before.get(path)) is not None else each.detach()
            for path, each in _held(self.optimizer)
            if path not in self.before or self.before[path].shape == each.shape
        ]
        return bool(self.gradients) and all(
            any(_multiple(each, gradient) for each in grown) for gradient in self.gradients if gradient.any()
        )


def _held(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in an optimizer's state and attributes, each with the path that leads to it."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim() and not value.requires_grad:
            yield path, value
        return
    inside: Any = ()
    if not path:
        inside = ((name, each) for name, each in vars(value).items() if name != "param_groups")
    elif isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    if len(path) < DEEP:
        for key, each in inside:
            yield from _held(each, (*path, id(key) if isinstance(key, Tensor) else key))


def _multiple(grown: Tensor, gradient: Tensor) -> bool:
    if grown.shape != gradient.shape or not grown.any():
        return False
    share = float((grown * gradient).sum() / (gradient * gradient).sum())
    return torch.allclose(grown, share * gradient, rtol=1e-4, atol=1e-6 * abs(share) * float(gradient.abs().max()))
