"""The rules of ranks: what a rank's loss is divided by before DDP averages the gradients."""

from __future__ import annotations

from labkit.data_parallel.rank_losses import (
    PREDICTED,
    WORLD,
    extra_world_factor,
    missing_world_factor,
    rank_means,
    reduction_bypassed,
)
from labkit.rules import Rule, add

add(
    Rule(
        "rank-means",
        rank_means,
        PREDICTED["rank-means"],
        "a token of a rank with few valid tokens weighs more; norm and projection stay near 1, equal counts hide it",
        WORLD,
        needs="ranks",
        topic="data_parallel",
    ),
    Rule(
        "missing-world-factor",
        missing_world_factor,
        PREDICTED["missing-world-factor"],
        "the right direction, 1/W of the length: twice as many ranks, half the step; Adam hides it, clipping does not",
        "multiply the summed loss by W / N: DDP divides by W",
        needs="ranks",
        topic="data_parallel",
    ),
    Rule(
        "extra-world-factor",
        extra_world_factor,
        PREDICTED["extra-world-factor"],
        "about W times too long: twice as many ranks, twice the step; Adam hides it, clipping does not",
        "the factor W belongs to a loss divided by N over all ranks: " + WORLD,
        needs="ranks",
        topic="data_parallel",
    ),
    Rule(
        "reduction-bypassed",
        reduction_bypassed,
        PREDICTED["reduction-bypassed"],
        "every rank has a gradient of its own and no all-reduce runs: the replicas drift apart from the first step on",
        "call the DDP model itself and never model.module in training",
        needs="ranks",
        topic="data_parallel",
    ),
)
