"""Recipes: how each rank scales its loss before DistributedDataParallel averages the gradients over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.corpus import Batch, Window
from labkit.errors import LabError
from labkit.fit import flat, gradient
from labkit.nets import Transformer, next_token_loss, valid_tokens
from labkit.rules import Microbatches

Plain = Sequence[tuple[list[list[int]], list[list[int]]]]  # microbatches as they are sent to a rank


# What a rank runs. W: ranks; N: valid tokens of the optimizer step on all ranks; K: microbatches of this rank.


def world() -> int:
    """W, the ranks of the process group; LabError where there is none."""
    if not dist.is_initialized():
        raise LabError("a recipe of ranks needs ranks: try labkit.data_parallel.recipes()")
    return dist.get_world_size()


def on_all_ranks(count: float) -> float:
    """The sum of a count over the ranks: one tiny all-reduce."""
    world()
    total = torch.tensor(float(count), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def quiet(model: DistributedDataParallel, at: int, K: int) -> contextlib.AbstractContextManager[object]:
    """No synchronisation except for the last of K microbatches: forward and backward are both inside."""
    return model.no_sync() if at < K - 1 else contextlib.nullcontext()


def token_mean(model: DistributedDataParallel, microbatches: Microbatches) -> None:
    """Right: summed losses × W / N. DDP divides by W, and the W takes that back."""
    W, N = world(), on_all_ranks(sum(valid_tokens(labels) for _, labels in microbatches))
    for at, (tokens, labels) in enumerate(microbatches):
        with quiet(model, at, len(microbatches)):
            loss = next_token_loss(model, tokens, labels, "sum") * W / N
            loss.backward()


def rank_means(model: DistributedDataParallel, microbatches: Microbatches) -> None:
    """Every rank's own token mean."""
    n = sum(valid_tokens(labels) for _, labels in microbatches)
    for at, (tokens, labels) in enumerate(microbatches):
        with quiet(model, at, len(microbatches)):
            loss = next_token_loss(model, tokens, labels, "sum") / n
            loss.backward()


def missing_world_factor(model: DistributedDataParallel, microbatches: Microbatches) -> None:
    """Summed losses / N, and DDP divides by W once more."""
    N = on_all_ranks(sum(valid_tokens(labels) for _, labels in microbatches))
    for at, (tokens, labels) in enumerate(microbatches):
        with quiet(model, at, len(microbatches)):
            loss = next_token_loss(model, tokens, labels, "sum") / N
            loss.backward()


def extra_world_factor(model: DistributedDataParallel, microbatches: Microbatches) -> None:
    """Every rank's own token mean × W: the W that belongs to S / N, put before a mean."""
    W, n = world(), sum(valid_tokens(labels) for _, labels in microbatches)
    for at, (tokens, labels) in enumerate(microbatches):
        with quiet(model, at, len(microbatches)):
            loss = next_token_loss(model, tokens, labels, "sum") / n * W
            loss.backward()


def reduction_bypassed(model: DistributedDataParallel, microbatches: Microbatches) -> None:
    """The correct loss, but of model.module: DDP never sees it."""
    W, N = world(), on_all_ranks(sum(valid_tokens(labels) for _, labels in microbatches))
    for tokens, labels in microbatches:
        loss = next_token_loss(model.module, tokens, labels, "sum") * W / N
        loss.backward()


def mean_of_means(model: DistributedDataParallel, microbatches: Microbatches) -> None:
    """The mean of every microbatch, averaged over microbatches and ranks."""
    K = len(microbatches)
    for at, (tokens, labels) in enumerate(microbatches):
        with quiet(model, at, K):
            loss = next_token_loss(model, tokens, labels, "mean") / K
            loss.backward()


RECIPES = {
    "token-mean": token_mean,
    "rank-means": rank_means,
    "missing-world-factor": missing_world_factor,
    "extra-world-factor": extra_world_factor,
    "mean-of-means": mean_of_means,
    "reduction-bypassed": reduction_bypassed,
}


