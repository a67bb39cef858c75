"""The gradient of every microbatch by itself, which a step's gradient is fitted to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.audit.model_copy import copied
from labkit.audit.window import Sampled
from labkit.errors import LabError

LossSum = Callable[[Any, Any], tuple[Tensor, Any]]


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A microbatch with each of its tensors changed; other objects stay as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)({key: mapped(each, change) for key, each in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(each, change) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: mapped(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in a microbatch.

    >>> tensors({"a": torch.ones(1), "b": [torch.zeros(1), "no tensor"]})
    [tensor([1.]), tensor([0.])]
    """
    leaves: list[Tensor] = []

    def keep(each: Tensor) -> Tensor:
        leaves.append(each)
        return each

    mapped(value, keep)
    return leaves


def pieces(value: Any) -> list[Any]:
    """A microbatch cut into its sequences, one each; [] where its tensors have no common first dimension."""
    sizes = {each.shape[0] if each.dim() else 0 for each in tensors(value)}
    if len(sizes) != 1 or not (rows := sizes.pop()):
        return []
    return [mapped(value, _row(at)) for at in range(rows)]


def _row(at: int) -> Callable[[Tensor], Tensor]:
    return lambda each: each[at : at + 1]


@dataclass(frozen=True, eq=False)
class References:
    """The gradient of every microbatch's summed loss, [K, P], with its number of valid tokens."""

    gradients: Tensor
    counts: Tensor
    losses: Tensor


class Model64:
    """A float64 copy of a model, which can take any weights of the original."""

    autocast: torch.dtype | None = None

    def __init__(self, model: nn.Module, sampled: Sampled, loss_sum: LossSum) -> None:
        self.sampled, self.loss_sum = sampled, loss_sum
        self.model = copied(model)
        self.double = all(p.device.type != "mps" for p in model.parameters())
        if self.double:
            self.model.double()

    def at(self, state: dict[str, Tensor]) -> Model64:
        """The same copy with these weights and buffers."""
        self.model.load_state_dict(state)
        return self

    def references(self, microbatches: Sequence[Any]) -> References:
        """One forward and backward for each microbatch, summed loss; the model is left as it was."""
        buffers = {name: each.clone() for name, each in self.model.named_buffers()}
        rows, counts, losses = [], [], []
        for microbatch in microbatches:
            gradient, count, loss = self._one(microbatch)
            rows.append(gradient)
            counts.append(count)
            losses.append(loss)
            for name, each in self.model.named_buffers():
                each.copy_(buffers[name])
        return References(
            torch.stack(rows), torch.tensor(counts, dtype=torch.float64), torch.tensor(losses, dtype=torch.float64)
        )

    def _one(self, microbatch: Any) -> tuple[Tensor, float, float]:
        batch = mapped(microbatch, self._cast)
        kind = next(self.model.parameters()).device.type
        cast = torch.autocast(kind, self.autocast, enabled=self.autocast is not None)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), cast:
            torch.manual_seed(0)
            pair = self.loss_sum(self.model, batch)
        try:
            loss, count = pair
            number, total = float(count), float(loss.detach() if isinstance(loss, Tensor) else loss)
        except (TypeError, ValueError):
            what = f"loss_sum returns a {type(pair).__name__} and no pair of sum and count"
            raise LabError(f"{what}: try return loss, count") from None
        self.model.zero_grad()
        if isinstance(loss, Tensor) and loss.requires_grad:  # else there is nothing to predict in this microbatch
            loss.backward()  # not autograd.grad: reentrant checkpoints refuse that
        return self.sampled.read(p.grad for p in self.model.parameters()), number, total

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.double() if self.double and tensor.is_floating_point() else tensor


class Rounded(Model64):
    """A copy in the precision that the step computes in, to measure what that precision loses."""

    def __init__(self, model: nn.Module, sampled: Sampled, loss_sum: LossSum, autocast: torch.dtype | None) -> None:
        self.sampled, self.loss_sum, self.autocast = sampled, loss_sum, autocast
        self.model, self.double = copied(model), False
