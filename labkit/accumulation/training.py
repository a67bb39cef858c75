"""Trainings that differ in nothing but the rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from labkit import rules
from labkit.corpus import Seed, Sequences, Steps, batch, split
from labkit.declare import Choice, Range, quantity
from labkit.nets import Transformer, next_token_loss, valid_tokens

WORDS = tuple(word for word, each in rules.TABLE.items() if each.topic == "accumulation" and each.needs != "steps")
LEARNING_RATES = {"SGD": 0.3, "Adam": 0.01}
EVERY = 5
STUDENT = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365)  # two-sided 95 %, for 3 … 8 seeds


@dataclass(frozen=True, eq=False)
class Trainings:
    """Held-out loss per token of trainings by the right rule and by another, the same seeds beside each other."""

    rule: str = quantity("the method beside token-mean")
    updates: Tensor = quantity("optimizer steps after which the loss was measured")
    right: Tensor = quantity("held-out loss of token-mean, seeds × measurements; NaN: not yet", "nat per token")
    wrong: Tensor = quantity("held-out loss of the rule, seeds × measurements; NaN: not yet", "nat per token")
    measured: int = quantity("losses measured so far, of both rules and all seeds")

    @property
    def progress(self) -> float:
        """Share of the work that is done."""
        return self.measured / (2 * self.right.numel())

    @property
    def reached(self) -> int:
        """Index of the last measurement that every training has."""
        return max(0, self.measured // (2 * len(self.right)) - 1)

    @property
    def gaps(self) -> Tensor:
        """Loss of the rule minus loss of token-mean there, seed by seed."""
        return (self.wrong - self.right)[:, self.reached]

    @property
    def margin(self) -> float:
        """Half the width of the 95 % interval of the mean gap, by Student's t over the seeds."""
        return STUDENT[len(self.gaps) - 3] * float(self.gaps.std()) / math.sqrt(len(self.gaps))

    @property
    def diverged(self) -> bool:
        """Whether a loss is above its start, or no longer finite."""
        both = torch.cat([self.right, self.wrong])
        return self.measured >= len(both) and not bool((both[:, self.reached] <= both[:, 0]).all())

    @property
    def differ(self) -> bool:
        """Whether the mean gap is larger than its margin, or a training has diverged."""
        return self.diverged or abs(float(self.gaps.mean())) > self.margin

    @property
    def verdict(self) -> str:
        """The outcome in two sentences."""
        if self.measured < 2 * len(self.right):
            return "Not every training has been measured yet."
        right, wrong, gaps = _range(self.right[:, self.reached]), _range(self.wrong[:, self.reached]), self.gaps
        if self.diverged:
            outcome = "a training is worse than untrained, it diverges"
        elif self.differ:
            outcome = "more than the seeds explain"
        else:
            outcome = "no difference that these seeds can tell"
        apart = (
            f". Seed by seed the second is higher by {gaps.mean():z.3f} ± {self.margin:.3f} (95 %, {len(gaps)} seeds)"
        )
        return (
            f"After {self.updates[self.reached]} updates the held-out loss per token is {right} with token-mean "
            f"and {wrong} with {self.rule}{apart if gaps.isfinite().all() else ''}: {outcome}."
        )


def _range(values: Tensor) -> str:
    if not values.isfinite().all():
        return "no longer a number"
    return f"{values.mean():.3f} ({values.min():.3f} … {values.max():.3f})"


def trainings(
    *,
    rule: Annotated[str, Choice(WORDS, help="the method beside token-mean")] = "mean-of-means",
    optimizer: Annotated[str, Choice(tuple(LEARNING_RATES), help="plain SGD, or Adam")] = "SGD",
    learning_rate: Annotated[float, Range(0.1, 10, log=True, help="as a multiple of 0.3 (SGD) or 0.01 (Adam)")] = 1.0,
    updates: Annotated[int, Range(10, 2000, unit="optimizer steps", help="optimizer steps of each training")] = 200,
    accumulation_steps: Steps = 8,
    sequences: Sequences = 8,
    seeds: Annotated[int, Range(3, 8, unit="seeds", help="trainings of each rule")] = 3,
    seed: Seed = 0,
) -> Iterator[Trainings]:
    """Trainings that differ in nothing but the rule: the same text, weights at the start and optimizer.

    >>> first = next(trainings(updates=10))
    >>> first.measured, first.progress
    (1, 0.05555555555555555)

    A generator of the result so far. float32, held-out loss of 64 documents every 5 updates. Raises LabError for
    more microbatches than sequences, before anything is trained.
    """
    split(*batch(seed, sequences), accumulation_steps)  # refused before anything is trained
    words, at = ("token-mean", rules.rule(rule).word), sorted({*range(0, updates, EVERY), updates})
    losses = torch.full((2, seeds, len(at)), math.nan)
    runs = {
        (side, each): training(word, optimizer, learning_rate, updates, accumulation_steps, sequences, seed + each)
        for each in range(seeds)
        for side, word in enumerate(words)
    }
    for point in range(len(at)):
        for measured, (where, run) in enumerate(runs.items(), 1 + point * len(runs)):
            losses[*where, point] = next(run)
            yield Trainings(rule, torch.tensor(at), losses[0].clone(), losses[1].clone(), measured)


def training(
    word: str, optimizer: str, learning_rate: float, updates: int, accumulation_steps: int, sequences: int, seed: int
) -> Iterator[float]:
    """One training by one rule: the held-out loss per token before it, every 5 updates, and after it."""
    model = Transformer(seed=seed)
    make = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[optimizer]
    opt = make(model.parameters(), lr=learning_rate * LEARNING_RATES[optimizer])
    for step in range(updates):
        if step % EVERY == 0:
            yield held_out_loss(model)
        microbatches = split(*batch(1_000_003 * (seed + 1) + step, sequences), accumulation_steps)
        rules.rule(word).run(model, microbatches)
        opt.step()
    yield held_out_loss(model)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """Loss per valid token on 64 documents that no training sees, in nat.

    >>> 4 < held_out_loss(Transformer()) < 7
    True
    """
    tokens, labels = batch(0, 64, held_out=True)
    return next_token_loss(model, tokens, labels).item() / valid_tokens(labels)
