"""The arguments of an accumulation loop, and what becomes of them."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from labkit.corpus import Batch
from labkit.wording import times


class LoopArguments:
    """A model and microbatches, and what becomes of them."""

    def __init__(self, model: nn.Module, microbatches: list[Batch]) -> None:
        self.model, self.weights = model, list(model.parameters())
        self.microbatches = [(tokens.clone(), labels.clone()) for tokens, labels in microbatches]
        self.inputs = [each for pair in self.microbatches for each in pair]
        self.before = [each.detach().clone() for each in (*self.weights, *self.inputs)]
        self.calls = self.passes = 0
        model.register_forward_hook(self._called)
        self.weights[0].register_post_accumulate_grad_hook(self._passed)

    def _called(self, *_: object) -> None:
        self.calls += 1

    def _passed(self, _: Tensor) -> None:
        self.passes += 1

    @property
    def gradient(self) -> list[Tensor]:
        """What is in .grad, where there is something."""
        return [p.grad.detach() for p in self.weights if p.grad is not None]

    def hand_over(self, model: nn.Module, _: object) -> None:
        """The gradient that was left, to a model whose weights are as they were."""
        for theirs, ours in zip(model.parameters(), self.weights, strict=True):
            theirs.grad = ours.grad

    def fault(self, value: object) -> str:
        """One sentence on what is forbidden or missing, the weightiest first."""
        if inspect.isgenerator(value) or inspect.iscoroutine(value):
            return "Nothing in your function ran: with yield or async it only gives back an object, so leave that out."
        return self._changed() or self._missing(value)

    def _changed(self) -> str:
        now, inputs = list(self.model.parameters()), len(self.weights)
        same = [_same(*each) for each in zip((*self.weights, *self.inputs), self.before, strict=True)]
        if not all(same[:inputs]) or [id(p) for p in now] != [id(p) for p in self.weights]:
            return "Your function changes the model's weights: leave a gradient in .grad, and the optimizer to others."
        if not all(same[inputs:]):
            return "Your function changes the microbatches, which the next epoch sees again: change a clone() of them."
        if not all(p.requires_grad for p in now):
            return "Your function switches requires_grad off: those weights would never be trained again."
        if not all(module.training for module in self.model.modules()):
            return "Your function leaves the model in eval mode, without dropout from then on: end with model.train()."
        return ""

    def _missing(self, value: object) -> str:
        missing = len(self.weights) - len(self.gradient)
        if not missing:
            return ""
        if self.gradient:
            return f"{missing} of {len(self.weights)} weight tensors have no gradient: take all of model.parameters()."
        why = "backward() was never called on a loss of this model"
        if self.passes:
            why = f"backward() ran {times(self.passes)}, and .grad was cleared after it"
        elif not self.calls:
            why = "the model was never called, though a copy of it, or another one, may have been"
        elif value is not None:
            why = f"your function returns a {type(value).__name__} and calls no backward()"
        return f"There is no gradient in .grad: {why}."


def _same(now: Tensor, before: Tensor) -> bool:
    alike = (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
    return alike and torch.equal(now.detach(), before)
