"""What a loss may divide its sum by: every count once, with the fix, and the rule whose loop divides by it.

Exercises name a learner's loop by these counts. Their sentences are their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from labkit.nets import IGNORE, valid_tokens
from labkit.rules import COUNT_FIRST, Microbatches, rule


@dataclass(frozen=True, eq=False)
class Counts:
    """The counts of windows, [S] float64 each: once for every sequence with a valid token.

    Small letters are counts of the sequence's microbatch, but for s, its own; capitals those of its window.
    """

    s: Tensor  # valid tokens of the sequence itself
    i: Tensor  # the microbatch's place in the loop, from 0
    n: Tensor  # valid tokens
    padded: Tensor  # targets, the padding too
    size: Tensor  # entries of the label tensor
    labels: Tensor  # labels before the shift that are not ignored
    b: Tensor  # sequences
    seen: Tensor  # valid tokens of the microbatches so far
    N: Tensor
    PADDED: Tensor
    SIZE: Tensor
    LABELS: Tensor
    B: Tensor
    K: Tensor  # microbatches
    full: Tensor  # microbatches with a valid token
    first: Tensor  # valid tokens of the first microbatch
    last: Tensor  # and of the last
    one: Tensor


def counts(*windows: Microbatches) -> Counts:
    """All that a weight may depend on, windows one after the other.

    >>> labels = torch.tensor([[7, 8, 9, IGNORE], [7, 8, IGNORE, IGNORE]])
    >>> counts([(labels, labels)]).s
    tensor([2., 1.], dtype=torch.float64)
    """
    tables = [_count([labels for _, labels in window]) for window in windows]
    return Counts(**{field.name: torch.cat([table[field.name] for table in tables]) for field in fields(Counts)})


def _count(labels: Sequence[Tensor]) -> dict[str, Tensor]:
    s = torch.cat([(each[:, 1:] != IGNORE).sum(1) for each in labels])
    rows = [
        (i, valid_tokens(each), each[:, 1:].numel(), each.numel(), int((each != IGNORE).sum()), len(each))
        for i, each in enumerate(labels)
    ]
    of_each = dict(zip(("i", "n", "padded", "size", "labels", "b"), torch.tensor(rows).T.double(), strict=True))
    n = of_each["n"]
    whole = {name.upper(): values.sum() for name, values in of_each.items()}
    whole |= {"last": n[-1], "first": n[0], "full": (n > 0).sum(), "K": torch.tensor(len(n)), "one": torch.tensor(1)}
    each = of_each | {"seen": n.cumsum(0)} | {name: value.double().expand(len(n)) for name, value in whole.items()}
    spread = {name: values.repeat_interleave(of_each["b"].long()) for name, values in each.items()}
    return {name: values[s > 0] for name, values in (spread | {"s": s.double()}).items()}


@dataclass(frozen=True)
class Denominator:
    """One of them: its count for every sequence, and the rule whose fix mends it, where it is not to count first."""

    count: Callable[[Counts], Tensor]
    mended_by: str = ""

    @property
    def fix(self) -> str:
        """What to do instead."""
        return rule(self.mended_by).fix if self.mended_by else COUNT_FIRST


DENOMINATORS = {
    "N": Denominator(lambda c: c.N),
    "1": Denominator(lambda c: c.one),
    "n": Denominator(lambda c: c.n),
    "PADDED": Denominator(lambda c: c.PADDED, "padded-count"),
    "padded": Denominator(lambda c: c.padded, "padded-count"),
    "SIZE": Denominator(lambda c: c.SIZE, "padded-count"),
    "size": Denominator(lambda c: c.size, "padded-count"),
    "LABELS": Denominator(lambda c: c.LABELS, "unshifted-count"),
    "labels": Denominator(lambda c: c.labels, "unshifted-count"),
    "seen": Denominator(lambda c: c.seen),
    "last": Denominator(lambda c: c.last),
    "first": Denominator(lambda c: c.first),
    "s": Denominator(lambda c: c.s, "sequence-means"),
    "s b": Denominator(lambda c: c.s * c.b, "sequence-means"),
    "b": Denominator(lambda c: c.b),
    "B": Denominator(lambda c: c.B),
    "length": Denominator(lambda c: c.padded / c.b),
    "N n": Denominator(lambda c: c.N * c.n),
}
RULES = {  # a denominator, and how many times it is divided by K besides: the rule that does so
    ("N", 0): "token-mean",
    ("n", 1): "mean-of-means",
    ("n", 0): "sum-of-means",
    ("1", 0): "token-sum",
    ("N", 1): "double-division",
    ("PADDED", 0): "padded-count",
    ("LABELS", 0): "unshifted-count",
}
