"""Running a step: built fresh, with seeded random numbers, watched; whatever it raises is one sentence."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from labkit.audit.watch import Watch
from labkit.audit.window import Sampled, Window
from labkit.errors import LabError

Step = Callable[[list[Any]], object]
Build = Callable[[], tuple[nn.Module, Step]]


def built(build: Build) -> tuple[nn.Module, Step]:
    """The model and its step, fresh; LabError where that is not what `build` gives."""
    made = build()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise LabError(f"build() gives a {type(made).__name__} and no model with its step: try return model, step")
    return made


def call(watch: Watch, step: Step, microbatches: Sequence[Any]) -> Window:
    """One call of the step, watched; LabError where it raises."""
    try:
        return watch.call(step, list(microbatches))
    except LabError:
        raise
    except Exception as error:
        raise LabError(f"the step raises {type(error).__name__}: {error}: try it by itself first") from error


def watched(
    watch: Watch, model: nn.Module, step: Step, microbatches: Sequence[Any], count: int
) -> tuple[list[Window], list[dict[str, Tensor]]]:
    """What the step did in each window, and where the weights stood before it."""
    seen, states = list[Window](), list[dict[str, Tensor]]()
    with seeded(0):
        for _ in range(count):
            states.append({name: each.detach().clone() for name, each in model.state_dict().items()})
            seen.append(call(watch, step, microbatches))
    return seen, states


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All random numbers from a seed, and as they were afterwards.

    >>> with seeded(0): first = torch.rand(())
    >>> with seeded(0): print(first == torch.rand(()))
    tensor(True)
    """
    python, array = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(array)


def again(build: Build, sampled: Sampled, microbatches: Sequence[Any]) -> Window:
    """The same from the same weights, with other random numbers."""
    model, step = built(build)
    with seeded(1):
        return call(Watch(model, sampled), step, microbatches)


def fewer(build: Build, sampled: Sampled, microbatches: Sequence[Any], count: int) -> Callable[[], list[Window] | None]:
    """The same without the last microbatch, when it is asked for; None where the step cannot do that."""
    kept: list[list[Window] | None] = []

    def run() -> list[Window] | None:
        if not kept:
            kept.append(tried(build, sampled, microbatches[:-1], count))
        return kept[0]

    return run


def tried(build: Build, sampled: Sampled, microbatches: Sequence[Any], count: int) -> list[Window] | None:
    """Windows of a fresh model; None where the step cannot do that."""
    if not microbatches:
        return None
    model, step = built(build)
    watch = Watch(model, sampled)
    try:
        with seeded(0):
            return [call(watch, step, microbatches) for _ in range(count)]
    except LabError:
        return None
