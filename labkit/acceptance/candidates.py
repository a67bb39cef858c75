"""Steps that somebody would like to adopt: eight candidates and one base, on a simulated clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.optim import SGD

from labkit.acceptance import Record, accept
from labkit.acceptance.equality import INVARIANTS, NO_TEST, examples
from labkit.acceptance.side import TestedStep, Twin, examine, trace
from labkit.acceptance.traces import CONTROLS, bands, differences, nudge, progress
from labkit.corpus import Batch, Seed, batch
from labkit.declare import Choice, Range, quantity
from labkit.nets import VOCABULARY, next_token_loss, valid_tokens

Microbatches = Sequence[Batch]
Loop = Callable[[nn.Module, SGD, Microbatches], None]


def token_mean(model: nn.Module, optimizer: SGD, microbatches: Microbatches) -> None:
    """The base: the sum over valid tokens, over their number."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels, "sum") / N).backward()
    optimizer.step()
    optimizer.zero_grad()


def mean_of_means(model: nn.Module, optimizer: SGD, microbatches: Microbatches) -> None:
    """Shorter, and it needs no count."""
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels, "mean") / len(microbatches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def half_sum(model: nn.Module, optimizer: SGD, microbatches: Microbatches) -> None:
    """The gradient is summed in bfloat16: half the memory to move."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    sums = [torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()]
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels, "sum") / N).backward()
        for total, p in zip(sums, model.parameters(), strict=True):
            if p.grad is not None:
                total += p.grad
            p.grad = None
    for total, p in zip(sums, model.parameters(), strict=True):
        p.grad = total.to(p.dtype)
    optimizer.step()
    optimizer.zero_grad()


def new_trainer(model: nn.Module, optimizer: SGD, microbatches: Microbatches) -> None:
    """A trainer is built for each update, its optimizer with it."""
    token_mean(model, SGD(model.parameters(), **optimizer.defaults), microbatches)


@dataclass(frozen=True)
class Idea:
    """A change that somebody would like to adopt, and the time that its update takes."""

    loop: Loop = token_mean
    rows: int = 2  # sequences of a microbatch
    batches: int = 1  # of DOCUMENTS sequences each
    tail: bool = True  # whether a last microbatch of fewer rows is kept
    single: bool = False  # the model in float32
    time: float = 1.0  # of an update, over the base's


IDEAS = {
    "twice the microbatch": Idea(rows=4, time=0.8),
    "mean of means": Idea(mean_of_means, time=0.75),
    "float32 model": Idea(single=True, time=0.6),
    "bfloat16 sum": Idea(half_sum, time=0.7),
    "dropped tail": Idea(tail=False, time=0.8),
    "new trainer": Idea(new_trainer, time=0.9),
    "fused kernel": Idea(time=0.99),
    "larger batch": Idea(rows=4, batches=2, time=1.6),
}
DOCUMENTS = 5
MILLISECONDS = 10.0  # of the base's update
Candidate = Annotated[str, Choice(tuple(IDEAS), help="what somebody would like to adopt")]


class Clock:
    """A clock that moves only by `tick`.

    >>> clock = Clock(); clock.tick(0.5); clock()
    0.5
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now

    def tick(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class Pair:
    """A base and a candidate on a few documents, whose updates take a simulated time.

    >>> pair = Pair("dropped tail")
    >>> [valid_tokens(labels) for _, labels in pair.microbatches]
    [30, 21, 9]
    """

    def __init__(
        self,
        candidate: str,
        *,
        noise: float = 0.0,
        seed: int = 0,
        rate: float = 0.5,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.idea, self.noise, self.seed, self.rate, self.dtype = IDEAS[candidate], noise, seed, rate, dtype
        self.clock, self.generator = Clock(), torch.Generator().manual_seed(seed)
        self.microbatches = cut(1, 2, seed)
        self.candidate_microbatches = cut(self.idea.batches, self.idea.rows, seed, tail=self.idea.tail)

    def base(self) -> tuple[nn.Module, Callable[[Microbatches], None]]:
        """The present step."""
        return self._build(token_mean, self.dtype, 1.0)

    def candidate(self) -> tuple[nn.Module, Callable[[Microbatches], None]]:
        """The step that may replace it."""
        return self._build(self.idea.loop, torch.float32 if self.idea.single else self.dtype, self.idea.time)

    def sides(self) -> tuple[TestedStep, TestedStep]:
        """Both, audited and watched in their first update."""
        builds = (
            ("base", self.base, self.microbatches),
            ("candidate", self.candidate, self.candidate_microbatches),
        )
        base, candidate = (examine(*each, self.loss_sum, None, 1, "token-mean") for each in builds)
        return base, candidate

    @staticmethod
    def loss_sum(model: nn.Module, microbatch: Batch) -> tuple[Tensor, int]:
        """The objective: the sum over valid tokens, and their number."""
        tokens, labels = microbatch
        return next_token_loss(model, tokens, labels, "sum"), valid_tokens(labels)

    def _build(self, loop: Loop, dtype: torch.dtype, time: float) -> tuple[nn.Module, Callable[[Microbatches], None]]:
        model = network(self.seed, dtype)
        optimizer = SGD(model.parameters(), lr=self.rate, momentum=0.9)

        def step(microbatches: Microbatches) -> None:
            loop(model, optimizer, microbatches)
            chance = float(torch.randn((), generator=self.generator, dtype=torch.float64))
            self.clock.tick(MILLISECONDS / 1e3 * time * math.exp(self.noise * chance))

        return model, step


def network(seed: int, dtype: torch.dtype) -> nn.Module:
    """An embedding, one hidden layer and a head.

    >>> sum(p.numel() for p in network(0, torch.float64).parameters())
    2120
    """
    with torch.random.fork_rng(devices=[]):  # layers draw when they are made
        middle = nn.Linear(8, 8), nn.Tanh()
        model = nn.Sequential(nn.Embedding(VOCABULARY, 8), *middle, nn.Linear(8, VOCABULARY, bias=False))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / p.shape[-1] ** 0.5)
    return model.to(dtype)


def cut(batches: int, rows: int, seed: int, *, tail: bool = True) -> list[Batch]:
    """Batches of documents, cut into microbatches of so many rows; the last holds what is left, if it is kept.

    >>> [len(tokens) for tokens, _ in cut(1, 2, 0)], [len(tokens) for tokens, _ in cut(1, 4, 0)]
    ([2, 2, 1], [4, 1])
    """
    pairs = [batch(seed + 10_000 * at, DOCUMENTS, 16, text="made") for at in range(batches)]
    tokens, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    microbatches = zip(tokens.split(rows), labels.split(rows), strict=True)
    return [each for each in microbatches if tail or len(each[0]) == rows]


def acceptance(
    *,
    candidate: Candidate = "twice the microbatch",
    invariant: Annotated[str, Choice(INVARIANTS, help="what is held fixed: chosen before testing")] = "systems",
    updates: Annotated[int, Range(1, 16, unit="updates", help="of the trace")] = 4,
    runs: Annotated[int, Range(3, 9, unit="runs", help="timed runs of each side, in turn")] = 3,
    margin: Annotated[float, Range(0, 0.3, step=0.01, help="gain below which a change does not count")] = 0.03,
    noise: Annotated[float, Range(0, 0.3, step=0.01, help="of the clock, relative, from run to run")] = 0.01,
    seed: Seed = 0,
) -> Record:
    """A base and a candidate before the four gates, on a simulated clock.

    >>> acceptance(candidate="mean of means").verdict
    'reject'

    The base's update takes 10 ms of that clock, the candidate's the share in `IDEAS`, each times exp(noise · normal).
    """
    pair = Pair(candidate, noise=noise, seed=seed)
    return accept(
        pair.base,
        pair.candidate,
        pair.microbatches,
        pair.loss_sum,
        invariant=invariant,
        candidate_microbatches=pair.candidate_microbatches,
        windows=updates,
        runs=runs,
        margin=margin,
        seconds=0,
        clock=pair.clock,
    )


@dataclass(frozen=True)
class TracePair:
    """Two training runs side by side, and how far rounding can move the base's loss."""

    base: tuple[float, ...] = quantity("mean loss before and after each update", "nat")
    candidate: tuple[float, ...] = quantity("the candidate's on the same examples", "nat")
    difference: tuple[float, ...] = quantity("how far the two are apart", "nat")
    band: tuple[float, ...] = quantity("how far rounding can take the base's loss", "nat")
    outside: int = quantity("updates after which they are further apart than that", "updates")
    first: int = quantity("the first of them, 0 where there is none")
    changed: float = quantity("how far training took the base's loss", "nat")
    tolerance: float = quantity("what rounding explains of a gradient's difference, relative")

    @property
    def telling(self) -> bool:
        """Whether the band is so narrow that it tells anything."""
        return self.band[-1] < NO_TEST * self.changed


def traces(
    *,
    candidate: Candidate = "new trainer",
    precision: Annotated[str, Choice(("float64", "float32"), help="what the base computes in")] = "float64",
    updates: Annotated[int, Range(1, 32, unit="updates", help="length of the trace")] = 8,
    learning_rate: Annotated[float, Range(0.01, 10, log=True, help="of SGD with momentum 0.9")] = 0.5,
    seed: Seed = 0,
) -> TracePair:
    """Loss of base and candidate over some updates, and how far rounding can take them apart.

    >>> comparison = traces(updates=4)
    >>> comparison.outside, comparison.first
    (3, 2)

    In three control runs of the base the gradients are moved by as much as rounding can move them; the band is the
    largest distance from the base so far. Both losses are of the base's examples, in float64.
    """
    pair = Pair(candidate, seed=seed, rate=learning_rate, dtype=getattr(torch, precision))
    base, other = pair.sides()
    twin = Twin(base, pair.loss_sum)
    rounding = examples(base, other, (twin, Twin(other, pair.loss_sum))).rounding
    assert rounding  # float32 and float64 leave digits in so short a sum
    nudges = [nudge(rounding.value / rounding.cancellation, each) for each in CONTROLS]
    controls = [trace(base, twin, updates, each) for each in nudges]
    ours, theirs = trace(base, twin, updates), trace(other, twin, updates)
    band = bands(ours, controls, rounding.value).losses
    distances = differences(ours.losses, theirs.losses)
    outside = [at for at, (d, most) in enumerate(zip(distances, band, strict=True)) if not d <= most]
    return TracePair(
        ours.losses,
        theirs.losses,
        tuple(distances),
        band,
        len(outside),
        min(outside, default=0),
        progress(ours.losses),
        rounding.value,
    )
