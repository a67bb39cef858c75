"""Steps on ranks, right and wrong, as people write them: what the tests of the audit across ranks import."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from labkit.corpus import batch, split
from labkit.data_parallel.rank_losses import on_all_ranks, quiet, replica
from labkit.nets import Transformer, next_token_loss, valid_tokens

microbatches = split(*batch(3, 14, text="made"), 6)
Step = Callable[[list[Any]], None]
Made = tuple[nn.Module, Step]


def loss_sum(model: nn.Module, microbatch: Any) -> Any:
    return next_token_loss(model, *microbatch, "sum"), valid_tokens(microbatch[1])


def share(batches: list[Any]) -> float:
    """W / N."""
    return dist.get_world_size() / on_all_ranks(sum(valid_tokens(labels) for _, labels in batches))


def made(loop: Callable[[DistributedDataParallel, list[Any]], None], optimizer: Any = None) -> Made:
    model = replica(seed=0)
    optimizer = (optimizer or SGD)(model.parameters(), lr=0.01)

    def step(batches: list[Any]) -> None:
        optimizer.zero_grad()
        loop(model, batches)
        optimizer.step()

    return model, step


def backward(model: Any, batches: list[Any], factor: float) -> None:
    for at, each in enumerate(batches):
        with quiet(model, at, len(batches)):
            (loss_sum(model, each)[0] * factor).backward()


def right() -> Made:
    return made(lambda model, batches: backward(model, batches, share(batches)), AdamW)


def right_reduced_by_hand() -> Made:
    """No DDP at all: the sums are all-reduced."""
    model = replica(seed=0).module
    optimizer = SGD(model.parameters(), lr=0.01)

    def step(batches: list[Any]) -> None:
        optimizer.zero_grad()
        N = on_all_ranks(sum(valid_tokens(labels) for _, labels in batches))
        for each in batches:
            (loss_sum(model, each)[0] / N).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()

    return model, step


def right_clipped() -> Made:
    def loop(model: DistributedDataParallel, batches: list[Any]) -> None:
        backward(model, batches, share(batches))
        clip_grad_norm_(model.parameters(), 0.1)

    return made(loop)


def right_every_microbatch() -> Made:
    """Synchronised too often, which costs time and nothing else."""

    def loop(model: DistributedDataParallel, batches: list[Any]) -> None:
        factor = share(batches)
        for each in batches:
            (loss_sum(model, each)[0] * factor).backward()

    return made(loop)


class Accumulating(Optimizer):
    """Adds gradients up internally, and moves the weights at every K-th call."""

    def __init__(self, parameters: Any, K: int) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.calls, self.K = 0, K

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for p in self.param_groups[0]["params"]:
            total = self.state[p].setdefault("sum", torch.zeros_like(p))
            total += p.grad
            if self.calls % self.K == 0:
                p -= self.param_groups[0]["lr"] * total
                total.zero_()


def accumulated_internally(model: nn.Module, K: int, factor: Callable[[list[Any]], float]) -> Made:
    optimizer = Accumulating(model.parameters(), K)

    def step(batches: list[Any]) -> None:
        for each in batches:
            optimizer.zero_grad()
            (loss_sum(model, each)[0] * factor(batches)).backward()
            optimizer.step()

    return model, step


def right_accumulated_internally() -> Made:
    return accumulated_internally(replica(seed=0), 3, share)


def rank_means() -> Made:
    def loop(model: DistributedDataParallel, batches: list[Any]) -> None:
        backward(model, batches, 1 / sum(valid_tokens(labels) for _, labels in batches))

    return made(loop)


def missing_world_factor() -> Made:
    return made(lambda model, batches: backward(model, batches, share(batches) / dist.get_world_size()))


def mean_times_world() -> Made:
    def loop(model: DistributedDataParallel, batches: list[Any]) -> None:
        backward(model, batches, dist.get_world_size() / sum(valid_tokens(labels) for _, labels in batches))

    return made(loop)


def world_factor_twice() -> Made:
    return made(lambda model, batches: backward(model, batches, share(batches) * dist.get_world_size()))


def mean_of_means() -> Made:
    def loop(model: DistributedDataParallel, batches: list[Any]) -> None:
        for at, each in enumerate(batches):
            with quiet(model, at, len(batches)):
                (next_token_loss(model, *each, "mean") / len(batches)).backward()

    return made(loop)


def divided_by_k_too() -> Made:
    return made(lambda model, batches: backward(model, batches, share(batches) / len(batches)))


def token_sum() -> Made:
    return made(lambda model, batches: backward(model, batches, dist.get_world_size()))


def padded_count() -> Made:
    def loop(model: DistributedDataParallel, batches: list[Any]) -> None:
        total = on_all_ranks(sum(labels[:, 1:].numel() for _, labels in batches))
        backward(model, batches, dist.get_world_size() / total)

    return made(loop)


def through_the_module() -> Made:
    def loop(model: DistributedDataParallel, batches: list[Any]) -> None:
        factor = share(batches)
        for each in batches:
            (loss_sum(model.module, each)[0] * factor).backward()

    return made(loop)


def never_synchronised() -> Made:
    def loop(model: DistributedDataParallel, batches: list[Any]) -> None:
        factor = share(batches)
        with model.no_sync():
            for each in batches:
                (loss_sum(model, each)[0] * factor).backward()

    return made(loop)


def first_synchronised() -> Made:
    def loop(model: DistributedDataParallel, batches: list[Any]) -> None:
        factor = share(batches)
        for at, each in enumerate(batches):
            with model.no_sync() if at else contextlib.nullcontext():
                (loss_sum(model, each)[0] * factor).backward()

    return made(loop)


def stepped_each_time() -> Made:
    model = replica(seed=0)
    optimizer = SGD(model.parameters(), lr=0.01)

    def step(batches: list[Any]) -> None:
        factor = share(batches)
        for each in batches:
            optimizer.zero_grad()
            (loss_sum(model, each)[0] * factor).backward()
            optimizer.step()

    return model, step


def one_rank_skips() -> Made:
    model = replica(seed=0)
    optimizer, scaler = SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=1024.0)

    def step(batches: list[Any]) -> None:
        optimizer.zero_grad()
        factor = share(batches)
        for at, each in enumerate(batches):
            with quiet(model, at, len(batches)):
                scaler.scale(loss_sum(model, each)[0] * factor).backward()
        if dist.get_rank() == 1:
            next(model.parameters()).grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()

    return model, step


def schedule_in_the_loop() -> Made:
    model = replica(seed=0)
    optimizer = SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def step(batches: list[Any]) -> None:
        optimizer.zero_grad()
        factor = share(batches)
        for at, each in enumerate(batches):
            with quiet(model, at, len(batches)):
                (loss_sum(model, each)[0] * factor).backward()
            if at < len(batches) - 1:
                continue
            optimizer.step()
        for _ in batches:
            schedule.step()

    return model, step


def not_finite() -> Made:
    return made(lambda model, batches: backward(model, batches, math.nan))


def no_step() -> Made:
    model = replica(seed=0)
    return model, lambda batches: None


def raises() -> Made:
    raise RuntimeError("no such file")


def in_bfloat16(factor: Callable[[list[Any]], float]) -> Made:
    """A float32 model under autocast, whose rounding is far above float32's."""
    model = DistributedDataParallel(Transformer(seed=0))
    optimizer = SGD(model.parameters(), lr=0.01)

    def step(batches: list[Any]) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            backward(model, batches, factor(batches))
        optimizer.step()

    return model, step


def right_in_bfloat16() -> Made:
    return in_bfloat16(share)


def rank_means_in_bfloat16() -> Made:
    return in_bfloat16(lambda batches: 1 / sum(valid_tokens(labels) for _, labels in batches))
