"""Four training steps that look right, and the audit of each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from labkit.audit import Report, audit
from labkit.corpus import Batch, Seed, Shortest, batch, split
from labkit.declare import Choice, Range
from labkit.nets import IGNORE, Transformer, next_token_loss, valid_tokens

Microbatches = Sequence[Batch]


def loop_a(model: nn.Module, optimizer: AdamW, scheduler: LambdaLR, microbatches: Microbatches) -> None:
    """The one of every tutorial."""
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "mean")
        (loss / len(microbatches)).backward()
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def loop_b(model: nn.Module, optimizer: AdamW, scheduler: LambdaLR, microbatches: Microbatches) -> None:
    """It counts the tokens first."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for i, (tokens, labels) in enumerate(microbatches):
        loss = next_token_loss(model, tokens, labels, "sum") / N
        loss.backward()
        if i + 1 == len(microbatches):
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


def loop_c(model: nn.Module, optimizer: AdamW, scheduler: LambdaLR, microbatches: Microbatches) -> None:
    """It divides at the end."""
    N = 0
    for tokens, labels in microbatches:
        next_token_loss(model, tokens, labels, "sum").backward()
        N += int((labels[:, 1:] != IGNORE).sum())
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= N
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def loop_d(model: nn.Module, optimizer: AdamW, scheduler: LambdaLR, microbatches: Microbatches) -> None:
    """It counts the labels, and clips."""
    N = sum(int((labels != IGNORE).sum()) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


LOOPS = {"A": loop_a, "B": loop_b, "C": loop_c, "D": loop_d}


def loss_sum(model: nn.Module, microbatch: Batch) -> tuple[Tensor, int]:
    """The objective as the audit wants it: the sum over valid tokens, and their number.

    >>> from labkit.nets import Scalar
    >>> loss, count = loss_sum(Scalar(), (torch.tensor([[3, 5, 0]]), torch.tensor([[1, 1, 1]])))
    >>> round(loss.item(), 2), count
    (1.39, 2)
    """
    tokens, labels = microbatch
    return next_token_loss(model, tokens, labels, "sum"), valid_tokens(labels)


def loops(
    *,
    loop: Annotated[str, Choice(tuple(LOOPS), help="which one is audited: they stand in the code below")] = "A",
    accumulation_steps: Annotated[
        int, Range(2, 8, unit="microbatches", help="K, microbatches of one optimizer step")
    ] = 4,
    shortest: Shortest = 4,
    seed: Seed = 0,
) -> Report:
    """One update of a small language model by a loop, watched by the audit.

    >>> loops(loop="B").faults
    ('schedule-per-microbatch',)

    A transformer in float64 on two documents a microbatch; AdamW, a warmup, a clip at 0.5.
    """
    microbatches = window(accumulation_steps, shortest, seed)

    def build() -> tuple[nn.Module, Callable[[Microbatches], None]]:
        model = Transformer(seed=seed, width=8, dtype=torch.float64)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        scheduler = LambdaLR(optimizer, lambda step: min(1, (step + 1) / 100))
        return model, lambda window: LOOPS[loop](model, optimizer, scheduler, window)

    with warnings.catch_warnings(action="ignore"):  # torch itself warns of loop B, at the first window only
        return audit(build, microbatches, loss_sum)


def window(accumulation_steps: int, shortest: int, seed: int) -> list[Batch]:
    """K microbatches of two sequences each.

    >>> [valid_tokens(labels) for _, labels in window(4, 32, 0)]
    [62, 62, 62, 62]
    """
    return split(*batch(seed, 2 * accumulation_steps, shortest=shortest, text="made"), accumulation_steps)
