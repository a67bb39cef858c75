"""Shipped faults of several processes, run on real ranks with torch's own DistributedDataParallel and pipeline."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit import workers
from labkit.casebook.cases.weights import GRADIENT, Marked, total
from labkit.casebook.entry import Case, Loop, Numbers, add
from labkit.corpus import made
from labkit.data_parallel.hook import record_bytes
from labkit.data_parallel.rank_losses import on_all_ranks
from labkit.nets import next_token_loss, valid_tokens
from labkit.rules import Microbatches

Given = Sequence[Sequence[Sequence[int]]]  # for every rank, for every microbatch, the gradient of every target
REDUCED, OF_RANK_0 = "all-reduces", "gradient of rank 0"


# The loops. Each runs on every rank; `model` is DistributedDataParallel.


def local_means(model: nn.Module, microbatches: Microbatches) -> None:
    """Every rank divides by its own count, and DDP takes the mean over ranks."""
    for tokens, labels in microbatches:
        next_token_loss(model, tokens, labels, "mean").backward()


def sum_over_global_count(model: nn.Module, microbatches: Microbatches) -> None:
    """Divided by the count of all ranks, and DDP divides by W once more."""
    N = on_all_ranks(sum(valid_tokens(labels) for _, labels in microbatches))
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels, "sum") / N).backward()


def sum_times_world_over_count(model: nn.Module, microbatches: Microbatches) -> None:
    """W/N: what DDP divides by is multiplied back."""
    W = dist.get_world_size()
    N = on_all_ranks(sum(valid_tokens(labels) for _, labels in microbatches))
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels, "sum") * W / N).backward()


def mean_times_world(model: nn.Module, microbatches: Microbatches) -> None:
    """The mean is multiplied by the world size, and DDP averages already."""
    W = dist.get_world_size()
    for tokens, labels in microbatches:
        (next_token_loss(model, tokens, labels, "mean") * W).backward()


def no_sync_around_backward(model: Any, microbatches: Microbatches) -> None:
    """no_sync stands around backward alone, and DDP has decided in forward."""
    *early, last = microbatches
    for tokens, labels in early:
        loss = next_token_loss(model, tokens, labels)
        with model.no_sync():
            loss.backward()
    next_token_loss(model, *last).backward()


def no_sync_around_both(model: Any, microbatches: Microbatches) -> None:
    """Forward and backward of all but the last stand in no_sync."""
    *early, last = microbatches
    with model.no_sync():
        for tokens, labels in early:
            next_token_loss(model, tokens, labels).backward()
    next_token_loss(model, *last).backward()


def through_module(model: Any, microbatches: Microbatches) -> None:
    """The forward goes past DDP, to the module inside."""
    for tokens, labels in microbatches:
        next_token_loss(model.module, tokens, labels, "mean").backward()


# Running them.


def on_rank(rank: int, world: int, loop: str, given: Given) -> tuple[float, float]:
    """Run a loop on this rank's microbatches under DDP: the gradient it has, and how many all-reduces DDP made."""
    inside, messages = Marked(), list[int]()
    model = DistributedDataParallel(inside)
    model.register_comm_hook(messages, record_bytes)
    _loop(loop)(model, made([[targets] for targets in given[rank]]))
    return total(inside), float(len(messages))


def _loop(name: str) -> Loop:
    module, _, function = name.partition(":")
    loop: Loop = getattr(importlib.import_module(module), function)
    return loop


def on_ranks(*given: Sequence[Sequence[int]], first: str = OF_RANK_0) -> Callable[[Loop], Numbers]:
    """Run a loop on as many ranks as have microbatches: the gradient of the first and last rank, and all-reduces."""

    def measure(loop: Loop) -> Numbers:
        name = f"{loop.__module__}:{loop.__qualname__}"
        answers = workers.run("labkit.casebook.cases.ranks:on_rank", len(given), loop=name, given=given)
        gradients, reduced = zip(*answers, strict=True)
        numbers = {OF_RANK_0: gradients[0], f"gradient of rank {len(given) - 1}": gradients[-1], REDUCED: reduced[0]}
        return {first: numbers[first], **numbers}

    return measure


# The pipeline.

CALLS = 3


class Stage(nn.Module):
    """A stage of one weight, at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """[b, 1] in and out."""
        return self.weight * x


def summed(y: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradient is 1."""
    return y.sum()


def schedule_scales(stage: Any, schedule_of: Callable[..., Any], M: int, feed: Callable[[Any], None]) -> None:
    """Three calls before the step; each divides the whole .grad by M, what earlier calls left in it too."""
    schedule = schedule_of(stage, M, loss_fn=summed, scale_grads=True)
    for _ in range(CALLS):
        feed(schedule)


def scaled_once(stage: Any, schedule_of: Callable[..., Any], M: int, feed: Callable[[Any], None]) -> None:
    """The schedule leaves .grad alone, and it is divided by M once, before the step."""
    schedule = schedule_of(stage, M, loss_fn=summed, scale_grads=False)
    for _ in range(CALLS):
        feed(schedule)
    for p in stage.submod.parameters():
        p.grad /= M


