"""Shipped faults of whole epochs: what becomes of the microbatches that fill no window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from labkit.casebook.cases.weights import Marked, total
from labkit.casebook.entry import Build, Case, Loop, Numbers, add
from labkit.corpus import made
from labkit.nets import Transformer, next_token_loss, valid_tokens
from labkit.rules import Microbatches


def over_k_to_the_end(model: nn.Module, optimizer: Optimizer, epoch: Microbatches, K: int) -> None:
    """Every mean is divided by K, in the last window too."""
    for i, (tokens, labels) in enumerate(epoch, 1):
        loss = next_token_loss(model, tokens, labels, "mean")
        (loss / K).backward()
        if i % K == 0 or i == len(epoch):
            optimizer.step()
            optimizer.zero_grad()


def left_in_grad(model: nn.Module, optimizer: Optimizer, epoch: Microbatches, K: int) -> None:
    """Microbatches that fill no window make no step, and nobody clears what they left."""
    for i, (tokens, labels) in enumerate(epoch, 1):
        loss = next_token_loss(model, tokens, labels, "mean")
        (loss / K).backward()
        if i % K == 0:
            optimizer.step()
            optimizer.zero_grad()


def window_by_window(model: nn.Module, optimizer: Optimizer, epoch: Microbatches, K: int) -> None:
    """Every window is divided by its own count, the last one too."""
    for start in range(0, len(epoch), K):
        window = epoch[start : start + K]
        N = sum(valid_tokens(labels) for _, labels in window)
        for tokens, labels in window:
            loss = next_token_loss(model, tokens, labels, "sum") / N
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def of_epochs(loop: Loop, microbatches: int, K: int, epochs: int) -> list[list[float]]:
    """The gradient of every optimizer step, epoch by epoch; each microbatch has one target, of gradient 1."""
    model, gradients = Marked(), []
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(epochs):
        steps: list[float] = []
        hook = optimizer.register_step_pre_hook(lambda *_, steps=steps: steps.append(total(model)))
        loop(model, optimizer, made([[[1]]] * microbatches), K)
        hook.remove()
        gradients.append(steps)
    return gradients


def last_of_epoch(loop: Loop) -> Numbers:
    """Ten microbatches, K = 4."""
    (steps,) = of_epochs(loop, microbatches=10, K=4, epochs=1)
    return {"gradient of the last step": steps[-1], "gradient of the first step": steps[0]}


def first_of_next_epoch(loop: Loop) -> Numbers:
    """63 microbatches, K = 8, two epochs."""
    first, second = of_epochs(loop, microbatches=63, K=8, epochs=2)
    return {"first step of epoch 2": second[0], "optimizer steps of epoch 1": len(first)}


def as_tail(loop: Loop) -> Build:
    """The window that is audited is the last of an epoch, two microbatches short of K."""

    def build() -> tuple[nn.Module, Callable[[Microbatches], None]]:
        model = Transformer(seed=0, width=8, dtype=torch.float64)
        optimizer = SGD(model.parameters(), lr=0.1)
        return model, lambda microbatches: loop(model, optimizer, microbatches, len(microbatches) + 2)

    return build


add(
    Case(
        id="B06",
        topic="the tail over K",
        family="weights",
        source="Lightning-AI/pytorch-lightning#19987",
        also=("modelscope/ms-swift#10084", "jingyaogong/minimind#749", "Lightning-AI/pytorch-lightning#21808"),
        versions="Lightning 2.0 and 2.2 named by the reporter; open",
        symptom="The last optimizer step of an epoch is smaller than the others, where K does not divide the batches.",
        fault="A window of r < K microbatches is still divided by K: its gradient is r/K of the right one.",
        recognise="The gradient norm dips once an epoch, at its last step.",
        given="10 microbatches an epoch, K = 4: windows of 4, 4 and 2; every microbatch's gradient is 1.",
        number="gradient of the last step",
        wrong=over_k_to_the_end,
        right=window_by_window,
        measure=last_of_epoch,
        word="tail-divided-by-k",
        step=as_tail,
    ),
    Case(
        id="B43",
        topic="left over from an epoch",
        family="weights",
        source="meta-pytorch/torchtune#2745",
        versions="torchtune, May 2025",
        symptom="The loss drops, and accuracy exceeds 100 %, at the start of each epoch.",
        fault="Left-over microbatches are neither stepped nor cleared; the counter restarts, so the next window holds "
        "r + K.",
        recognise="The gradient norm jumps once an epoch, at its first step; the last microbatches make no step.",
        given="63 microbatches an epoch, K = 8, so 7 are left; every microbatch's gradient is 1.",
        number="first step of epoch 2",
        wrong=left_in_grad,
        right=window_by_window,
        measure=first_of_next_epoch,
    ),
)
