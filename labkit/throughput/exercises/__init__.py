"""The exercises of the throughput lab: a step that is right first and fast second, and a throughput of a run."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from labkit.audit import Report, audit
from labkit.corpus import Batch, batch
from labkit.device import quota_threads
from labkit.errors import LabError
from labkit.exercise import sandbox
from labkit.exercise.formula import Exercise
from labkit.exercise.verdict import Function, Verdict, aside, exercise, refusal
from labkit.nets import IGNORE, Transformer, next_token_loss, valid_tokens
from labkit.throughput.exercises.speed_score import scored
from labkit.wording import percent, word

MOST = 8  # rows that one forward may take
ROWS, LENGTH = 32, 64
SEEDS = (399, 2)  # of the hidden batches
FORWARDS = "every row goes through the model once and whole"
FEW = f"at most {MOST} rows at a time"
MEAN = "one optimizer step, on the gradient of the token mean"
AGAIN = "nothing is carried into the next step"
CHECKS = FORWARDS, FEW, MEAN, AGAIN
LEFT = ("stale-gradient", "carried-over")


def plain_step(model: nn.Module, optimizer: Optimizer, tokens: Tensor, labels: Tensor) -> None:
    """What speed is measured against: one row at a time, padding and all."""
    valid = valid_tokens(labels)
    optimizer.zero_grad()
    for row in range(len(tokens)):
        (next_token_loss(model, tokens[row : row + 1], labels[row : row + 1]) / valid).backward()
    optimizer.step()


@exercise
@quota_threads(1)
def train_step(function: Function, *, seconds: float = 10.0) -> Verdict:
    """Judge `train_step(model, optimizer, tokens, labels)`: right first, and then how fast.

    >>> def eight(model, optimizer, tokens, labels):
    ...     optimizer.zero_grad()
    ...     for x, y in zip(tokens.split(8), labels.split(8)):
    ...         (next_token_loss(model, x, y) / valid_tokens(labels)).backward()
    ...     optimizer.step()
    >>> train_step(eight).passed
    True

    tokens, labels: [32, 64], rows of unequal length, padded; a forward may take 8 of them at most, in any order.
    Right is one optimizer step on the token mean of all rows, by `labkit.audit.audit` in float64. The score is the
    ratio of valid tokens a second to `plain_step`, seven runs each in turn, by `labkit.decision.decide`; it never
    decides whether a step passes. On the CPU, float32, one thread. `seconds`: for one call.
    """
    if why := refusal(function, "model", "optimizer", "tokens", "labels"):
        return Verdict(False, tuple((check, False) for check in CHECKS), why, "")
    trials = [Trial(function, batch(seed, ROWS, LENGTH, text="made"), seconds) for seed in SEEDS]
    example = trials[0]
    for trial in trials:
        results, fault = trial.judge()
        if fault:
            example = trial
            break
    sentence = fault or f"Right. {scored(plain_step, function, example.pair, seconds)} {example.hint()}".strip()
    checks = tuple(zip(CHECKS, results, strict=True))
    return Verdict(all(results), checks, sentence + aside(example.outcome), example.outcome.printed)


# Is it right?


class Trial:
    """A learner's step on one batch, watched."""

    def __init__(self, function: Function, pair: Batch, seconds: float) -> None:
        self.function, self.pair, self.seconds = function, pair, seconds
        self.lengths = (pair[1] != IGNORE).sum(1)
        self.forwards: list[Tensor] = []  # what the model was given in the first call
        self.waiting = self.most = 0  # rows that wait for a backward
        self.outcome = sandbox.Outcome(None, "", "", (), 0.0, False)

    def build(self) -> tuple[Transformer, Callable[[list[Any]], object]]:
        """A float64 model with its step, the same weights each time."""
        model = Transformer(seed=0, length=LENGTH + 1, dtype=torch.float64)
        optimizer = SGD(model.parameters(), lr=0.01)

        def step(_: list[Any]) -> None:
            copies = [each.clone() for each in self.pair]
            self.outcome = sandbox.run(self.function, model, optimizer, *copies, seconds=self.seconds)
            if self.outcome.error:
                raise LabError(self.outcome.error)
            if any(not torch.equal(mine, each) for mine, each in zip(copies, self.pair, strict=True)):
                raise LabError("Your function changes tokens or labels, and the next epoch sees them again")

        return model, step

    def watch(self) -> None:
        """The first call, with an eye on what the model is given."""
        model, step = self.build()
        handles = [
            model.register_forward_pre_hook(lambda _, arguments: self._enter(arguments[0])),
            model.embedding.register_post_accumulate_grad_hook(lambda _: self._leave()),
        ]
        step([])
        for handle in handles:
            handle.remove()

    def _enter(self, rows: Tensor) -> None:
        self.forwards.append(rows.detach().clone())
        self.waiting += len(rows)
        self.most = max(self.most, self.waiting)

    def _leave(self) -> None:
        self.waiting = 0

    def judge(self) -> tuple[tuple[bool, ...], str]:
        """Which checks hold, and the first fault in a sentence."""
        none = (False,) * len(CHECKS)
        try:
            self.watch()
            if not self.forwards:
                return none, "The model was never called: give rows to model, or to next_token_loss."
            rows = [rows_of(inputs, self.pair[0], self.lengths) for inputs in self.forwards]
            if fault := self.fault(rows):
                return (False, self.most <= MOST, False, False), fault
            report = audit(self.build, [self.of(each) for each in rows], loss_sum, windows=2)
        except LabError as error:
            return none, self.outcome.error or f"{error}."
        residue = any(name.startswith(LEFT) for name in report.faults)
        mean = not [name for name in report.faults if not name.startswith(LEFT)] and not report.clips
        return (True, self.most <= MOST, mean, not residue), f"{_sentence(report)} {self.crowd()}".strip()

    def crowd(self) -> str:
        """What is wrong where too many rows are held at once."""
        if self.most <= MOST:
            return ""
        if max(map(len, self.forwards)) > MOST:
            return f"{self.most} rows went through the model at once, and the memory holds {MOST}."
        crowd = f"{self.most} rows wait for a backward() at once, and the memory holds {MOST}"
        return f"{crowd}: call backward() on each loss before the next forward."

    def of(self, rows: Sequence[int]) -> Batch:
        """These rows, whole."""
        return self.pair[0][list(rows)], self.pair[1][list(rows)]

    def fault(self, rows: Sequence[Sequence[int]]) -> str:
        """What is wrong with the rows that went through the model, before any gradient is looked at."""
        places = list(itertools.chain.from_iterable(rows))
        widths = {row: inputs.shape[1] for inputs, each in zip(self.forwards, rows, strict=True) for row in each}
        if -1 in places:
            return "A row went through the model that is none of the batch: change neither tokens nor their places."
        if twice := [row for row in places if places.count(row) > 1]:
            return f"Row {twice[0]} went through the model {word(places.count(twice[0]))} times, and once is enough."
        if missing := [row for row in range(ROWS) if row not in places]:
            return (
                f"{len(missing)} of {ROWS} rows never went through the model, the first is row {missing[0]}: where the "
                "size does not divide the rows, a short microbatch is left."
            )
        if short := [row for row in places if widths[row] < self.lengths[row] - 1]:
            first, length = short[0], int(self.lengths[short[0]])
            return f"Row {first} has {length} tokens, and {widths[first]} went through the model: cut only padding."
        return ""

    def hint(self) -> str:
        """What is left to gain, from what went through the model."""
        forwards = len(self.forwards)
        if forwards > ROWS / MOST:
            return f"A forward may take {MOST} rows, and yours took {ROWS / forwards:.3g} on average."
        padding = 1 - int(self.lengths.sum()) / sum(inputs.numel() for inputs in self.forwards)
        if padding > 0.25:
            return f"{percent(padding)} of what your model computes is padding: cut it, and sort by length."
        return ""


