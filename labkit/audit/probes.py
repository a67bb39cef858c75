"""Microbatches that tell faults apart: unequal counts, no two alike, a label in the first place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.declare import Range
from labkit.errors import LabError
from labkit.nets import IGNORE


def probe(
    source: int | Sequence[Any],
    *,
    accumulation: int = 4,
    length: int = 24,
    count: Callable[[Any], float] | None = None,
    collate: Callable[[list[Any]], Any] = lambda examples: examples[0],
    seed: int = 0,
) -> list[Any]:
    """K microbatches on which the faults that an audit knows do not look alike.

    >>> [int((labels != IGNORE).sum()) for _, labels in probe(100)]
    [6, 13, 19, 26]
    >>> probe(["a", "bcd", "ef", "ghij", "k"], accumulation=3, count=len)
    ['a', 'ef', 'ghij']

    source: the size of a vocabulary (then made tokens come back, (tokens, labels) of shapes [2, length], padded with
    label -100), or a dataset of your own. Of a dataset, examples of counts as different as it has are taken, by `count`
    (valid tokens of an example; by default len), one a microbatch, each given to `collate` as a list.
    Raises LabError for a vocabulary or a dataset that is too small, and for counts that are all the same.
    """
    K = int(Range(2, 64).check("accumulation", accumulation, int))
    if isinstance(source, int):
        return _made(source, K, length, seed)
    counts = [float((count or len)(example)) for example in source]
    if len(counts) < K:
        raise LabError(
            f"source = {len(counts)} examples are too few for {K} microbatches: try accumulation={len(counts)}"
        )
    order = sorted((at for at in range(len(counts)) if counts[at] > 0), key=counts.__getitem__)
    chosen = [order[round(at * (len(order) - 1) / (K - 1))] for at in range(K)] if len(order) >= K else []
    if len({counts[at] for at in chosen}) < 2:
        raise LabError("source has examples of one count only, which tell no mean from a sum: try examples of several")
    return [collate([source[at]]) for at in chosen]


def _made(vocabulary: int, K: int, length: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    if vocabulary < 4:
        raise LabError(f"source = {vocabulary} tokens are too few to tell sequences apart: try 4 or more")
    generator = torch.Generator().manual_seed(seed)
    microbatches = []
    for at in range(K):
        tokens = torch.randint(vocabulary, (2, length), generator=generator)
        labels = tokens.clone()
        long = max(3, (at + 1) * length // (K + 1))
        labels[0, long:], labels[1, max(2, long // 3 + 1) :] = IGNORE, IGNORE
        microbatches.append((tokens, labels))
    return microbatches
