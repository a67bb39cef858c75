"""Loops over microbatches under DDP, right and wrong, and what real ranks make of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.corpus import Batch, batch, split
from labkit.data_parallel import no_sync
from labkit.data_parallel.exercises.ddp_stand_in import Alone
from labkit.data_parallel.hook import record_bytes
from labkit.data_parallel.rank_losses import replica
from labkit.nets import Transformer, next_token_loss

Loss = Callable[..., Tensor]


def flag_before(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    for at, each in enumerate(microbatches):
        model.require_backward_grad_sync = at == len(microbatches) - 1
        loss(model, each).backward()


def stack(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    with contextlib.ExitStack() as quiet:
        if len(microbatches) > 1:
            quiet.enter_context(model.no_sync())
        for each in microbatches[:-1]:
            loss(model, each).backward()
    loss(model, microbatches[-1]).backward()


def flag_after_forward(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    for at, each in enumerate(microbatches):
        model.require_backward_grad_sync = False
        found = loss(model, each)
        model.require_backward_grad_sync = at == len(microbatches) - 1
        found.backward()
    model.require_backward_grad_sync = True


def flag_left_off(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    for at, each in enumerate(microbatches):
        found = loss(model, each)
        found.backward()
        if at < len(microbatches) - 1:
            model.require_backward_grad_sync = at == len(microbatches) - 2
    model.require_backward_grad_sync = False


def every_fourth(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    for at, each in enumerate(microbatches):
        with contextlib.nullcontext() if (at + 1) % 4 == 0 else model.no_sync():
            loss(model, each).backward()


def through_the_module(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    for each in microbatches:
        loss(model.module, each).backward()


def one_backward(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    sum((loss(model, each) for each in microbatches), torch.zeros(())).backward()


def second_last(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    for at, each in enumerate(microbatches):
        with contextlib.nullcontext() if at >= len(microbatches) - 2 else model.no_sync():
            loss(model, each).backward()


def zero_grad_in_the_loop(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    for at, each in enumerate(microbatches):
        model.zero_grad()
        with model.no_sync() if at < len(microbatches) - 1 else contextlib.nullcontext():
            loss(model, each).backward()


def divided(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    for at, each in enumerate(microbatches):
        with model.no_sync() if at < len(microbatches) - 1 else contextlib.nullcontext():
            (loss(model, each) / len(microbatches)).backward()


def forgets_the_last(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    for at, each in enumerate(microbatches[:-1]):
        with model.no_sync() if at < len(microbatches) - 2 else contextlib.nullcontext():
            loss(model, each).backward()


def evaluated_before(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    """A forward without gradients arms nothing."""
    with torch.no_grad():
        loss(model, microbatches[0])
    no_sync.forward_and_backward(model, microbatches, loss)


def armed_and_left(model: Any, microbatches: list[Batch], loss: Loss) -> None:
    """A forward whose loss is thrown away arms the next backward."""
    loss(model, microbatches[0])
    no_sync.forward_and_backward(model, microbatches, loss)


LOOPS: dict[str, Any] = {
    **{each.__name__: each for each in no_sync.PATTERNS.values()},
    **{
        each.__name__: each
        for each in (
            *(flag_before, stack, flag_after_forward, flag_left_off, every_fourth, through_the_module, one_backward),
            *(second_last, zero_grad_in_the_loop, divided, forgets_the_last, evaluated_before, armed_and_left),
        )
    },
}


def run_loops(rank: int, world: int, *, K: int) -> dict[str, tuple[list[int], list[int]]]:
    """For every loop: all-reduces so far at each loss, and in the end; by real DDP, and by the stand-in."""
    found = {}
    microbatches = split(*batch(rank, 2 * K, text="made"), K)
    for name, loop in LOOPS.items():
        real, messages = replica(0), list[int]()
        real.register_comm_hook(messages, record_bytes)
        alone = Alone(Transformer(dtype=torch.float64))
        found[name] = (
            _places(loop, real, microbatches, lambda sent=messages: len(sent)),
            _places(loop, alone, microbatches, lambda model=alone: sum(model.passes)),
        )
    return found


def _places(loop: Any, model: nn.Module, microbatches: list[Batch], so_far: Callable[[], int]) -> list[int]:
    found: list[int] = []

    def loss(wrapped: nn.Module, microbatch: Batch) -> Tensor:
        found.append(so_far())
        return next_token_loss(wrapped, *microbatch, "sum")

    loop(model, microbatches, loss)
    return [*found, so_far()]
