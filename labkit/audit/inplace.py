"""Tensors that a step changes in place itself: averages, moments and decay by hand, and weights moved by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from labkit.audit.window import Window

MIXES = ("add_", "lerp_", "_foreach_add_", "_foreach_lerp_", "__iadd__")  # a buffer takes something in
SHRINKS = ("mul_", "lerp_", "_foreach_mul_", "_foreach_lerp_", "__imul__")  # a buffer forgets
NOTHING = ("requires_grad_", "detach_", "share_memory_")  # in spite of their names, no values change


class InPlace(TorchFunctionMode):
    """Sees every operation in place that Python code calls outside the optimizers' steps."""

    def __init__(
        self, window: Window, parameters: Sequence[Tensor], stepping: Callable[[], int], gradient: Callable[[], Tensor]
    ) -> None:
        super().__init__()
        self.window, self.parameters, self.stepping, self.gradient = window, parameters, stepping, gradient
        self.buffers: dict[int, Tensor] = {}  # held, so that no other tensor takes their place in memory
        self.pointers = {p.data_ptr() for p in parameters}
        self.touched = -1  # backward passes before the weights were last changed by hand

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        inplace = (name.endswith("_") and not name.endswith("__")) or name in ("__imul__", "__iadd__", "__isub__")
        if not inplace or not args or name in NOTHING or self.stepping():
            return func(*args, **(kwargs or {}))
        target = args[0]
        targets = target if isinstance(target, (list, tuple)) else [target]
        weights = any(isinstance(each, Tensor) and _pointer(each) in self.pointers for each in targets)
        if weights and self.touched != len(self.window.passes):
            self.touched, self.window.manual_gradient = len(self.window.passes), self.gradient()
        wanted = isinstance(target, Tensor) and (weights or name == "copy_")
        before = target.detach().clone() if wanted else None
        result = func(*args, **(kwargs or {}))
        with torch.no_grad():
            self.changed(name, targets, [*args[1:], *(kwargs or {}).values()], before)
        return result

    def changed(self, name: str, targets: Sequence[Any], sources: Sequence[Any], before: Tensor | None) -> None:
        """One operation in place, on a tensor or a list of them."""
        weights = {p.data_ptr(): at for at, p in enumerate(self.parameters)}
        gradients = {_pointer(p.grad) for p in self.parameters if p.grad is not None}
        flat = [each for source in sources for each in (source if isinstance(source, (list, tuple)) else [source])]
        pointers = {_pointer(each) for each in flat if isinstance(each, Tensor) and each.dim()}
        for each in targets:
            if not isinstance(each, Tensor):
                continue
            pointer = _pointer(each)
            if pointer in weights:
                self._shrunk(weights[pointer], each, before)
            elif pointer not in gradients:
                self.buffers[pointer] = each
                self._buffer(
                    name,
                    pointer,
                    bool(pointers & weights.keys()),
                    bool(pointers & gradients),
                    self._mixed(name, each, before),
                )

    def _mixed(self, name: str, buffer: Tensor, before: Tensor | None) -> bool:
        """Whether a buffer was overwritten by something between itself and a parameter."""
        if name != "copy_" or before is None:
            return False
        change = buffer.detach() - before
        for p in self.parameters:
            if p.shape == buffer.shape and bool(change.any()):
                way = p.detach() - before
                share = float((change * way).sum() / (way * way).sum().clamp(min=1e-300))
                if 0 < share < 1 and torch.allclose(change, share * way, rtol=1e-3, atol=1e-6 * float(way.abs().max())):
                    return True
        return False

    def _shrunk(self, at: int, weight: Tensor, before: Tensor | None) -> None:
        """A parameter that became a multiple of itself was decayed by hand."""
        if before is None or before.shape != weight.shape or not before.is_floating_point() or not before.any():
            return
        factor = float((weight * before).sum() / (before * before).sum())
        if 0 < factor < 1 and torch.allclose(weight, factor * before, rtol=1e-5, atol=0.0):
            self.window.decays[at] = self.window.decays.get(at, 0) + 1

    def _buffer(self, name: str, pointer: int, weights: bool, gradients: bool, mixed: bool) -> None:
        """A tensor that takes parameters in is an average; one that takes gradients in and forgets is a moment."""
        if (weights and name in MIXES) or mixed:
            self.window.averages[pointer] = self.window.averages.get(pointer, 0) + 1
        if gradients and name in ("addcmul_", "_foreach_addcmul_"):
            self.window.square_buffers.add(pointer)
        if gradients and name in (*MIXES, "addcmul_", "_foreach_addcmul_"):
            self.window.gradient_buffers.add(pointer)
        if name in SHRINKS:
            self.window.buffer_decays[pointer] = self.window.buffer_decays.get(pointer, 0) + 1


def _pointer(tensor: Tensor) -> int:
    """Where its numbers lie; inside a function transform they lie nowhere."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return -id(tensor)
