"""One call of a training step, watched: hooks of torch and of Python see what it does, and nothing of it is changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

from labkit.audit.window import Clip, Pass, Sampled, Step, Window

PASSES = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}
CLIPS = {
    torch.nn.utils.clip_grad_norm_.__wrapped__.__code__: "norm",  # type: ignore[attr-defined]
    torch.nn.utils.clip_grad_value_.__wrapped__.__code__: "value",  # type: ignore[attr-defined]
}
SMALL = 1_000_000  # parameters of a model whose weights are kept wherever they have moved
MIXES = ("add_", "lerp_", "_foreach_add_", "_foreach_lerp_", "__iadd__")  # a buffer takes something in
SHRINKS = ("mul_", "lerp_", "_foreach_mul_", "_foreach_lerp_", "__imul__")  # a buffer forgets


class Watch:
    """Watches calls of a step on one model; `call` gives the window, and everything touched is as it was."""

    def __init__(self, model: nn.Module, sampled: Sampled) -> None:
        self.model, self.sampled = model, sampled
        self.parameters = list(model.parameters())
        self.index = {id(p): at for at, p in enumerate(self.parameters)}

    def call(self, step: Callable[[Any], object], microbatches: Sequence[Any]) -> Window:
        """Run the step once, unchanged."""
        self.window, self.depth, self.stepping = Window(), 0, 0
        self.incoming: dict[int, Tensor] = {}
        self.kept: dict[int, Tensor] = {}  # buffers seen, so that no other tensor takes their place in memory
        self.clock, self.optimizers = 0, dict[int, Any]()
        self.window.start = self._weights()
        self.pointers = {p.data_ptr() for p in self.parameters}
        with ExitStack() as stack:
            for at, p in enumerate(self.parameters):
                if p.requires_grad:
                    stack.callback(p.register_hook(self._arriving(at)).remove)
            stack.callback(self.model.register_forward_pre_hook(self._given, with_kwargs=True).remove)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.enter_context(_Ops(self))
            stack.callback(sys.setprofile, sys.getprofile())
            sys.setprofile(self._profile)
            step(microbatches)
        self._close_pass()
        self.window.end = self._weights()
        self.window.left = self._gradient()
        for key, optimizer in self.optimizers.items():
            self.window.counts[key] = self.window.counts[key][0], _count(optimizer)
        return self.window

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _weights(self) -> Tensor:
        return self.sampled.read(self.parameters)

    def _gradient(self) -> Tensor:
        return self.sampled.read(p.grad for p in self.parameters)

    # forward and backward passes

    def _given(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        kind = next(self.model.parameters()).device.type
        if torch.is_autocast_enabled(kind):
            self.window.autocast = torch.get_autocast_dtype(kind)
        found = [each for each in (*arguments, *named.values()) if isinstance(each, Tensor) and each.dim() == 2]
        if found:
            self.window.inputs.append((found[0].shape[0], found[0].shape[1]))

    def _arriving(self, at: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            seen = self.incoming.get(at)
            self.incoming[at] = gradient.detach().clone() if seen is None else seen + gradient.detach()

        return hook

    def _close_pass(self) -> None:
        if self.incoming:
            gradients = [self.incoming.get(at) for at in range(len(self.parameters))]
            brought, size = self.sampled.read(gradients), Sampled.size(gradients)
            self.incoming = {}
            moved = not torch.equal(self._weights(), self.window.start)
            self.window.passes.append(Pass(brought, size, self._state() if moved else None))

    # Python calls

    def _profile(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if code in PASSES:
            self._pass(event)
        elif event == "call" and code in CLIPS:
            limit = frame.f_locals.get("max_norm", frame.f_locals.get("clip_value"))
            limit = float(limit) if isinstance(limit, (int, float, Tensor)) else float("nan")
            kind, passes = CLIPS[code], len(self.window.passes)
            size = Sampled.size((p.grad for p in self.parameters), kind)
            self.window.clips.append(Clip(kind, passes, self._gradient(), size, limit, self._tick()))
        elif code.co_name in NAMES:
            self._method(code.co_name, event, frame)

    def _pass(self, event: str) -> None:
        if event == "call":
            self.depth += 1
        elif event == "return":
            self.depth -= 1
            if not self.depth:
                self._close_pass()

    def _method(self, name: str, event: str, frame: FrameType) -> None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, LRScheduler) and name == "step" and event == "call":
            outer = frame.f_back.f_locals.get("self") if frame.f_back else None
            if not isinstance(outer, LRScheduler):  # neither its first step, in its making, nor part of another's
                self.window.schedule[id(owner)] = self.window.schedule.get(id(owner), 0) + 1
        elif isinstance(owner, torch.amp.GradScaler):
            self._scaler(owner, name, event)
        elif isinstance(owner, AveragedModel) and name == "update_parameters" and event == "call":
            self.window.averages[id(owner)] = self.window.averages.get(id(owner), 0) + 1

    def _scaler(self, scaler: torch.amp.GradScaler, name: str, event: str) -> None:
        if not scaler.is_enabled():
            return
        if name == "unscale_" and event == "call":
            self.window.scale = scaler.get_scale()
            self.window.unscaled.append((len(self.window.passes), self._tick()))
        elif name == "step":
            stepped = len(self.window.steps)
            if event == "call":
                self.window.scale, self.steps_before = scaler.get_scale(), stepped
            elif stepped == self.steps_before:
                self.window.skipped += 1

    # optimizer steps

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.stepping or not any(id(p) in self.index for p in _parameters(optimizer)):
            return None
        self.stepping = id(optimizer)
        closure = arguments[1] if len(arguments) > 1 else named.get("closure")
        if closure is None or not callable(closure):
            self._take(optimizer)
            return None
        taken = False

        def watched() -> Any:
            nonlocal taken
            inside, self.stepping = self.stepping, 0
            loss = closure()
            self.stepping = inside
            if not taken:
                self._take(optimizer)
                taken = True
            return loss

        rest = {name: each for name, each in named.items() if name != "closure"}
        return (arguments[0], watched, *arguments[2:]), rest

    def _take(self, optimizer: Any) -> None:
        mine = {self.index[id(p)] for p in _parameters(optimizer) if id(p) in self.index}
        own = self.sampled.read(torch.ones_like(p) if at in mine else None for at, p in enumerate(self.parameters))
        gradients = [p.grad if at in mine else None for at, p in enumerate(self.parameters)]
        found = getattr(optimizer, "grad_scale", None)  # a fused step divides by it itself
        scale = 1.0 if found is None else float(found)
        if any(group.get("maximize") for group in optimizer.param_groups):
            scale = -scale
        step = Step(
            id(optimizer),
            type(optimizer).__name__,
            len(self.window.passes),
            self.sampled.read(gradients) / scale,
            Sampled.size(gradients) / abs(scale),
            own.bool(),
            max(float(group.get("lr", 0.0)) for group in optimizer.param_groups),
            any(group.get("weight_decay", 0.0) for group in optimizer.param_groups),
            self._weights(),
        )
        self.optimizers[id(optimizer)] = optimizer
        self.window.counts.setdefault(id(optimizer), (_count(optimizer), 0.0))
        self.window.steps.append(step)

    def _state(self) -> dict[str, Tensor] | None:
        if sum(self.sampled.sizes) > SMALL:
            return None
        return {name: each.detach().clone() for name, each in self.model.state_dict().items()}

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self.stepping != id(optimizer):
            return
        self.stepping = 0
        step = self.window.steps[-1]
        step.moved = not torch.equal(step.before, self._weights())

    # tensors changed in place, outside the optimizers' steps

    def changed(self, name: str, target: Any, sources: Sequence[Any], before: Tensor | None) -> None:
        """One operation in place, on a tensor or a list of them, outside the optimizers' steps."""
        targets = target if isinstance(target, (list, tuple)) else [target]
        weights = {p.data_ptr(): at for at, p in enumerate(self.parameters)}
        gradients = {_pointer(p.grad) for p in self.parameters if p.grad is not None}
        met = [each for source in sources for each in (source if isinstance(source, (list, tuple)) else [source])]
        pointers = {_pointer(each) for each in met if isinstance(each, Tensor) and each.dim()}
        for each in targets:
            if not isinstance(each, Tensor):
                continue
            pointer = _pointer(each)
            if pointer in weights:
                self._shrunk(weights[pointer], each, before)
            elif pointer not in gradients:
                self.kept[pointer] = each
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
        moved = buffer.detach() - before
        for p in self.parameters:
            if p.shape == buffer.shape and bool(moved.any()):
                way = p.detach() - before
                share = float((moved * way).sum() / (way * way).sum().clamp(min=1e-300))
                if 0 < share < 1 and torch.allclose(moved, share * way, rtol=1e-3, atol=1e-6 * float(way.abs().max())):
                    return True
        return False

    def _shrunk(self, at: int, weight: Tensor, before: Tensor | None) -> None:
        """A parameter that became a multiple of itself was decayed by hand."""
        if before is None or before.shape != weight.shape or not before.any():
            return
        factor = float((weight * before).sum() / (before * before).sum())
        if 0 < factor < 1 and torch.allclose(weight, factor * before, rtol=1e-5, atol=0.0):
            self.window.decays[at] = self.window.decays.get(at, 0) + 1

    def _buffer(self, name: str, pointer: int, weights: bool, gradients: bool, mixed: bool) -> None:
        """A tensor that takes parameters in is an average; one that takes gradients in and forgets is a moment."""
        if (weights and name in MIXES) or mixed:
            self.window.averages[pointer] = self.window.averages.get(pointer, 0) + 1
        if gradients and name in ("addcmul_", "_foreach_addcmul_"):
            self.window.squares.add(pointer)
        if gradients and name in (*MIXES, "addcmul_", "_foreach_addcmul_"):
            self.window.fed.add(pointer)
        if name in SHRINKS:
            self.window.forgot[pointer] = self.window.forgot.get(pointer, 0) + 1


NAMES = {"step", "unscale_", "update_parameters"}


class _Ops(TorchFunctionMode):
    """Sees every operation in place that Python code calls."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        inplace = (name.endswith("_") and not name.endswith("__")) or name in ("__imul__", "__iadd__", "__isub__")
        if not inplace or not args or self.watch.stepping:
            return func(*args, **(kwargs or {}))
        target = args[0]
        wanted = isinstance(target, Tensor) and (_pointer(target) in self.watch.pointers or name == "copy_")
        before = target.detach().clone() if wanted else None
        result = func(*args, **(kwargs or {}))
        with torch.no_grad():
            self.watch.changed(name, target, [*args[1:], *(kwargs or {}).values()], before)
        return result


def _pointer(tensor: Tensor) -> int:
    """Where its numbers lie; inside a function transform they lie nowhere."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return -id(tensor)


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _count(optimizer: Any) -> float:
    """The optimizer's own count of its steps; 0 where it keeps none."""
    counts = [state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state]
    return max((float(count) for count in counts), default=0.0)
