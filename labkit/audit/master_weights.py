"""Copies of a model's weights that an optimizer steps in their place: in another precision, flat, or a part of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """A stretch of a copy, and the stretch of a parameter that it stands for."""

    parameter: int
    first: int  # in the parameter
    at: int  # in the copy
    length: int


class MasterWeights:
    """Finds out by their values which parameters an optimizer's tensors are, or stand for."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.index = {id(p): at for at, p in enumerate(parameters)}
        self.copies: dict[int, tuple[Tensor, list[Place]]] = {}  # with the tensor, so that its id stays its own

    def recognise(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of the tensors is a parameter or the copy of some; copies are matched when first seen."""
        tensors = list(tensors)
        strangers = [each for each in tensors if id(each) not in self.index and id(each) not in self.copies]
        if any(each.is_floating_point() and each.numel() for each in strangers):
            self._find(strangers)
        return any(id(each) in self.index or self.places(each) for each in tensors)

    def places(self, tensor: Tensor) -> list[Place]:
        """What a tensor stands for, as far as it has been recognised."""
        if id(tensor) in self.index:
            return [Place(self.index[id(tensor)], 0, 0, tensor.numel())]
        return self.copies[id(tensor)][1] if id(tensor) in self.copies else []

    def agree(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the parameters have the values of their copies."""
        return all(self._equal_at(each, place) for each in tensors for place in self.places(each))

    def _equal_at(self, copy: Tensor, place: Place) -> bool:
        p = self.parameters[place.parameter].detach().reshape(-1)[place.first : place.first + place.length]
        return torch.equal(copy.detach().reshape(-1)[place.at : place.at + place.length].to(p.dtype), p)

    def spread(self, tensors: Iterable[Tensor], gradients: bool) -> list[Tensor | None]:
        """The gradients of the tensors, or ones, where the parameters have them."""
        values: list[Tensor | None] = [None] * len(self.parameters)
        for each in tensors:
            value = each.grad if gradients else torch.ones_like(each, requires_grad=False)
            if value is None:
                continue
            if id(each) in self.index:
                values[self.index[id(each)]] = value
                continue
            flat = (value.to_dense() if value.is_sparse else value).detach().reshape(-1)
            for place in self.places(each):
                p, target = self.parameters[place.parameter], values[place.parameter]
                if target is None:
                    target = values[place.parameter] = torch.zeros_like(p, dtype=each.dtype, requires_grad=False)
                target.view(-1)[place.first : place.first + place.length] = flat[place.at : place.at + place.length]
        return values

    def _find(self, strangers: list[Tensor]) -> None:
        """Copies of zeros alone prove nothing, and an optimizer of another model may hold as many zeros."""
        free = list(range(len(self.parameters)))
        for each in strangers:
            places = self._walk(each, free) or self._slice(each)
            self.copies[id(each)] = each, places
            free = [at for at in free if at not in {place.parameter for place in places}]
        distinct = any(self.places(each) and bool((each != each.reshape(-1)[0]).any()) for each in strangers)
        if not distinct or not all(self.places(each) for each in strangers):
            self.copies |= {id(each): (each, []) for each in strangers}

    def _walk(self, copy: Tensor, free: list[int]) -> list[Place]:
        """Whole parameters one after the other, and zeros behind them."""
        flat, places, at, left = copy.detach().reshape(-1), list[Place](), 0, list(free)
        while left and at < len(flat):
            following = next((p for p in left if self._equal(flat[at : at + self.parameters[p].numel()], p)), None)
            if following is None:
                break
            size = self.parameters[following].numel()
            places.append(Place(following, 0, at, size))
            left.remove(following)
            at += size
        return places if places and not flat[at:].any() else []

    def _equal(self, flat: Tensor, at: int) -> bool:
        p = self.parameters[at].detach().reshape(-1)
        return flat.shape == p.shape and flat.device == p.device and torch.equal(flat.to(p.dtype), p)

    def _slice(self, copy: Tensor) -> list[Place]:
        """A part of all parameters in a row, as a rank of several has it."""
        dtypes = {p.dtype for p in self.parameters}
        if len(dtypes) != 1 or copy.numel() < 2 or any(p.device != copy.device for p in self.parameters):
            return []
        row = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        flat = copy.detach().reshape(-1).to(row.dtype)
        for start in (row[: len(row) - len(flat) + 1] == flat[0]).nonzero().flatten().tolist():
            if flat[0] and torch.equal(row[start : start + len(flat)], flat):
                return list(self._stretches(start, len(flat)))
        return []

    def _stretches(self, start: int, length: int) -> Iterable[Place]:
        first = 0
        for at, p in enumerate(self.parameters):
            low, high = max(start, first), min(start + length, first + p.numel())
            if low < high:
                yield Place(at, low - first, low - start, high - low)
            first += p.numel()
