"""Every loop that a learner may write, as three decisions; each combination predicts the weights it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from labkit.corpus import Batch
from labkit.nets import IGNORE, valid_tokens
from labkit.rules import COUNT_FIRST, rule

# A loop decides three things: which microbatches stay, what their sums are divided by, and what comes on top.
# Each table has the right decision first; f holds the counts of a window, once for each of its sequences.


@dataclass(frozen=True)
class Part:
    """One decision: its number for every sequence, the words for it, the fix, and how far it is from right."""

    value: Callable[[Any], Tensor]
    words: str = ""
    fix: str = COUNT_FIRST
    cost: int = 1


LOOK = "let the loop run over all microbatches, with no return or break in it"
ONCE = "call backward() on each loss by itself, or once on their sum"
PADDED, SHIFT, SEQUENCES = (rule(word).fix for word in ("padded-count", "unshifted-count", "sequence-means"))
WHICH = {
    "all": Part(lambda f: f.one, cost=0),
    "last": Part(lambda f: f.i == f.K - 1, "Only the last of {K} microbatches is", rule("last-microbatch-only").fix),
    "first": Part(lambda f: f.i == 0, "Only the first of {K} microbatches is", LOOK),
    "but last": Part(lambda f: f.i < f.K - 1, "All but the last of {K} microbatches are", LOOK),
    "but first": Part(lambda f: f.i > 0, "All but the first of {K} microbatches are", LOOK),
}
DIVIDED = {
    "N": Part(lambda f: f.N, "sums, each over N = {N}, were added", cost=0),
    "1": Part(lambda f: f.one, "sums were added{never}"),
    "n": Part(lambda f: f.n, "means were added{never}"),
    "PADDED": Part(lambda f: f.PADDED, "sums, each over {PADDED}, a count with the padding in it, were added", PADDED),
    "padded": Part(lambda f: f.padded, "means over targets and padding were added{never}", PADDED),
    "SIZE": Part(lambda f: f.SIZE, "sums, each over {SIZE}, the size of all label tensors, were added", PADDED),
    "size": Part(lambda f: f.size, "sums, each over the size of its label tensor, were added{never}", PADDED),
    "LABELS": Part(lambda f: f.LABELS, "sums, each over {LABELS}, the labels before the shift, were added", SHIFT),
    "labels": Part(lambda f: f.labels, "sums, each over its labels before the shift, were added{never}", SHIFT),
    "seen": Part(lambda f: f.seen, "sums, each over the tokens seen so far and not over N = {N}, were added"),
    "last": Part(lambda f: f.last, "sums, each over {last}, the tokens of the last microbatch alone, were added"),
    "first": Part(lambda f: f.first, "sums, each over {first}, the tokens of the first microbatch alone, were added"),
    "s": Part(lambda f: f.s, "microbatches gave the mean of each sequence, and these were added{never}", SEQUENCES),
    "s b": Part(lambda f: f.s * f.b, "averages of sequence means were added{never}", SEQUENCES),
    "b": Part(lambda f: f.b, "sums, each over its number of sequences, were added{never}"),
}
THEN = {
    "": Part(lambda f: f.one, cost=0),
    "K": Part(lambda f: 1 / f.K, " and divided by {k}, the number of microbatches"),
    "i": Part(lambda f: 1 / (f.i + 1), ", each divided by its place in the loop (i + 1)"),
    "N": Part(lambda f: 1 / f.N, " and divided by N = {N}"),
    "B": Part(lambda f: 1 / f.B, " and divided by {B}, the number of sequences"),
    "full": Part(lambda f: 1 / f.full, " and divided by {full}, the microbatches that have a target", cost=3),
    "total": Part(lambda f: f.K - f.i, ", the first {K} times: backward() ran on the running total", ONCE),
    "grad K": Part(lambda f: f.K ** (f.i - f.K), ", and .grad was divided by {k} after every backward()"),
    "grad N": Part(lambda f: f.N ** (f.i - f.K), ", and .grad was divided by {N} after every backward()"),
}
ALWAYS = Part(lambda f: f.one, " and {by} in every window, whatever it holds", "leave that number out")
NAMED = {
    ("all", "n", "K"): "mean-of-means",
    ("all", "n", ""): "sum-of-means",
    ("all", "1", ""): "token-sum",
    ("all", "N", "K"): "double-division",
    ("all", "PADDED", ""): "padded-count",
    ("all", "LABELS", ""): "unshifted-count",
    ("all", "s", "B"): "sequence-means",
    ("last", "N", ""): "last-microbatch-only",
    ("all", "n", "always"): "tail-divided-by-k",
}
Loop = tuple[str, str, str]


def predicted(loop: Loop, f: SimpleNamespace) -> Tensor:
    """The weight × N that a loop of the tables gives every sequence with a valid token.

    >>> labels = torch.tensor([[7, 8, 9, IGNORE], [7, 8, IGNORE, IGNORE]])
    >>> predicted(("all", "n", "K"), counts([(labels[:1], labels[:1]), (labels[1:], labels[1:])]))
    tensor([0.7500, 1.5000], dtype=torch.float64)
    """
    which, divided, then = loop
    weights: Tensor = WHICH[which].value(f) * f.N / DIVIDED[divided].value(f) * THEN[then].value(f)
    return weights


def counts(*windows: Sequence[Batch]) -> SimpleNamespace:
    """All that a weight may depend on, for every sequence with a valid token, windows one after the other.

    >>> labels = torch.tensor([[7, 8, 9, IGNORE], [7, 8, IGNORE, IGNORE]])
    >>> counts([(labels, labels)]).s
    tensor([2., 1.], dtype=torch.float64)

    Small letters are counts of the sequence's microbatch, but for s, its own; capitals those of its window.
    """
    tables = [_count([labels for _, labels in window]) for window in windows]
    return SimpleNamespace(**{name: torch.cat([table[name] for table in tables]) for name in tables[0]})


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
