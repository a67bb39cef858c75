"""A copy of a model that computes with its own weights, even where a function has replaced a forward."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

from torch import nn

DEEP = 8  # wrappers around a forward


def copied(model: nn.Module) -> nn.Module:
    """A deep copy; what replaced a module's forward is bound to the copy.

    >>> model = nn.Linear(1, 1)
    >>> model.forward = functools.partial(nn.Linear.forward, model)
    >>> twin = copied(model)
    >>> twin.forward.args[0] is twin
    True
    """
    twin = copy.deepcopy(model)
    pairs = {id(old): new for old, new in zip(model.modules(), twin.modules(), strict=True)}
    for module in twin.modules():
        if "forward" in vars(module):
            module.forward = _bound(module.forward, pairs, DEEP)
    return twin


def _bound(value: Any, pairs: dict[int, nn.Module], deep: int) -> Any:
    """The same, with every module in it replaced by the copy's."""
    if not deep:
        return value
    if isinstance(value, nn.Module):
        return pairs.get(id(value), value)
    if isinstance(value, types.MethodType):
        instance = pairs.get(id(value.__self__), value.__self__)
        return types.MethodType(_bound(value.__func__, pairs, deep - 1), instance)
    if isinstance(value, functools.partial):
        inside = [_bound(each, pairs, deep - 1) for each in value.args]
        named = {name: _bound(each, pairs, deep - 1) for name, each in value.keywords.items()}
        return functools.partial(_bound(value.func, pairs, deep - 1), *inside, **named)
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _closed(value, pairs, deep)
    return value


def _closed(function: types.FunctionType, pairs: dict[int, nn.Module], deep: int) -> types.FunctionType:
    cells = []
    for cell in function.__closure__ or ():
        try:
            inside = _bound(cell.cell_contents, pairs, deep - 1)
        except ValueError:  # empty
            inside = None
        same = inside is None or inside is cell.cell_contents
        cells.append(cell if same else types.CellType(inside))
    copied_function = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    copied_function.__kwdefaults__ = function.__kwdefaults__
    vars(copied_function).update(vars(function))
    return copied_function
