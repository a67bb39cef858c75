"""Communication hooks that do what DistributedDataParallel does anyway, and record it.

DDP compares the annotations of a hook with the types themselves, so here they may not be strings.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it too, without a type

Span = list[float]  # start and end of an all-reduce, perf_counter seconds


def average(payload: Tensor) -> torch.futures.Future[Tensor]:
    """A future of the mean of a bucket over the ranks: a hook has to divide by W itself."""
    work = dist.all_reduce(payload.div_(dist.get_world_size()), async_op=True)
    future: torch.futures.Future[list[Tensor]] = work.get_future()
    return future.then(lambda means: means.value()[0])


def record_bytes(messages: list[int], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, and record its bytes."""
    messages.append(bucket.buffer().nbytes)
    return average(bucket.buffer())


def record_span(spans: list[Span], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, and record when it left and when its mean was there."""
    span = [time.perf_counter()]
    spans.append(span)

    def arrived(mean: torch.futures.Future[Tensor]) -> Tensor:
        span.append(time.perf_counter())
        return mean.value()

    return average(bucket.buffer()).then(arrived)
