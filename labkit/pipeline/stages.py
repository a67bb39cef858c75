"""The stages of a pipeline: a small language model in parts, and the work of a rank with the parts it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.corpus import batch
from labkit.declare import Choice, Range
from labkit.errors import LabError
from labkit.fit import flat, gradient
from labkit.nets import IGNORE, VOCABULARY, Block, draw, norm

SCHEDULES = ("GPipe", "1F1B", "Interleaved")
LENGTH, WIDTH = 12, 16
COUNTS = (1, 12, 3, 7)  # valid tokens of the rows, over and over

Ranks = Annotated[int, Range(2, 4, unit="ranks", help="P, processes, each with its own part of the model")]
Microbatches = Annotated[int, Range(1, 8, unit="microbatches", help="M, parts that a batch is cut into")]
Schedule = Annotated[str, Choice(SCHEDULES, help="the order in which a rank works; Interleaved: two stages a rank")]
Loss = Callable[[Tensor, Tensor, int], Tensor]


# The losses that the last stage may compute. logits [b, T, V], targets [b, T], N valid tokens in the whole batch.


def token_mean(logits: Tensor, targets: Tensor, N: int) -> Tensor:
    """The mean over this microbatch's own valid tokens."""
    return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE, reduction="mean")


def token_sum(logits: Tensor, targets: Tensor, N: int) -> Tensor:
    """The sum over this microbatch's valid tokens."""
    return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE, reduction="sum")


def share_of_mean(logits: Tensor, targets: Tensor, N: int) -> Tensor:
    """This microbatch's share of the mean over the whole batch: its sum, divided by N."""
    return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE, reduction="sum") / N


LOSSES: dict[str, Loss] = {"mean": token_mean, "sum": token_sum, "sum / N": share_of_mean}


# The model and its batch.


class Stage(nn.Module):
    """One part of a language model: the first embeds tokens, each has a block, the last gives logits.

    >>> Stage(first=True, last=True)(torch.zeros(2, 12, dtype=torch.long)).shape
    torch.Size([2, 12, 128])
    """

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(VOCABULARY, WIDTH)) if first else None
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH)) if first else None
        self.block = Block(WIDTH, heads=2)
        self.head = nn.Parameter(torch.zeros(VOCABULARY, WIDTH)) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b, T] or a stream [b, T, width] in, a stream or logits [b, T, V] out."""
        if self.embedding is not None and self.position is not None:
            x = self.embedding[x] + self.position
        x = self.block(x)
        return x if self.head is None else F.linear(norm(x), self.head)


def model(stages: int, seed: int) -> nn.Sequential:
    """All stages in order, in float64; every rank builds the same and keeps its own.

    >>> len(model(2, seed=0))
    2
    """
    whole = nn.Sequential(*(Stage(at == 0, at == stages - 1) for at in range(stages))).double()
    draw(whole, seed)
    return whole


def data(rows: int, seed: int, equal: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens and targets [rows, 12]; row r has 1, 12, 3 or 7 valid targets in turn, or 12 each.

    >>> (data(5, seed=0)[1] != IGNORE).sum(1).tolist()
    [1, 12, 3, 7, 1]
    """
    tokens, labels = batch(seed, rows, LENGTH + 1, shortest=LENGTH + 1, text="made")
    counts = torch.tensor([LENGTH if equal else COUNTS[row % len(COUNTS)] for row in range(rows)])
    return tokens[:, :-1], labels[:, 1:].masked_fill(torch.arange(LENGTH) >= counts[:, None], IGNORE)


# What the library takes.