def rows_of(inputs: Tensor, tokens: Tensor, lengths: Tensor) -> list[int]:
    """Which rows of a batch a model was given, cut or padded; −1: none of them.

    >>> rows_of(torch.tensor([[4, 5], [9, 9]]), torch.tensor([[7, 8, 0], [4, 5, 6]]), torch.tensor([2, 3]))
    [1, -1]
    """
    places = []
    for mine in inputs:
        ends = [min(len(mine), int(length)) for length in lengths]
        same = [at for at, end in enumerate(ends) if torch.equal(mine[:end], tokens[at, :end])]
        places.append(max(same, key=lambda at: ends[at], default=-1))
    return places


def loss_sum(model: nn.Module, microbatch: Batch) -> tuple[Tensor, int]:
    """The objective of the exercise, as a sum."""
    return next_token_loss(model, *microbatch), valid_tokens(microbatch[1])


def _sentence(report: Report) -> str:
    lines = []
    for fault in report.details:
        once = fault.word == "last-microbatch-only" and report.backward_passes == 1
        fix = "call backward() in the loop, on each loss" if once else fault.fix
        lines.append(f"{fault.said[:-1]} ({fault.word}). The fix: {fix}.")
    return " ".join([*lines, *(["The gradient was clipped inside: leave that out here."] if report.clips else [])])


