"""Two settings of a step, measured in turn: is the second really faster, and by which count?"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F

from labkit.corpus import Batch, Seed, batch
from labkit.decision import RUNS, Decision, Margin, decide
from labkit.declare import Choice, Range, Switch, quantity
from labkit.device import Spread, pick
from labkit.nets import IGNORE, Transformer, valid_tokens
from labkit.throughput.timing import (
    GLOBAL_BATCH,
    Device,
    Microbatch,
    Repeats,
    cut,
    doubling,
    interleave,
    timed,
    trainee,
)

DOCUMENTS, LONGEST = 32, 64  # rows of one step, and the longest of them
STEPS = 5  # optimizer steps of one run


def trim(pair: Batch) -> Batch:
    """Rows without the columns that are padding in all of them.

    >>> trim((torch.tensor([[7, 8, 0, 0], [7, 0, 0, 0]]), torch.tensor([[7, 8, -100, -100], [7] + 3 * [-100]])))[0]
    tensor([[7, 8],
            [7, 0]])
    """
    longest = int((pair[1] != IGNORE).sum(1).max())
    return pair[0][:, :longest], pair[1][:, :longest]


def resize(pair: Batch, length: int) -> Batch:
    """Rows cut or padded to a length.

    >>> resize((torch.tensor([[7, 8]]), torch.tensor([[7, 8]])), 3)[1].tolist(), resize(batch(0), 5)[0].shape
    ([[7, 8, -100]], torch.Size([8, 5]))
    """
    tokens, labels = pair
    more = (0, length - tokens.shape[1])
    return F.pad(tokens, more), F.pad(labels, more, value=IGNORE)


def by_length(pair: Batch) -> Batch:
    """The same rows, the shortest first.

    >>> (by_length(batch(0))[1] != IGNORE).sum(1).diff().min() >= 0
    tensor(True)
    """
    order = (pair[1] != IGNORE).sum(1).argsort()
    return pair[0][order], pair[1][order]


def positions(microbatches: Sequence[Batch]) -> int:
    """Token positions that the model computes, padding included.

    >>> positions([(torch.ones(2, 5), torch.ones(2, 5))])
    10
    """
    return sum(tokens.numel() for tokens, _ in microbatches)


def valid(microbatches: Sequence[Batch]) -> int:
    """Targets that the loss does not ignore, in all of them."""
    return sum(valid_tokens(labels) for _, labels in microbatches)


@dataclass(frozen=True)
class Change:
    """A step before and after its rows were changed."""

    change: str = quantity("what was changed")
    length: int = quantity("tokens that rows were cut or padded to", "tokens")
    positions: tuple[int, int] = quantity("token positions of a step, before and after", "positions")
    valid: tuple[int, int] = quantity("valid tokens of a step, before and after", "tokens")
    steps: Spread = quantity("steps/s after over before, round by round, measured", "times")
    seconds: tuple[float, float] = quantity("median time of a step, before and after", "s")
    progress: float = quantity("share that is done")

    def gain(self, counts: tuple[int, int]) -> Spread:
        """The ratio of such counts per second, after over before."""
        before, after = counts
        ratios = {name: value * after / before for name, value in vars(self.steps).items() if name != "count"}
        return Spread(**ratios, count=self.steps.count)


def tokens(
    *,
    change: Annotated[str, Choice(("fixed length", "sorted"), help="one length for all rows, or rows by length")] = (
        "fixed length"
    ),
    length: Annotated[int, Range(8, 128, log=True, unit="tokens", help="the fixed length: cut or padded to it")] = 8,
    microbatch: Annotated[int, Range(1, DOCUMENTS, log=True, unit="rows", help="b, rows of one microbatch")] = 8,
    repeats: Repeats = 7,
    device: Device = "auto",
    seed: Seed = 0,
) -> Iterator[Change]:
    """Steps a second, positions a second and valid tokens a second, of documents of unequal length.

    >>> *_, last = tokens(length=8, repeats=3)
    >>> last.valid[1] < last.valid[0], last.positions[1] == 32 * 8
    (True, True)

    Before: 32 documents of 4 to 64 tokens as they come, each microbatch padded to its own longest. A generator of the
    result so far. Raises LabError where `microbatch` is no power of two.
    """
    where, b = pick(device), doubling("microbatch", microbatch)
    pair, (model, optimizer) = batch(seed, DOCUMENTS, LONGEST), trainee(seed, 128, where)
    before = [trim(each) for each in cut(pair, b, where)]
    fixed = change == "fixed length"
    after = cut(resize(pair, length), b, where) if fixed else [trim(each) for each in cut(by_length(pair), b, where)]
    works = [functools.partial(seconds, model, optimizer, way, where) for way in (before, after)]
    for count, (old, new) in enumerate(interleave(works, repeats), 1):
        ratio = Spread.of([a / b for a, b in zip(old, new, strict=False)])
        yield Change(
            change,
            length,
            positions=(positions(before), positions(after)),
            valid=(valid(before), valid(after)),
            steps=ratio,
            seconds=(Spread.of(old).median, Spread.of(new).median),
            progress=count / (2 * repeats),
        )


def seconds(
    model: Transformer, optimizer: torch.optim.Optimizer, microbatches: Sequence[Batch], device: torch.device
) -> float:
    """Seconds of one optimizer step."""
    return timed(model, optimizer, microbatches, device).step


# A decision.


@dataclass(frozen=True)
class Runs:
    """Runs of two settings, in turn, and what they decide."""

    same: bool = quantity("whether both are one setting")
    microbatches: tuple[int, int] = quantity("b before and after", "sequences")
    margin: float = quantity("gain below which a change does not count, declared before")
    before: tuple[float, ...] = quantity("throughput of each run before", "valid tokens/s")
    after: tuple[float, ...] = quantity("throughput of each run after", "valid tokens/s")
    progress: float = quantity("share that is done")

    @property
    def decision(self) -> Decision | None:
        """What they decide; None before there are three runs of each."""
        return decide(self.before, self.after, self.margin) if len(self.after) >= RUNS else None


def decision(
    *,
    before: Microbatch = 8,
    after: Microbatch = 16,
    same: Annotated[bool, Switch(help="after is the very same setting as before")] = False,
    runs: Annotated[int, Range(3, 9, unit="runs", help="of each setting, in turn")] = 3,
    margin: Margin = 0.03,
    device: Device = "auto",
    seed: Seed = 0,
) -> Iterator[Runs]:
    """Runs of two sizes of microbatch at one global batch of 64 sequences, and whether the second is faster.

    >>> *_, last = decision(same=True)
    >>> len(last.before), len(last.after), last.microbatches
    (3, 3, (8, 8))

    A run is five optimizer steps; before and after take turns. A generator of the result so far. Raises LabError
    where a size is no power of two.
    """
    where, first = pick(device), doubling("before", before)
    sizes = first, first if same else doubling("after", after)
    pair, (model, optimizer) = batch(seed, GLOBAL_BATCH, 32, shortest=32), trainee(seed, 32, where)
    works = [functools.partial(run, model, optimizer, cut(pair, b, where), where) for b in sizes]
    for count, (old, new) in enumerate(interleave(works, runs), 1):
        yield Runs(same, sizes, margin, tuple(old), tuple(new), count / (2 * runs))


def run(
    model: Transformer, optimizer: torch.optim.Optimizer, microbatches: Sequence[Batch], device: torch.device
) -> float:
    """Valid tokens a second of one run."""
    took = sum(seconds(model, optimizer, microbatches, device) for _ in range(STEPS))
    return STEPS * valid(microbatches) / took
