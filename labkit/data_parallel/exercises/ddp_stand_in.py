"""A stand-in for DistributedDataParallel in one process, for loops that are typed in a cell.

A rank cannot import such a loop. Here it runs on one rank's model alone; tests hold this beside the real one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Alone(nn.Module):
    """One rank's model, wrapped as by DDP: it notes which backward passes end in an all-reduce.

    As in DDP it is the forward that arms the all-reduce, where no_sync is not on and gradients are; the next backward
    through this model then ends in one, whatever is on by then. An all-reduce averages all that is in .grad.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self.armed = self.running = False
        self.entered = self.calls = 0
        self.passes: list[bool] = []  # whether each ended in an all-reduce
        self.late: list[bool] = []  # whether it did not, although no_sync was off by then
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self._arrived)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside do not arm the all-reduce."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        self.entered += 1
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The model's own forward."""
        self.calls += 1
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.armed = True
        return self.module(*arguments, **named)

    def _arrived(self, _: Tensor) -> None:
        if not self.running:
            self.running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finished)

    def _finished(self) -> None:
        self.passes.append(self.armed)
        self.late.append(not self.armed and self.require_backward_grad_sync)
        self.armed = self.running = False