def replica(seed: int) -> DistributedDataParallel:
    """The small language model, replicated on every rank, float64."""
    return DistributedDataParallel(Transformer(seed=seed, dtype=torch.float64))


def run_recipe(rank: int, world: int, *, recipe: str, batches: Sequence[Plain], seed: int) -> list[float]:
    """The gradient that a recipe leaves on this rank."""
    model = replica(seed)
    RECIPES[recipe](model, from_lists(batches[rank]))
    return gradient_list(model)


def gradient_list(model: nn.Module) -> list[float]:
    """The gradient in .grad, as plain numbers."""
    values: list[float] = flat(gradient(model)).tolist()
    return values


def to_lists(microbatches: Sequence[Batch]) -> Plain:
    """Microbatches as plain lists, to be sent to a rank.

    >>> tokens = torch.tensor([[7, 8]])
    >>> to_lists([(tokens, tokens)])
    [([[7, 8]], [[7, 8]])]
    """
    return [(tokens.tolist(), labels.tolist()) for tokens, labels in microbatches]


def from_lists(microbatches: Plain) -> list[Batch]:
    """Plain lists as microbatches.

    >>> from_lists([([[7, 8]], [[7, 8]])])
    [(tensor([[7, 8]]), tensor([[7, 8]]))]
    """
    return [(torch.tensor(tokens), torch.tensor(labels)) for tokens, labels in microbatches]


# The rules, and their weights by algebra.


@dataclass(frozen=True)
class Layout(Window):
    """The counts of one optimizer step on all ranks, rank by rank.

    owner: the rank of each microbatch. seen_from: the rank whose gradient is measured; all are alike unless the
    reduction is bypassed.
    """

    owner: tuple[int, ...] = ()
    ranks: int = 1
    seen_from: int = 0

    @property
    def local(self) -> Tensor:
        """For every microbatch: the valid tokens of its whole rank."""
        owner = torch.tensor(self.owner)
        return torch.zeros(self.ranks, dtype=torch.float64).index_add(0, owner, self.counts)[owner]

    @property
    def own_steps(self) -> Tensor:
        """For every microbatch: how many its rank has."""
        owner = torch.tensor(self.owner)
        return torch.bincount(owner, minlength=self.ranks).double()[owner]


def layout(counts: Sequence[Sequence[int]], seen_from: int = 0) -> Layout:
    """Valid tokens by rank and microbatch, in the form that predictions are computed from.

    >>> layout([[1, 3], [4, 4]]).local
    tensor([4., 4., 8., 8.], dtype=torch.float64)
    """
    valid = tuple((n,) for rank in counts for n in rank)
    owner = tuple(rank for rank, each in enumerate(counts) for _ in each)
    return Layout(valid, 0, 0, len(valid), owner, len(counts), seen_from)


def weights(word: str, w: Layout) -> Tensor:
    """The weight × N that a recipe gives every microbatch, rank by rank; 1 is right, 0 where nothing is valid.

    >>> weights("rank-means", layout([[1], [3]]))
    tensor([2.0000, 0.6667], dtype=torch.float64)

    Source: DDP's average, 1/W of the sum over ranks, of the local losses.
    """
    predicted = PREDICTED[word](w)
    return torch.where(w.counts > 0, predicted, 0.0)


def _bypassed(w: Layout) -> Tensor:
    return w.ranks * (torch.tensor(w.owner) == w.seen_from).double()


PREDICTED = {
    "token-mean": lambda w: torch.ones_like(w.counts),
    "rank-means": lambda w: w.total / (w.ranks * w.local),
    "missing-world-factor": lambda w: torch.ones_like(w.counts) / w.ranks,
    "extra-world-factor": lambda w: w.total / w.local,
    "mean-of-means": lambda w: w.total / (w.ranks * w.own_steps * w.counts),
    "reduction-bypassed": _bypassed,
}

WORLD = "on every rank: summed loss × W / N, with N counted over all ranks by an all-reduce before the first backward"
