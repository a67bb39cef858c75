"""One pipeline step in the ranks' processes, and the reference gradients computed in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from labkit import workers
from labkit.fit import gradient_of
from labkit.pipeline.stages import chunks, token_sum

Batch = tuple[Tensor, Tensor]


def run_pipeline(
    batches: Sequence[Batch], ranks: int, microbatches: int, schedule: str, loss: str, scale_grads: bool, seed: int
) -> list[Tensor]:
    """The gradient of the whole model after one pipeline step for each batch, from the ranks that hold its parts."""
    answers = workers.run(
        "labkit.pipeline.stages:gradients",
        ranks,
        schedule=schedule,
        microbatches=microbatches,
        loss=loss,
        scale_grads=scale_grads,
        batches=[(tokens.tolist(), targets.tolist()) for tokens, targets in batches],
        seed=seed,
    )
    order = range(ranks * chunks(schedule))
    gradients = [[answers[stage % ranks][at][stage // ranks] for stage in order] for at in range(len(batches))]
    return [torch.cat([torch.tensor(part, dtype=torch.float64) for part in parts]) for parts in gradients]


def sums(whole: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the summed loss of each row alone, [rows, P]: no pipeline, one process.

    >>> from labkit.pipeline.stages import data, model
    >>> sums(model(2, seed=0), *data(3, seed=0)).shape
    torch.Size([3, 10432])
    """
    losses = [token_sum(whole(x), y, 1) for x, y in zip(tokens.split(1), targets.split(1), strict=True)]
    return torch.stack([gradient_of(whole, loss) for loss in losses])
