"""How far rounding alone can move a gradient: a bound where digits are many, measured where they are few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from labkit.audit.references import References
from labkit.audit.window import Window
from labkit.errors import LabError
from labkit.tolerance import depth, tolerance, unit_roundoff

LEAST = {torch.float64: 1e-10, torch.float32: 2e-5}
MOST = 0.4  # in half precision, where it cannot be tried
MARGIN = 4.0  # another scale of the loss and another order of the terms round differently from the trial


def rounding(
    model: nn.Module,
    windows: Sequence[Window],
    right: References,
    trial: Callable[[torch.dtype | None], References],
) -> float:
    """The relative error that rounding explains in these windows, never less than a few digits of the dtype.

    In half precision a bound would explain anything. There `trial` runs the same microbatches in that precision, under
    autocast where the step uses it: MARGIN times what they lose by it, and what a sum in .grad loses, is explained.
    Float64 weights under a float32 loss have the digits of float32.
    """
    autocast = next((each.autocast for each in windows if each.autocast), None)
    coarse = {dtype for each in windows for dtype in each.loss_dtypes if dtype in LEAST}
    dtype = max([*_dtypes(model), *coarse, *([autocast] if autocast else [])], key=lambda each: torch.finfo(each).eps)
    if dtype in LEAST:
        return max(_bound(model, dtype, right), _read_off_error(model, windows))
    return _tried(model, right, lambda: trial(autocast))


def _bound(model: nn.Module, dtype: torch.dtype, right: References) -> float:
    try:
        bound = tolerance(right.gradients, count=len(right.counts), depth=depth(model), dtype=dtype).value
    except LabError:
        return LEAST[dtype]
    return max(LEAST[dtype], min(bound, 10 * LEAST[dtype]))


def _read_off_error(model: nn.Module, windows: Sequence[Window]) -> float:
    """The relative error of a gradient that is read off the weights, which are rounded before and after the step."""
    u = max(unit_roundoff(dtype) for dtype in _dtypes(model))
    errors = (u * float(each.end.norm() / (each.end - each.start).norm()) for each in windows if each.without_gradient)
    return min(max(errors, default=0.0), MOST)


def _tried(model: nn.Module, right: References, trial: Callable[[], References]) -> float:
    try:
        lost = (trial().gradients - right.gradients).norm(dim=1).sum()
    except Exception:  # an operation that is not there in this precision
        return MOST
    added = len(right.counts) * max(unit_roundoff(dtype) for dtype in _dtypes(model))
    error = float(MARGIN * lost / right.gradients.sum(0).norm()) + added
    return max(min(error, MOST), min(LEAST.values())) if math.isfinite(error) else MOST


def _dtypes(model: nn.Module) -> list[torch.dtype]:
    return [p.dtype for p in model.parameters() if p.is_floating_point()]
