"""A clock that only the work itself moves, so that what is measured is known before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.throughput import timing


class Clock:
    """Seconds that pass while a model, an optimizer or a sleep is at work: declared, and added up."""

    def __init__(self, launch: float, per_sequence: float, optimizer: float, per_position: float = 0.0) -> None:
        self.now = 0.0
        self.launch, self.per_sequence, self.optimizer, self.per_position = (
            launch,
            per_sequence,
            optimizer,
            per_position,
        )
        self.given: list[int] = []  # sequences of every forward
        self.factor = 1.0  # how much slower the machine is just now
        self.cold = 0  # the first so many forwards take a second more

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def forward(self, tokens: Tensor) -> None:
        self.given.append(len(tokens))
        took = self.launch + self.per_sequence * len(tokens) + self.per_position * tokens.numel()
        self.now += self.factor * took + (len(self.given) <= self.cold)

    def step(self) -> None:
        self.now += self.factor * self.optimizer


def set_clock(
    monkeypatch: pytest.MonkeyPatch,
    launch: float = 2.0**-10,
    per_sequence: float = 2.0**-13,
    optimizer: float = 2.0**-11,
    per_position: float = 0.0,
) -> Clock:
    """Let everything that `labkit.throughput.timing` times take these seconds."""
    clock = Clock(launch, per_sequence, optimizer, per_position)

    class Transformer(timing.Transformer):
        def forward(self, tokens: Tensor) -> Tensor:
            clock.forward(tokens)
            return self.embedding.sum(1).expand(*tokens.shape, -1)  # quick: only the clock's time counts

    class AdamW(torch.optim.AdamW):
        def step(self, *_: Any) -> Any:
            clock.step()

    monkeypatch.setattr(timing, "Transformer", Transformer)
    monkeypatch.setattr(timing, "AdamW", AdamW)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock
