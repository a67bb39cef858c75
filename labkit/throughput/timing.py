"""Taking the time of an optimizer step: marks on its device, one step and its parts, several settings in turn."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from torch.optim import AdamW, Optimizer

from labkit.corpus import Batch
from labkit.declare import Choice, Range, quantity
from labkit.device import quota_threads
from labkit.errors import LabError
from labkit.nets import Transformer, next_token_loss, valid_tokens

T = TypeVar("T")
GLOBAL_BATCH = 64  # sequences of one step where no control sets them

Microbatch = Annotated[int, Range(1, GLOBAL_BATCH, log=True, unit="sequences", help="b, sequences of one microbatch")]
Repeats = Annotated[int, Range(3, 9, unit="steps", help="steps measured at each setting, in turn with the others")]
Device = Annotated[str, Choice(("auto", "cpu"), help="auto: the GPU where there is one")]


class Stopwatch:
    """Marks in the time of a device: a monotonic clock on a CPU, events on a GPU, which wait in its own queue.

    >>> watch = Stopwatch(torch.device("cpu"))
    >>> watch.mark(); watch.mark(); watch.mark(); len(watch.spans())
    2
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, list[Any]()

    def mark(self) -> None:
        """Now; on a GPU: as soon as it has finished its queue so far."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append(event)

    def spans(self) -> list[float]:
        """Seconds from each mark to the next; waits for the last."""
        pairs = itertools.pairwise(self.marks)
        if self.device.type != "cuda":
            return [after - before for before, after in pairs]
        self.marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def step(
    model: Transformer, optimizer: Optimizer, microbatches: Sequence[Batch], valid: int, mark: Callable[[], object]
) -> None:
    """One optimizer step on the token mean, with a mark before it, after every microbatch and after it."""
    mark()
    optimizer.zero_grad()
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels) / valid).backward()
        mark()
    optimizer.step()
    mark()


@dataclass(frozen=True)
class Times:
    """The times of one optimizer step."""

    step: float = quantity("from before zero_grad to after optimizer.step", "s")
    microbatch: float = quantity("one forward and backward, mean over the step's", "s")
    optimizer: float = quantity("optimizer.step alone", "s")


def timed(model: Transformer, optimizer: Optimizer, microbatches: Sequence[Batch], device: torch.device) -> Times:
    """One optimizer step and its parts, on one thread of a CPU.

    >>> from labkit.corpus import batch
    >>> model, optimizer = trainee(0, 8, torch.device("cpu"))
    >>> times = timed(model, optimizer, [batch(0, 2, 8)], torch.device("cpu"))
    >>> times.step > times.microbatch + times.optimizer / 2 > 0
    True
    """
    watch, valid = Stopwatch(device), sum(valid_tokens(labels) for _, labels in microbatches)
    with quota_threads(1):
        step(model, optimizer, microbatches, valid, watch.mark)
        spans = watch.spans()
    return Times(sum(spans), statistics.mean(spans[:-1]), spans[-1])


def trainee(seed: int, length: int, device: torch.device) -> tuple[Transformer, Optimizer]:
    """The model of all measurements here, 10,752 weights at length 32, and its AdamW.

    >>> trainee(0, 32, torch.device("cpu"))[0].position.shape
    torch.Size([32, 24])
    """
    model = Transformer(seed=seed, length=length).to(device)
    return model, AdamW(model.parameters(), lr=1e-3)


def cut(pair: Batch, microbatch: int, device: torch.device) -> list[Batch]:
    """A batch as microbatches of b sequences on a device.

    >>> from labkit.corpus import batch
    >>> [len(tokens) for tokens, _ in cut(batch(0, 8), 2, torch.device("cpu"))]
    [2, 2, 2, 2]
    """
    tokens, labels = (each.to(device).split(microbatch) for each in pair)
    return list(zip(tokens, labels, strict=True))


def interleave(works: Sequence[Callable[[], T]], repeats: int) -> Iterator[list[list[T]]]:
    """The results of each work so far, in turn A B A B …, so that drift affects all; the first call only warms up.

    >>> calls = itertools.count()
    >>> *_, results = interleave([lambda: next(calls), lambda: -next(calls)], 2)
    >>> results
    [[1, 4], [-3, -5]]
    """
    results: list[list[T]] = [[] for _ in works]
    for turn in range(repeats):
        for work, mine in zip(works, results, strict=True):
            if turn == 0:
                work()
            mine.append(work())
            yield results


def doubling(label: str, value: int) -> int:
    """The value, if it is a power of two, so that microbatches are all of one size; LabError else.

    >>> doubling("microbatch", 16)
    16
    """
    if value & (value - 1):
        raise LabError(f"{label} = {value} is no power of two: try {2 ** (value.bit_length() - 1)}")
    return value
