"""Shipped faults of clipping and loss scaling: what was done to the running sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from labkit.casebook.cases.weights import GRADIENT, Marked
from labkit.casebook.entry import Build, Case, Loop, Numbers, add
from labkit.clipping import stepped_with
from labkit.clipping.ordering import clip_once, clip_running_sum
from labkit.corpus import made
from labkit.nets import Transformer, next_token_loss, valid_tokens
from labkit.rules import Microbatches


def unscale_in_the_loop(
    model: nn.Module, microbatches: Microbatches, optimizer: Optimizer, scaler: GradScaler, max_norm: float
) -> None:
    """unscale_ and update after every backward: what is unscaled already is unscaled again."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.update()
    optimizer.step()


def reached(loop: Loop, first: int, second: int, scale: float, max_norm: float) -> Tensor:
    """The gradient of the step on two microbatches of one target each, what each left in it."""
    return stepped_with(loop, Marked(), made([[[first]], [[second]]]), scale, max_norm)[[first, second]]


def clipped_at_five(loop: Loop) -> Numbers:
    """Gradients (6, 0) and (0, 8) in the sum, threshold 5."""
    first, second = reached(loop, 12, 16, scale=1.0, max_norm=5.0).tolist()
    return {"first microbatch's part": first, "second microbatch's part": second, "norm": (first**2 + second**2) ** 0.5}


def scaled_by_four(loop: Loop) -> Numbers:
    """Gradients 1 and 2 in the sum, loss scale 4, nothing to clip."""
    first, second = reached(loop, 2, 4, scale=4.0, max_norm=100.0).tolist()
    return {GRADIENT: first + second, "first microbatch's part": first, "second microbatch's part": second}


def scaled_step(scale: float, max_norm: float) -> Callable[[Loop], Build]:
    """A loop as a step of a small language model by SGD: what the audit takes."""

    def of(loop: Loop) -> Build:
        def build() -> tuple[nn.Module, Callable[[Microbatches], None]]:
            model = Transformer(seed=0, width=8, dtype=torch.float64)
            optimizer, scaler = SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=scale)

            def step(microbatches: Microbatches) -> None:
                loop(model, microbatches, optimizer, scaler, max_norm)
                optimizer.zero_grad()

            return model, step

        return build

    return of


add(
    Case(
        id="B16",
        topic="clip in the loop",
        family="clipping",
        source="huggingface/transformers#986",
        also=(
            *("huggingface/transformers#1563", "huggingface/transformers#1580", "facebookresearch/lingua#59"),
            *("tenstorrent/tt-metal#17568", "Deci-AI/super-gradients#653"),
        ),
        versions="transformers' example scripts until November 2019; lingua until November 2024",
        symptom="Results depend on the order of the microbatches when clipping is on.",
        fault="A clip after every backward clips the running sum again and again: early microbatches shrink most.",
        recognise="The norm is right, the direction is not. Reverse the microbatches: the step changes.",
        given="K = 2, gradients (6, 0) and (0, 8), threshold 5.",
        number="first microbatch's part",
        wrong=clip_running_sum,
        right=clip_once,
        measure=clipped_at_five,
        word="clip-per-microbatch",
        step=scaled_step(1.0, 0.05),
    ),
    Case(
        id="B18",
        topic="unscaled in the loop",
        family="clipping",
        source="huggingface/accelerate#641",
        also=(
            *("pytorch/pytorch#36601", "microsoft/Swin-Transformer#311"),
            *("huggingface/transformers#23905", "huggingface/transformers#24840"),
        ),
        versions="accelerate 0.13.0.dev (the error); PyTorch's GradScaler in general",
        symptom="A RuntimeError that unscale_ was already called, or, in silence, tiny parts of all but the last "
        "microbatch.",
        fault="unscale_ and update in every microbatch unscale earlier gradients again, once for each later one.",
        recognise="Weights fall off by a factor S from the last microbatch backwards. Without update() torch refuses.",
        given="Scale S = 4, K = 2, gradients 1 and 2, nothing to clip.",
        number=GRADIENT,
        wrong=unscale_in_the_loop,
        right=clip_once,
        measure=scaled_by_four,
        word="unscale-early",
        step=scaled_step(4.0, 1e6),
    ),
)
