"""Shipped faults of cadence: what should advance once for a window, and advanced with every microbatch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

from labkit.cadence.stepping import (
    Training,
    adam_count_per_microbatch,
    decay_per_microbatch,
    once_per_window,
    schedule_per_microbatch,
)
from labkit.casebook.entry import Build, Case, Loop, Numbers, add
from labkit.nets import Transformer, next_token_loss, valid_tokens
from labkit.rules import Microbatches


def warmed_up(loop: Loop) -> Numbers:
    """A linear warmup over 800 steps to 1e-3, K = 8, after 50 windows."""
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = SGD([weight], lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda index: min(1.0, index / 800))
    for _ in range(50):
        loop(lambda _: 0 * weight.sum(), range(8), Training(optimizer, scheduler))
    return {"learning rate": float(scheduler.get_last_lr()[0]), "index of the schedule": scheduler.last_epoch}


def decayed(loop: Loop) -> float:
    """One window of K = 3 under AdamW without gradient."""
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    loop(lambda _: 0 * weight.sum(), range(3), Training(AdamW([weight], lr=0.1, weight_decay=0.1)))
    return weight.item()


def first_update(loop: Loop) -> float:
    """The first window of K = 3 under Adam, gradient 1."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    loop(lambda _: weight.sum(), range(3), Training(Adam([weight], lr=1.0, eps=0.0)))
    return abs(weight.item())


def training(loop: Loop) -> Build:
    """A loop as a step of a small language model by AdamW with a schedule: what the audit takes."""

    def build() -> tuple[nn.Module, Callable[[Microbatches], None]]:
        model = Transformer(seed=0, width=8, dtype=torch.float64)
        optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        given = Training(optimizer, LambdaLR(optimizer, lambda index: 0.9**index))

        def step(microbatches: Microbatches) -> None:
            N = sum(valid_tokens(labels) for _, labels in microbatches)

            def loss(microbatch: tuple[Tensor, Tensor]) -> Tensor:
                return next_token_loss(model, *microbatch) * len(microbatches) / N

            loop(loss, microbatches, given)

        return model, step

    return build


add(
    Case(
        id="B20",
        topic="schedule K times",
        family="cadence",
        source="huggingface/accelerate#963",
        also=(
            *("huggingface/accelerate#999", "Lightning-AI/pytorch-lightning#1476"),
            *("starVLA/starVLA#210", "h2oai/h2o-llmstudio#663"),
        ),
        versions="accelerate 0.15.0; Lightning, April 2020",
        symptom="Warmup and decay end K times too early when accumulation is on.",
        fault="scheduler.step() runs for every microbatch: its index is K times the number of optimizer steps.",
        recognise="Print the schedule's index beside the optimizer's steps.",
        given="Linear warmup over 800 steps to 0.001, K = 8, after 50 optimizer steps.",
        number="learning rate",
        wrong=schedule_per_microbatch,
        right=once_per_window,
        measure=warmed_up,
        word="schedule-per-microbatch",
        step=training,
    ),
    Case(
        id="B22",
        topic="decay K times",
        family="cadence",
        source="keras-team/keras#19990",
        also=("keras-team/keras#19998",),
        versions="Keras 3 before July 2024, reproduced on 3.4.1",
        symptom="SGD with weight decay and accumulation does not match the large batch; decay over K repairs it.",
        fault="Decoupled decay runs at every microbatch: (1 − ηλ) to the power K, and not 1 − ηλ.",
        recognise="A step with a zero gradient: by how much did the weights shrink?",
        given="η = 0.1, λ = 0.1, K = 3, gradient 0, weight 1, one window.",
        number="weight after the window",
        wrong=decay_per_microbatch,
        right=once_per_window,
        measure=decayed,
        word="decay-per-microbatch",
        step=training,
    ),
    Case(
        id="B23",
        topic="Adam counts microbatches",
        family="cadence",
        source="keras-team/keras#19990",
        also=("keras-team/keras#19998",),
        versions="Keras 3 before July 2024, reproduced on 3.4.1",
        symptom="Adam with accumulation never matches the large batch, even without weight decay.",
        fault="The bias correction uses the count of calls, K for an update, while m and v advanced once.",
        recognise="Adam's step is K times the updates. Early updates are too small, then too large; late ones right.",
        given="β₁ = 0.9, β₂ = 0.999, ε = 0, K = 3, gradient 1, learning rate 1.",
        number="length of the first update",
        wrong=adam_count_per_microbatch,
        right=once_per_window,
        measure=first_update,
        word="adam-count-per-microbatch",
        step=training,
    ),
)