def admit(schedule: str, ranks: int, microbatches: int) -> None:
    """Raises LabError where a schedule does not take this number of microbatches.

    >>> admit("1F1B", 4, 2)
    Traceback (most recent call last):
    labkit.errors.LabError: microbatches = 2 are fewer than 4 ranks, which 1F1B does not take: try 4
    """
    if schedule == "1F1B" and microbatches < ranks:
        few = f"microbatches = {microbatches} are fewer than {ranks} ranks"
        raise LabError(f"{few}, which 1F1B does not take: try {ranks}")
    rounds = max(1, microbatches // ranks)
    if schedule == "Interleaved" and microbatches % rounds:
        even = f"Interleaved runs them in {rounds} equal rounds"
        raise LabError(
            f"microbatches = {microbatches} with {ranks} ranks, {even}: try {microbatches // rounds * rounds}"
        )


def accepts(schedule: str, ranks: int, microbatches: int) -> bool:
    """Whether a schedule takes this number of microbatches.

    >>> accepts("GPipe", 4, 1), accepts("1F1B", 4, 1)
    (True, False)
    """
    try:
        admit(schedule, ranks, microbatches)
    except LabError:
        return False
    return True


def rows_per_microbatch(rows: int, microbatches: int) -> int:
    """Rows of a microbatch; LabError where they would not all be equal.

    >>> rows_per_microbatch(7, 4)
    Traceback (most recent call last):
    labkit.errors.LabError: rows = 7 do not make 4 equal microbatches: add 1 ignored, as padded does, or try 4
    """
    if rows % microbatches or not rows:
        more, less = enough(rows, microbatches) - rows, max(1, rows // microbatches) * microbatches
        add = f"add {more} ignored, as padded does, or try {less}"
        raise LabError(f"rows = {rows} do not make {microbatches} equal microbatches: {add}")
    return rows // microbatches


def enough(rows: int, microbatches: int) -> int:
    """The least number of rows from `rows` on that makes equal microbatches.

    >>> enough(7, 4), enough(8, 4)
    (8, 8)
    """
    return max(1, -(-rows // microbatches)) * microbatches


def pad(tokens: Tensor, targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The batch with ignored rows added, up to `rows`: they weigh nothing in a sum over valid tokens.

    >>> tokens, targets = pad(*data(3, seed=0), rows=4)
    >>> tokens.shape, bool((targets[3] == IGNORE).all())
    (torch.Size([4, 12]), True)
    """
    more = rows - len(tokens)
    return F.pad(tokens, (0, 0, 0, more)), F.pad(targets, (0, 0, 0, more), value=IGNORE)


# What a rank does.


def chunks(schedule: str) -> int:
    """Stages that each rank holds."""
    return 2 if schedule == "Interleaved" else 1


def build(schedule: str, parts: Sequence[nn.Module], rank: int, world: int, microbatches: int, **options: Any) -> Any:
    """The library's schedule over this rank's stages: stage s of all is held by rank s % world."""
    from torch.distributed import pipelining  # two seconds and 75 MB, which only ranks need

    kinds = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}
    device, total = torch.device("cpu"), world * len(parts)
    stages: list[Any] = [
        pipelining.PipelineStage(part, rank + world * at, total, device) for at, part in enumerate(parts)
    ]
    if schedule == "Interleaved":
        return pipelining.ScheduleInterleaved1F1B(stages, microbatches, **options)
    return kinds[schedule](stages[0], microbatches, **options)


def step(pipeline: Any, rank: int, world: int, inputs: Tensor, targets: Tensor, **loss_kwargs: Any) -> None:
    """One rank's part of a step of the whole pipeline: inputs enter at the first rank, targets at the last."""
    if rank == 0:
        pipeline.step(inputs, return_outputs=False)
    elif rank == world - 1:
        pipeline.step(target=targets, loss_kwargs=loss_kwargs, return_outputs=False)
    else:
        pipeline.step(return_outputs=False)


def gradients(
    rank: int,
    world: int,
    *,
    schedule: str,
    microbatches: int,
    loss: str,
    scale_grads: bool,
    batches: Sequence[tuple[list[list[int]], list[list[int]]]],
    seed: int,
) -> list[list[list[float]]]:
    """The gradients that one step for each batch leaves in this rank's stages: batches × stages × numbers."""
    parts = list(model(world * chunks(schedule), seed))[rank::world]
    pipeline = build(schedule, parts, rank, world, microbatches, loss_fn=LOSSES[loss], scale_grads=scale_grads)
    results = []
    for tokens, targets in (map(torch.tensor, pair) for pair in batches):
        N = int((targets != IGNORE).sum())
        step(pipeline, rank, world, tokens, targets, N=N)
        results.append([flat(gradient(part)).tolist() for part in parts])
        for part in parts:
            part.zero_grad()
    return results
