"""Microbatches that tell faults apart: their counts differ, no two are alike, and the first position has a label."""

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

    source: the size of a vocabulary, or a dataset of your own. For a vocabulary, the microbatches are random tokens:
    (tokens, labels) of shapes [2, length], padded with label -100. From a dataset, one example is taken for each
    microbatch, with counts that differ as much as possible, and passed to `collate` in a list. `count` gives the valid
    tokens of an example (by default len). Raises LabError for a vocabulary or a dataset that is too small, for too many
    empty examples, and for counts that are all the same.
    """
    K = int(Range(2, 64).check("accumulation", accumulation, int))
    if isinstance(source, int):
        return _synthetic(source, K, length, seed)
    counts = [float((count or len)(example)) for example in source]
    order = sorted((at for at in range(len(counts)) if counts[at] > 0), key=counts.__getitem__)
    different = len({counts[at] for at in order}) > 1
    if len(order) < K:
        empty = f" of {len(counts)} examples with a count above 0" if len(order) < len(counts) else " examples"
        remedy = f"accumulation={len(order)}" if different else f"{K} or more of different counts above 0"
        raise LabError(f"source = {len(order)}{empty}, too few for {K} microbatches: try {remedy}")
    if not different:
        only = f"{len(order)} examples of one count only, {counts[order[0]]:g}"
        raise LabError(f"source has {only}, which tell no mean from a sum: try examples of different counts")
    chosen = [order[round(at * (len(order) - 1) / (K - 1))] for at in range(K)]
    return [collate([source[at]]) for at in chosen]


def _synthetic(vocabulary: int, K: int, length: int, seed: int) -> list[tuple[Tensor, Tensor]]:
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