# The throughput of a run.


@dataclass(frozen=True)
class Run:
    """What the logs of a run hold, a number for each step."""

    valid: Sequence[int]
    positions: Sequence[int]
    step: Sequence[float]
    microbatch: Sequence[float]


COUNT: dict[str, Callable[[Run], Sequence[int]]] = {
    "": lambda run: run.valid,
    "positions hold the padding too, and valid tokens are what is learnt from": lambda run: run.positions,
    "steps were counted, and not their tokens": lambda run: [1] * len(run.valid),
}
TIME: dict[str, Callable[[Run], Sequence[float]]] = {
    "": lambda run: run.step,
    "the time of a microbatch was taken, and a step has several and its optimizer": lambda run: run.microbatch,
    "the time is missing": lambda run: [1.0 / len(run.step)] * len(run.step),
}
TOGETHER: dict[str, Callable[[Sequence[int], Sequence[float]], float]] = {
    "": lambda n, t: sum(n) / sum(t),
    "it is the mean of the steps' rates, so that a short step weighs as much as a long one": (
        lambda n, t: statistics.mean(a / b for a, b in zip(n, t, strict=True))
    ),
    "it is the median of the steps' rates, and a run is as long as all its steps": (
        lambda n, t: statistics.median(a / b for a, b in zip(n, t, strict=True))
    ),
    "only the last step is in it": lambda n, t: n[-1] / t[-1],
    "only the first step is in it, the one that warms up": lambda n, t: n[0] / t[0],
    "only the fastest step is in it": lambda n, t: max(a / b for a, b in zip(n, t, strict=True)),
    "the tokens of all steps stand over the time of one": lambda n, t: sum(n) * len(t) / sum(t),
    "the tokens of one step stand over the time of all": lambda n, t: sum(n) / len(n) / sum(t),
    "it is upside down, seconds per token": lambda n, t: sum(t) / sum(n),
    "tokens and seconds are multiplied": lambda n, t: sum(n) * sum(t),
}


def _rate(slips: tuple[str, str, str], *logs: Any) -> float:
    count, took, together = slips
    run = Run(*logs)
    return TOGETHER[together](COUNT[count](run), TIME[took](run))


def _slips() -> dict[str, Callable[..., float]]:
    """Every combination of slips, the fewest first; the first is none."""
    tables = sorted(itertools.product(COUNT, TIME, TOGETHER), key=lambda slips: sum(map(bool, slips)))
    return {"; ".join(filter(None, slips)): functools.partial(_rate, slips) for slips in tables}


TOKENS_PER_SECOND = Exercise(
    ("valid", "positions", "step_seconds", "microbatch_seconds"),
    {
        "two unequal steps": ([300, 100], [512, 512], [0.5, 0.3], [0.125, 0.0625]),
        "a slow first step": ([400, 420, 380], [640, 640, 512], [2.0, 0.5, 0.5], [0.25, 0.125, 0.125]),
        "one step": ([1000], [1600], [0.8], [0.1]),
        "a step without a valid token": ([0, 250, 125], [256, 256, 256], [0.25, 0.5, 0.25], [0.0625, 0.1, 0.05]),
        "many steps": (
            [90, 210, 170, 300, 60, 240],
            [320, 320, 256, 384, 192, 320],
            [0.31, 0.34, 0.27, 0.41, 0.2, 0.37],
            [0.07, 0.08, 0.06, 0.09, 0.04, 0.08],
        ),
    },
    _slips()[""],
    _slips(),
)


@exercise
def tokens_per_second(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `tokens_per_second(valid, positions, step_seconds, microbatch_seconds)`: valid tokens/s of a whole run.

    >>> tokens_per_second(lambda valid, positions, step, micro: sum(positions) / sum(step)).sentence.partition(": ")[2]
    'positions hold the padding too, and valid tokens are what is learnt from.'

    Lists with a number for each optimizer step: valid tokens, token positions with the padding, seconds from before
    zero_grad to after optimizer.step, and seconds of one of its microbatches.
    """
    return TOKENS_PER_SECOND.judge(function, seconds)
