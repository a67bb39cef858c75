"""Running a step: built fresh, with seeded random numbers, watched; an error becomes one sentence."""

from __future__ import annotations

import functools
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


def fresh(build: Build) -> tuple[nn.Module, Step]:
    """A fresh model and its step; LabError where `build` gives something else."""
    pair = build()
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], nn.Module) and callable(pair[1])):
        raise LabError(f"build() gives a {type(pair).__name__} and no model with its step: try return model, step")
    return pair


def call(watch: Watch, step: Step, microbatches: Sequence[Any]) -> Window:
    """One call of the step, watched; LabError where it raises."""
    try:
        return watch.call(step, list(microbatches))
    except LabError:
        raise
    except Exception as error:
        raise LabError(f"the step raises {type(error).__name__}: {error}: try it by itself first") from error


def run_windows(
    watch: Watch, model: nn.Module, step: Step, microbatches: Sequence[Any], count: int
) -> tuple[list[Window], list[dict[str, Tensor]]]:
    """What the step did in each window, and the weights before it."""
    windows, states = list[Window](), list[dict[str, Tensor]]()
    with seeded(0):
        for _ in range(count):
            states.append({name: each.detach().clone() for name, each in model.state_dict().items()})
            windows.append(call(watch, step, microbatches))
    return windows, states


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All random numbers come from a seed, and continue afterwards as if nothing had happened.

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


def rerun_other_seed(build: Build, sampled: Sampled, microbatches: Sequence[Any]) -> Window:
    """One window from the same weights, with other random numbers."""
    model, step = fresh(build)
    with seeded(1):
        return call(Watch(model, sampled), step, microbatches)


def rerun_without_last(
    build: Build, sampled: Sampled, microbatches: Sequence[Any], count: int
) -> Callable[[], list[Window] | None]:
    """The same windows without their last microbatch, run when they are asked for; None where the step refuses them."""

    @functools.cache
    def run() -> list[Window] | None:
        if len(microbatches) < 2:
            return None
        model, step = fresh(build)
        watch = Watch(model, sampled)
        try:
            with seeded(0):
                return [call(watch, step, microbatches[:-1]) for _ in range(count)]
        except LabError:
            return None

    return run
