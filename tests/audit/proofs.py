"""What the proofs share: the entries by sort, what they did, and how near is equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from tests.audit import oracle, plain, watching
from tests.audit.plain import double
from tests.audit.steps import Step, steps
from tests.audit.watching import Window, flat

torch.set_num_threads(1)

WITHOUT_ALGEBRA = {"nondeterministic", "non-finite", "unknown"}
ALL = steps()
TELLABLE = [entry for entry in ALL if not entry.cannot_tell]
RIGHT = [entry for entry in TELLABLE if not entry.faults]
FAULTY = [entry for entry in TELLABLE if entry.faults]
UNTELLABLE = [entry for entry in ALL if entry.cannot_tell]


def of(entries: list[Step]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each of these entries."""
    assert entries
    return pytest.mark.parametrize("entry", entries, ids=lambda entry: entry.name)


def alone(word: str) -> list[Step]:
    """The entries with this fault and no other."""
    return [entry for entry in FAULTY if entry.faults == (word,)]


def with_any(*words: str) -> list[Step]:
    """The entries with one of these faults, and perhaps others."""
    return [entry for entry in FAULTY if set(words) & set(entry.faults)]


@cache
def by_name(name: str) -> Step:
    (entry,) = (entry for entry in ALL if entry.name == name)
    return entry


@cache
def _run(name: str) -> list[Window]:
    return watching.run(by_name(name))


def run(entry: Step) -> list[Window]:
    """What an entry did, once for all proofs."""
    return _run(entry.name)


@cache
def _plainly(name: str) -> list[Window]:
    return plain.plainly(by_name(name))


def plainly(entry: Step) -> list[Window]:
    """What an entry should have done, once for all proofs."""
    return _plainly(entry.name)


@cache
def _predicted(name: str, faults: tuple[str, ...]) -> list[Window]:
    return oracle.predicted(by_name(name), faults)


def predicted(entry: Step, faults: Iterable[str]) -> list[Window]:
    """What an entry comes to with these faults, once for all proofs."""
    return _predicted(entry.name, tuple(faults))


def tensors(value: object) -> list[Tensor]:
    """Every tensor in a microbatch, whatever it is; a text as its letters."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, str):
        return [torch.tensor([ord(c) for c in value])]
    inside = value if isinstance(value, (list, tuple)) else (value if isinstance(value, dict) else vars(value)).values()
    return [each for part in inside for each in tensors(part)]


def summed_gradients(entry: Step, model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
    """The gradient of every microbatch's summed loss, [K, P], and its count, [K], in float64."""
    model = model or double(entry)
    parameters = [p for p in model.parameters() if p.requires_grad]
    sums = [entry.loss_sum(model, microbatch) for microbatch in entry.microbatches]
    rows = [flat(torch.autograd.grad(total, parameters, materialize_grads=True)) for total, _ in sums]
    return torch.stack(rows), torch.tensor([float(count) for _, count in sums], dtype=torch.float64)


def rounding(entry: Step, dtype: torch.dtype | None = None) -> float:
    """2 n u Σ‖S_m‖ / ‖Σ S_m‖ for every optimizer step; n: the roundings that a term of the sum has behind it.

    Those are the fan-ins of the layers, forward and backward, and the terms that are added. Where the matmuls are
    coarser than the model, only what goes into them and comes out is rounded: three numbers for each.
    """
    model = double(entry)
    rows, _ = summed_gradients(entry, model)
    precision = None if dtype else entry.plan.precision
    fan_ins = 2 * sum(p.shape[-1] for p in model.parameters())
    terms = sum(tensors(mb)[-1].numel() for mb in entry.microbatches)
    n = fan_ins + terms if precision is None else 3 * sum(p.dim() > 1 for p in model.parameters())
    u = torch.finfo(precision or dtype or entry.task.dtype).eps / 2
    steps_made = entry.windows * max(1, *(len(window.events) for window in run(entry)))
    return 2 * n * u * float(rows.norm(dim=1).sum() / rows.sum(0).norm()) * steps_made


def clear(entry: Step) -> float:
    """How far apart two answers are that no rounding explains."""
    return max(1e-3, 2 * rounding(entry))
