"""Ranks that are not alike: one without a valid token, and one with fewer microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit import workers
from labkit.corpus import Batch, Seed
from labkit.data_parallel.compare import Ranks, draw_batches, share
from labkit.data_parallel.rank_losses import Plain, from_lists, gradient_list, layout, quiet, replica
from labkit.declare import Choice, Range, quantity
from labkit.errors import LabError
from labkit.fit import distance
from labkit.nets import IGNORE, next_token_loss

PATIENCE = 1.0  # seconds after which a rank that has not answered counts as hanging


# A rank without a valid token. tokens, labels: all that this rank has; N: valid tokens on all ranks.


def token_mean(model: nn.Module, tokens: Tensor, labels: Tensor, N: int, W: int) -> Tensor:
    """Right: a sum over nothing is exactly 0, and its backward takes part in the all-reduce."""
    return next_token_loss(model, tokens, labels, "sum") * W / N


def at_least_one(model: nn.Module, tokens: Tensor, labels: Tensor, N: int, W: int) -> Tensor:
    """A mean that divides by max(n, 1): no NaN, and the other ranks are still divided by W."""
    n = (labels[:, 1:] != IGNORE).sum()
    return next_token_loss(model, tokens, labels, "sum") / n.clamp(min=1)


def library_mean(model: nn.Module, tokens: Tensor, labels: Tensor, N: int, W: int) -> Tensor:
    """The library's mean: NaN as a loss, 0 as a gradient."""
    return next_token_loss(model, tokens, labels, "mean")


def masked_mean(model: nn.Module, tokens: Tensor, labels: Tensor, N: int, W: int) -> Tensor:
    """A mean by hand: 0/0, and the all-reduce carries the NaN to every rank."""
    mask = labels[:, 1:] != IGNORE
    losses = next_token_loss(model, tokens, labels.clamp(min=0), "none")
    return (losses * mask).sum() / mask.sum()


POLICIES: dict[str, Callable[..., Tensor]] = {
    "sum × W / N": token_mean,
    "sum / max(n, 1)": at_least_one,
    "library mean": library_mean,
    "masked mean by hand": masked_mean,
}


def run_policies(
    rank: int, world: int, *, batches: Sequence[Plain], total: int, seed: int
) -> list[tuple[float, list[float]]]:
    """For every policy: this rank's loss, and the gradient that it has after the all-reduce."""
    results = []
    for policy in POLICIES.values():
        model = replica(seed)
        (microbatch,) = from_lists(batches[rank])
        loss = policy(model, *microbatch, total, world)
        loss.backward()
        results.append((loss.item(), gradient_list(model)))
    return results


@dataclass(frozen=True)
class Policy:
    """The result of one policy for an optimizer step with an empty rank."""

    name: str = quantity("the loss of a rank")
    empty_loss: float = quantity("loss of the empty rank", "nat")
    broken: int = quantity("ranks whose gradient is not finite, after the all-reduce", "ranks")
    relative_error: float = quantity("‖g − G‖ / ‖G‖ on the first rank; NaN: not finite")
    norm_ratio: float = quantity("‖g‖ / ‖G‖ on the first rank")


@dataclass(frozen=True)
class EmptyRank:
    """An optimizer step in which one rank has nothing to predict."""

    ranks: int = quantity("W", "ranks")
    counts: tuple[int, ...] = quantity("valid tokens of each rank", "tokens")
    tolerance: float = quantity("relative error that rounding alone explains")
    policies: tuple[Policy, ...] = quantity("the result of each policy")


def empty_rank(
    *,
    ranks: Annotated[int, Range(2, 4, unit="ranks", help="W, processes with a replica of the model each")] = 2,
    empty: Annotated[int, Range(0, 3, help="the rank whose labels are all ignored")] = 1,
    seed: Seed = 0,
) -> EmptyRank:
    """One rank has no valid token and still takes part.

    >>> [(each.name, each.broken) for each in empty_rank().policies]
    [('sum × W / N', 0), ('sum / max(n, 1)', 0), ('library mean', 0), ('masked mean by hand', 2)]

    Real DistributedDataParallel, one microbatch of two documents a rank, float64. Raises LabError for a rank that
    does not exist.
    """
    if empty >= ranks:
        raise LabError(f"empty = {empty} is no rank of {ranks}, which are 0 … {ranks - 1}: try {ranks - 1}")
    microbatches = draw_batches(ranks, 1, 4, seed)
    microbatches[empty][0][1].fill_(IGNORE)
    reference = share(microbatches, seed)
    run = "labkit.data_parallel.uneven_ranks:run_policies"
    answers = workers.run(run, ranks, batches=reference.plain, total=reference.total, seed=seed)
    policies = []
    for at, name in enumerate(POLICIES):
        losses, gradients = zip(*(answer[at] for answer in answers), strict=True)
        by_rank = torch.tensor(gradients, dtype=torch.float64)
        broken = int((~by_rank.isfinite().all(1)).sum())
        error = distance(by_rank[0], reference.right)
        policies.append(Policy(name, losses[empty], broken, error.relative_error, error.norm_ratio))
    return EmptyRank(ranks, tuple(map(sum, reference.counts)), reference.tolerance.value, tuple(policies))


