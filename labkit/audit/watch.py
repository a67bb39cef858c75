"""One call of a training step, watched by hooks of torch and of Python that change nothing in it."""

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

from labkit.audit.buffers import Buffers
from labkit.audit.inplace import InPlace
from labkit.audit.master_weights import MasterWeights
from labkit.audit.window import Clip, Pass, Sampled, Step, Window

# By identity: code that torch.compile made cannot be hashed.
PASSES = {id(function.__code__) for function in (torch.autograd.backward, torch.autograd.grad)}
CLIPS = {
    id(torch.nn.utils.clip_grad_norm_.__wrapped__.__code__): "norm",  # type: ignore[attr-defined]
    id(torch.nn.utils.clip_grad_value_.__wrapped__.__code__): "value",  # type: ignore[attr-defined]
}
SMALL = 1_000_000  # parameters of a model whose weights are kept wherever they have moved


class Watch:
    """Watches calls of a step on one model; `call` returns the window and puts back everything it touched."""

    def __init__(self, model: nn.Module, sampled: Sampled) -> None:
        self.model, self.sampled = model, sampled
        self.parameters = list(model.parameters())
        self.masters = MasterWeights(self.parameters)

    def call(self, step: Callable[[Any], object], microbatches: Sequence[Any]) -> Window:
        """Run the step once, unchanged."""
        self.window, self.depth, self.stepping, self.taken = Window(), 0, 0, False
        self.incoming: dict[int, Tensor] = {}
        self.clock, self.optimizers = 0, dict[int, Any]()
        self.window.start = self._weights()
        self.last = self.window.start
        self.moved_state: dict[str, Tensor] | None = None
        with ExitStack() as stack:
            for at, p in enumerate(self.parameters):
                if p.requires_grad:
                    stack.callback(p.register_hook(self._arriving(at)).remove)
            stack.callback(self.model.register_forward_pre_hook(self._note_inputs, with_kwargs=True).remove)
            for module in self.model.modules():  # autocast may begin inside the model's own forward
                stack.callback(module.register_forward_pre_hook(self._precision).remove)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.enter_context(InPlace(self.window, self.parameters, lambda: self.stepping, self._gradient))
            stack.callback(sys.setprofile, sys.getprofile())
            sys.setprofile(self._profile)
            step(microbatches)
        self._close_pass()
        self._look()
        self.window.end = self.last
        self.window.leftover = self._gradient()
        for optimizer in self.optimizers.values():
            self._forget(optimizer)
        for key in self.window.adam_counts:
            optimizer = self.optimizers[key]
            self.window.adam_counts[key] = self.window.adam_counts[key][0], _count(optimizer)
        return self.window

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _weights(self) -> Tensor:
        return self.sampled.read(self.parameters)

    def _gradient(self, holders: Sequence[Tensor] | None = None) -> Tensor:
        return self.sampled.read(self.masters.spread(holders or self.parameters, gradients=True))

    # forward and backward passes

    def _note_inputs(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        matrices = [each for each in (*arguments, *named.values()) if isinstance(each, Tensor) and each.dim() == 2]
        if matrices:
            self.window.inputs.append((matrices[0].shape[0], matrices[0].shape[1]))

    def _precision(self, *_: Any) -> None:
        kind = next(self.model.parameters()).device.type
        if torch.is_autocast_enabled(kind):
            self.window.autocast = torch.get_autocast_dtype(kind)

    def _arriving(self, at: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            total = self.incoming.get(at)
            self.incoming[at] = gradient.detach().clone() if total is None else total + gradient.detach()

        return hook

    def _close_pass(self) -> None:
        if self.incoming:
            gradients = [self.incoming.get(at) for at in range(len(self.parameters))]
            brought, size = self.sampled.read(gradients), Sampled.size(gradients)
            self.incoming = {}
            self.window.passes.append(Pass(brought, size, self.moved_state))

    def _look(self) -> None:
        """Note whether the weights have moved, as a backward begins or the window ends."""
        now = self._weights()
        self.window.moves += not torch.equal(now, self.last)
        self.last = now
        self.moved_state = None if torch.equal(now, self.window.start) else self._state()

    # Python calls

    def _profile(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if id(code) in PASSES:
            self._pass(event, frame)
        elif id(code) in CLIPS and event in ("call", "return"):
            self._clip(CLIPS[id(code)], event, frame)
        elif code.co_name in NAMES:
            self._method(code.co_name, event, frame)

    def _pass(self, event: str, frame: FrameType) -> None:
        if event == "call":
            if not self.depth:
                self._look()
                self.window.loss_dtypes |= _dtypes(frame.f_locals.get("tensors", frame.f_locals.get("outputs")))
            self.depth += 1
        elif event == "return":
            self.depth -= 1
            if not self.depth:
                self._close_pass()

    def _clip(self, kind: str, event: str, frame: FrameType) -> None:
        """A clip of the model's gradients, or of those of its copies."""
        tensors = frame.f_locals["parameters"]
        if not isinstance(tensors, (list, tuple)):  # one tensor, or a generator, which must not be used up
            tensors = [tensors] if isinstance(tensors, Tensor) else self.parameters
        copies = self.masters.recognise(tensors) and any(id(each) not in self.masters.index for each in tensors)
        if event == "call":
            limit = frame.f_locals.get("max_norm", frame.f_locals.get("clip_value"))
            limit = float(limit) if isinstance(limit, (int, float, Tensor)) else float("nan")
            size = Sampled.size((each.grad for each in (tensors if copies else self.parameters)), kind)
            gradient = self._gradient(tensors if copies else None)
            self.window.clips.append(Clip(kind, len(self.window.passes), gradient, size, limit, self._tick()))
        elif copies and kind == "norm" and not (clip := self.window.clips[-1]).gradient.any():
            clip.size = float(frame.f_locals["total_norm"])
            clip.gradient = self._gradient(tensors) / min(1.0, clip.limit / (clip.size + 1e-6))
        elif not self.masters.recognise(tensors):
            self.window.clips.pop()

    def _method(self, name: str, event: str, frame: FrameType) -> None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, LRScheduler) and name == "step" and event == "call":
            outer = frame.f_back.f_locals.get("self") if frame.f_back else None
            if not isinstance(outer, LRScheduler):  # neither its first step, in its making, nor part of another's
                self.window.schedule_steps[id(caller)] = self.window.schedule_steps.get(id(caller), 0) + 1
        elif isinstance(caller, torch.amp.GradScaler):
            self._scaler(caller, name, event)
        elif isinstance(caller, AveragedModel) and name == "update_parameters" and event == "call":
            self.window.averages[id(caller)] = self.window.averages.get(id(caller), 0) + 1

    def _scaler(self, scaler: torch.amp.GradScaler, name: str, event: str) -> None:
        if not scaler.is_enabled():
            return
        if name == "unscale_" and event == "call":
            self.window.scale = scaler.get_scale()
            self.window.unscales.append((len(self.window.passes), self._tick()))
        elif name == "step":
            stepped = len(self.window.steps)
            if event == "call":
                self.window.scale, self.steps_before = scaler.get_scale(), stepped
            elif event == "return" and stepped == self.steps_before:  # not at the C calls inside it
                self.window.skipped += 1

    # optimizer steps

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self.masters.recognise(_parameters(optimizer)):
            return None
        if self.stepping:
            self._inside(optimizer)
            return None
        self.stepping = id(optimizer)
        closure = arguments[1] if len(arguments) > 1 else named.get("closure")
        if closure is None or not callable(closure):
            self._take(optimizer)
            return None

        def watched() -> Any:
            inside, self.stepping = self.stepping, 0
            loss = closure()
            self.stepping = inside
            if not self.taken:
                self._take(optimizer)
            return loss

        rest = {name: each for name, each in named.items() if name != "closure"}
        return (arguments[0], watched, *arguments[2:]), rest

    def _take(self, optimizer: Any) -> None:
        during = bool(self.depth and self.incoming)  # a hook of a backward that is still under way
        self.optimizers[id(optimizer)] = optimizer
        self.window.adam_counts.setdefault(id(optimizer), (_count(optimizer), 0.0))
        self.window.steps.append(self._step(optimizer, len(self.window.passes) + during))
        self.positions = [each.detach().clone() for each in self._copies(optimizer)]
        self.buffers, self.taken = Buffers(optimizer), True

    def _inside(self, optimizer: Any) -> None:
        """A step within a step: the gradient that counts is the one that the outer step passes on."""
        step = self.window.steps[-1] if self.window.steps else None
        if step is None or step.optimizer != self.stepping or not self.taken:
            return
        inner = self._step(optimizer, step.passes)
        step.gradient = torch.where(inner.mask, inner.gradient, step.gradient)
        if torch.equal(inner.mask, step.mask):
            step.size = inner.size
        step.inner = True

    def _step(self, optimizer: Any, passes: int) -> Step:
        parameters = _parameters(optimizer)
        own = self.sampled.read(self.masters.spread(parameters, gradients=False))
        gradients = self.masters.spread(parameters, gradients=True)
        grad_scale = getattr(optimizer, "grad_scale", None)  # a fused step divides by it itself
        scale = 1.0 if grad_scale is None else float(grad_scale)
        if any(group.get("maximize") for group in optimizer.param_groups):
            scale = -scale
        return Step(
            id(optimizer),
            type(optimizer).__name__,
            passes,
            self.sampled.read(gradients) / scale,
            Sampled.size(gradients) / abs(scale),
            own.bool(),
            max(float(group.get("lr", 0.0)) for group in optimizer.param_groups),
            any(group.get("weight_decay", 0.0) for group in optimizer.param_groups),
            self._weights(),
        )

    def _forget(self, optimizer: Any) -> None:
        """Drop the steps of an optimizer whose copies the weights do not follow: they are no steps of the model."""
        copies, steps = self._copies(optimizer), [step for step in self.window.steps if step.optimizer == id(optimizer)]
        lost = any(step.moved for step in steps) and not self.masters.agree(copies)
        lost |= not any(step.gradient.any() for step in steps) and torch.equal(self.window.start, self.window.end)
        if len(copies) == len(_parameters(optimizer)) and lost:
            self.window.steps = [step for step in self.window.steps if step.optimizer != id(optimizer)]
            del self.window.adam_counts[id(optimizer)]

    def _copies(self, optimizer: Any) -> list[Tensor]:
        """What the optimizer moves in place of parameters."""
        return [each for each in _parameters(optimizer) if id(each) not in self.masters.index]

    def _state(self) -> dict[str, Tensor] | None:
        if sum(self.sampled.sizes) > SMALL:
            return None
        return {name: each.detach().clone() for name, each in self.model.state_dict().items()}

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self.stepping != id(optimizer):
            return
        self.stepping = 0
        if not self.taken:  # a closure that was never called
            return
        step, self.taken = self.window.steps[-1], False
        copies = zip(self.positions, self._copies(optimizer), strict=True)
        step.moved = not torch.equal(step.before, self._weights()) or not all(torch.equal(*pair) for pair in copies)
        step.gathers = not step.moved and self.buffers.accumulated()


NAMES = {"step", "unscale_", "update_parameters"}


def _dtypes(roots: Any) -> set[torch.dtype]:
    """Those of what a backward begins at."""
    return {each.dtype for each in (roots if isinstance(roots, (list, tuple)) else [roots]) if isinstance(each, Tensor)}


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _count(optimizer: Any) -> float:
    """The optimizer's own count of its steps; 0 where it keeps none."""
    counts = [state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state]
    return max((float(count) for count in counts), default=0.0)