def on_stage(rank: int, world: int, loop: str) -> float:
    """Run three calls of torch's GPipe schedule, M = 4, on this stage: the gradient of its weight."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    M, module = 4, Stage()
    x = torch.ones(M, 1, dtype=torch.float64)

    def feed(schedule: Any) -> None:
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=[])

    _loop(loop)(PipelineStage(module, rank, world, torch.device("cpu")), ScheduleGPipe, M, feed)
    return 0.0 if module.weight.grad is None else float(module.weight.grad)


def of_stages(loop: Loop) -> Numbers:
    """Two stages; every pipeline microbatch has the gradient 1."""
    name = f"{loop.__module__}:{loop.__qualname__}"
    gradient = workers.run("labkit.casebook.cases.ranks:on_stage", 2, loop=name)[-1]
    return {GRADIENT: gradient, "gradient over the calls": gradient / CALLS}


add(
    Case(
        id="B07",
        topic="mean of rank means",
        family="ranks",
        source="huggingface/transformers#34242",
        also=(
            *("PrimeIntellect-ai/prime-rl#2562", "vllm-project/speculators#942"),
            *("huggingface/transformers#19494", "huggingface/transformers#34373"),
        ),
        versions="transformers before PR 34373 (average_tokens_across_devices)",
        symptom="Training on several GPUs is not equivalent to one process, where ranks hold different numbers of "
        "target tokens.",
        fault="Each rank divides by its own token count and DDP averages: a rank weighs 1/W and not n/N.",
        recognise="Move a long sequence from one rank to another: the gradient of the same batch changes.",
        given="W = 2: rank 0 has 2 targets of gradient 8 together, rank 1 has 6 of gradient 6.",
        number=OF_RANK_0,
        wrong=local_means,
        right=sum_times_world_over_count,
        measure=on_ranks([[5, 3]], [[1] * 6]),
    ),
    Case(
        id="B08",
        topic="1/W too much",
        family="ranks",
        source="meta-pytorch/torchtune#2172",
        also=("facebookresearch/fairseq#494",),
        versions="torchtune until December 2024, probably since October 2024",
        symptom="Gradients shrink with the number of data-parallel workers, after a switch to global token counts.",
        fault="The local sum is divided by the global count, and DDP divides by W once more: the scale must be W/N.",
        recognise="The right direction, 1/W of the length: right on one process.",
        given="W = 2: rank 0 has 2 targets of gradient 8 together, rank 1 has 6 of gradient 6.",
        number=OF_RANK_0,
        wrong=sum_over_global_count,
        right=sum_times_world_over_count,
        measure=on_ranks([[5, 3]], [[1] * 6]),
    ),
    Case(
        id="B13",
        topic="no_sync too narrow",
        family="ranks",
        source="huggingface/accelerate#1726",
        also=("pytorch/PiPPy#1133", "facebookresearch/ClassyVision#706"),
        versions="PyTorch's DDP, all versions",
        symptom="Accumulation under DDP is no faster: every microbatch still communicates.",
        fault="DDP decides in forward whether it will reduce, so no_sync around backward alone does nothing.",
        recognise="The gradient is right. Count the all-reduces of a step, with a profiler or a communication hook.",
        given="W = 2, K = 4: gradients 1, 2, 3, 4 on rank 0 and 10, 20, 30, 40 on rank 1.",
        number=REDUCED,
        wrong=no_sync_around_backward,
        right=no_sync_around_both,
        measure=on_ranks([[1], [2], [3], [4]], [[10], [20], [30], [40]], first=REDUCED),
    ),
    Case(
        id="B40",
        topic="DDP bypassed",
        family="ranks",
        source="jingyaogong/minimind#853",
        versions="minimind, September 2026",
        symptom="Training on several GPUs behaves like one GPU on 1/W of the data; replicas drift apart in silence.",
        fault="The forward of the loss goes through .module, so DDP's hooks are not armed and nothing is reduced.",
        recognise="Compare a weight across ranks after one step: it must be the same to the bit.",
        given="W = 2: gradient 1 on rank 0, 10 on rank 1.",
        number=OF_RANK_0,
        wrong=through_module,
        right=local_means,
        measure=on_ranks([[1]], [[10]]),
    ),
    Case(
        id="B27",
        topic="pipeline scales again",
        family="ranks",
        source="pytorch/torchtitan#1733",
        also=("pytorch/torchtitan#1732",),
        versions="torch.distributed.pipelining with scale_grads=True, its default; seen on a nightly of 2.10",
        symptom="Pipeline parallelism with accumulation gives much smaller gradients, and a loss that diverges.",
        fault="The schedule divides the whole .grad by M after every call: call k of K weighs M^(k − K − 1).",
        recognise="Weights fall off by a factor M from the last call backwards; with one call a step all is well.",
        given="M = 4 pipeline microbatches of gradient 1 in each of 3 calls before the step.",
        number=GRADIENT,
        wrong=schedule_scales,
        right=scaled_once,
        measure=of_stages,
    ),
    Case(
        id="B09",
        topic="W times too large",
        family="ranks",
        source="neuralmagic/sparseml#135",
        symptom="Runs under DDP take steps W times larger than the same batch in one process.",
        fault="A mean is multiplied by the world size, although DDP averages gradients already.",
        recognise="The gradient norm grows with the number of ranks at the same global batch.",
        given="W = 4, equal batches, mean gradients 1, 2, 3, 6.",
        number=OF_RANK_0,
        wrong=mean_times_world,
        right=local_means,
        measure=on_ranks([[1]], [[2]], [[3]], [[6]]),
    ),
)