# Uneven numbers of microbatches. loss(model, microbatch) is the correct share, summed loss × W / N.


def every(model: DistributedDataParallel, microbatches: Sequence[Batch], loss: Callable[..., Tensor]) -> None:
    """An all-reduce for every microbatch: a rank that has more waits forever."""
    for microbatch in microbatches:
        loss(model, microbatch).backward()


def joined(model: DistributedDataParallel, microbatches: Sequence[Batch], loss: Callable[..., Tensor]) -> None:
    """With join, zeros are sent on behalf of a rank that has finished."""
    with model.join():
        every(model, microbatches, loss)


def last_only(model: DistributedDataParallel, microbatches: Sequence[Batch], loss: Callable[..., Tensor]) -> None:
    """One all-reduce a rank, however many microbatches it has."""
    for at, microbatch in enumerate(microbatches):
        with quiet(model, at, len(microbatches)):
            loss(model, microbatch).backward()


WAYS = {"last microbatch only": last_only, "every microbatch": every, "every microbatch, with join": joined}


def run_way(rank: int, world: int, *, way: str, batches: Sequence[Plain], total: int, seed: int) -> list[float]:
    """The gradient on this rank after all microbatches that it has."""

    def loss(model: nn.Module, microbatch: Batch) -> Tensor:
        return next_token_loss(model, *microbatch, "sum") * world / total

    model = replica(seed)
    WAYS[way](model, from_lists(batches[rank]), loss)
    return gradient_list(model)


@dataclass(frozen=True, eq=False)
class Uneven:
    """An optimizer step in which the last rank has fewer microbatches."""

    way: str = quantity("when the ranks synchronise")
    steps: tuple[int, ...] = quantity("microbatches of each rank", "microbatches")
    hangs: str = quantity("who gave no answer; empty where all did")
    relative_error: float = quantity("‖g − G‖ / ‖G‖ on the first rank; NaN where nothing came back")
    owner: Tensor = quantity("the rank that has each microbatch")
    counts: Tensor = quantity("valid tokens of each microbatch", "tokens")
    fitted: Tensor = quantity("weight × N of each microbatch in the first rank's gradient; 1 is right")
    tolerance: float = quantity("relative error that rounding alone explains")


def uneven(
    *,
    way: Annotated[str, Choice(tuple(WAYS), help="when the ranks synchronise")] = "every microbatch, with join",
    ranks: Ranks = 2,
    accumulation_steps: Annotated[
        int, Range(1, 4, unit="microbatches", help="K, microbatches of every rank but the last")
    ] = 4,
    missing: Annotated[int, Range(0, 4, unit="microbatches", help="how many fewer the last rank has")] = 1,
    seed: Seed = 0,
) -> Uneven:
    """The last rank has fewer microbatches: with join, without, and with one synchronisation a rank.

    >>> step = uneven()
    >>> step.steps, step.hangs, step.fitted.round(decimals=6).tolist()
    ((4, 3), '', [0.5, 0.5, 0.5, 1.0, 0.5, 0.5, 0.5])

    Real DistributedDataParallel, float64, the loss is correct in all three. A rank that gives no answer within a second
    hangs; all ranks are ended then, and the next run starts new ones. Raises LabError where nothing is left.
    """
    if missing > accumulation_steps or (ranks == 1 and missing == accumulation_steps):
        most = accumulation_steps - (ranks == 1)
        raise LabError(f"missing = {missing} is too much for the last rank's {accumulation_steps}: try {most}")
    microbatches = draw_batches(ranks, accumulation_steps, 4, seed)
    microbatches[-1] = microbatches[-1][: accumulation_steps - missing]
    reference = share(microbatches, seed)
    workers.run("labkit.workers:total", ranks, value=1)  # so that the patience below is not for starting the ranks
    answer, hangs = [math.nan], ""
    try:
        run = "labkit.data_parallel.uneven_ranks:run_way"
        answer, *_ = workers.run(
            run, ranks, timeout=PATIENCE, way=way, batches=reference.plain, total=reference.total, seed=seed
        )
    except LabError as error:
        hangs = str(error)
    g = torch.tensor(answer, dtype=torch.float64).expand_as(reference.right)
    counts = layout(reference.counts)
    error_ = distance(g, reference.right).relative_error
    steps = tuple(map(len, reference.counts))
    return Uneven(
        way,
        steps,
        hangs,
        error_,
        torch.tensor(counts.owner),
        counts.counts,
        reference.fitted(g),
        reference.tolerance.value,
    )
