"""The gradient of one optimizer step over ranks, beside the whole batch in one pass of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from labkit import workers
from labkit.corpus import Batch, Seed, Shortest, batch, split
from labkit.data_parallel.rank_losses import RECIPES, Plain, layout, to_lists, weights
from labkit.declare import Choice, Range, quantity
from labkit.fit import Distance, distance, fit, gradient_of
from labkit.gradients import Gradients, composed
from labkit.nets import Transformer, microbatch_gradients, next_token_loss, valid_tokens
from labkit.tolerance import Compared, Tolerance, depth, tolerance

Ranks = Annotated[int, Range(1, 4, unit="ranks", help="W, processes with a replica of the model each")]
Steps = Annotated[int, Range(1, 4, unit="microbatches", help="K, microbatches of each rank in one optimizer step")]


@dataclass(frozen=True, eq=False)
class Share:
    """The text of one optimizer step, cut over ranks and microbatches, and its correct gradient."""

    model: Transformer
    microbatches: list[list[Batch]]
    rows: Tensor  # the summed-loss gradient of every microbatch, rank by rank
    right: Tensor

    @property
    def counts(self) -> list[list[int]]:
        """Valid tokens by rank and microbatch."""
        return [[valid_tokens(labels) for _, labels in each] for each in self.microbatches]

    @property
    def total(self) -> int:
        """N, the valid tokens on all ranks."""
        return sum(map(sum, self.counts))

    @property
    def plain(self) -> list[Plain]:
        """The microbatches in the form in which they are sent to the ranks."""
        return [to_lists(each) for each in self.microbatches]

    @property
    def tolerance(self) -> Tolerance:
        """The relative error that rounding alone explains."""
        length = float(self.right.norm()) * self.total
        return tolerance(self.rows, count=self.total, depth=depth(self.model), dtype=torch.float64, result=length)

    def gradients(self, g: Tensor, weights: Tensor) -> Gradients:
        """A gradient with these weights × N of its microbatches beside the right one, put together rank by rank."""
        owner = torch.repeat_interleave(torch.tensor([len(each) for each in self.microbatches]))
        parts = torch.stack([weights.nan_to_num()[:, None] * self.rows, self.rows]) / self.total
        mine, right = torch.zeros(2, len(self.microbatches), len(g)).double().index_add(1, owner, parts.double())
        labels = [f"rank {rank}: {sum(each)}" for rank, each in enumerate(self.counts)]
        return composed(g, mine, right, labels, self.tolerance.value, model=self.model, names=("full batch", "rank 0"))

    def fitted(self, g: Tensor) -> Tensor:
        """The weight × N of every microbatch in a gradient; 0 without a valid token, NaN where it is not finite."""
        there = self.rows.any(1)
        values = torch.where(there, torch.nan, 0.0).double()
        if bool(g.isfinite().all()):
            values[there] = fit(g, self.rows[there]).values * self.total
        return values


def share(microbatches: list[list[Batch]], seed: int) -> Share:
    """The correct gradient: the whole batch in one forward and one backward, float64, in this process."""
    model = Transformer(seed=seed, dtype=torch.float64)
    every = [each for rank in microbatches for each in rank]
    tokens, labels = (torch.cat(parts) for parts in zip(*every, strict=True))
    right = gradient_of(model, next_token_loss(model, tokens, labels)) / valid_tokens(labels)
    return Share(model, microbatches, microbatch_gradients(model, every), right)


def draw_batches(ranks: int, K: int, shortest: int, seed: int) -> list[list[Batch]]:
    """Real text for every rank: K microbatches of two documents each.

    >>> [len(rank) for rank in draw_batches(2, 3, 4, 0)]
    [3, 3]
    """
    microbatches = split(*batch(seed, 2 * ranks * K, shortest=shortest), ranks * K)
    return [microbatches[rank * K : (rank + 1) * K] for rank in range(ranks)]


def apart(gradients: Sequence[Tensor], right: Tensor) -> float:
    """The largest distance of a rank's gradient from the first rank's, ‖g_r − g_0‖ / ‖G‖."""
    return max(float((each - gradients[0]).norm()) for each in gradients) / float(right.norm())


@dataclass(frozen=True, eq=False)
class Recipe(Distance, Compared):
    """The first rank's gradient beside the correct one, and the weights that every rank's gradient is made of."""

    recipe: str = quantity("the recipe's word")
    ranks: int = quantity("W", "ranks")
    counts: Tensor = quantity("valid tokens of each microbatch, rank by rank", "tokens")
    owner: Tensor = quantity("the rank that has each microbatch")
    fitted: Tensor = quantity("weight × N of each microbatch, fitted, in the gradient of each rank")
    predicted: Tensor = quantity("the same by algebra")
    residual: float = quantity("share of the first rank's gradient that no weights explain")
    apart: float = quantity("how far another rank's gradient is from the first one's, ‖g_r − g_0‖ / ‖G‖")
    tolerance: Tolerance = quantity("relative error that rounding alone explains")
    gradients: Gradients = quantity("both gradients, and what each part contributes to them")


def recipes(
    *,
    recipe: Annotated[str, Choice(tuple(RECIPES), help="what a rank does to its loss")] = "rank-means",
    ranks: Ranks = 2,
    accumulation_steps: Steps = 2,
    shortest: Shortest = 4,
    seed: Seed = 294,
) -> Recipe:
    """One optimizer step in real DistributedDataParallel, against the whole batch in one pass of one process.

    >>> recipes(recipe="token-mean").equal, round(recipes(recipe="missing-world-factor").relative_error, 9)
    (True, 0.5)

    Every rank has K microbatches of two documents; no_sync for all but the last. float64. The weights are fitted to
    the gradient that each rank really has after its last backward.
    """
    reference = share(draw_batches(ranks, accumulation_steps, shortest, seed), seed)
    run = "labkit.data_parallel.rank_losses:run_recipe"
    gradients = torch.tensor(
        workers.run(run, ranks, recipe=recipe, batches=reference.plain, seed=seed), dtype=torch.float64
    )
    fitted = torch.stack([reference.fitted(each) for each in gradients])
    counts = [layout(reference.counts, seen_from) for seen_from in range(ranks)]
    return Recipe(
        **vars(distance(gradients[0], reference.right)),
        recipe=recipe,
        ranks=ranks,
        counts=counts[0].counts,
        owner=torch.tensor(counts[0].owner),
        fitted=fitted,
        predicted=torch.stack([weights(recipe, each) for each in counts]),
        residual=fit(gradients[0], reference.rows).residual,
        apart=apart(list(gradients), reference.right),
        tolerance=reference.tolerance,
        gradients=reference.gradients(gradients[0], fitted[0]),
    )
