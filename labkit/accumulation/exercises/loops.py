"""Every loop that a learner may write, as three decisions; each combination predicts the weights it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from labkit.denominators import DENOMINATORS, RULES, Counts
from labkit.rules import COUNT_FIRST, rule

# A loop decides three things: which microbatches stay, what their sums are divided by, and what comes on top.
# Each table has the right decision first; f holds the counts of a window, once for each of its sequences.


@dataclass(frozen=True)
class Part:
    """One decision: its number for every sequence, the words for it, the fix, and how far it is from right."""

    value: Callable[[Counts], Tensor]
    words: str = ""
    fix: str = COUNT_FIRST
    cost: int = 1


LOOK = "let the loop run over all microbatches, with no return or break in it"
ONCE = "call backward() on each loss by itself, or once on their sum"
WHICH = {
    "all": Part(lambda f: f.one, cost=0),
    "last": Part(lambda f: f.i == f.K - 1, "Only the last of {K} microbatches is", rule("last-microbatch-only").fix),
    "first": Part(lambda f: f.i == 0, "Only the first of {K} microbatches is", LOOK),
    "but last": Part(lambda f: f.i < f.K - 1, "All but the last of {K} microbatches are", LOOK),
    "but first": Part(lambda f: f.i > 0, "All but the first of {K} microbatches are", LOOK),
}
SUMS = {
    "N": "sums, each over N = {N}, were added",
    "1": "sums were added{never}",
    "n": "means were added{never}",
    "PADDED": "sums, each over {PADDED}, a count with the padding in it, were added",
    "padded": "means over targets and padding were added{never}",
    "SIZE": "sums, each over {SIZE}, the size of all label tensors, were added",
    "size": "sums, each over the size of its label tensor, were added{never}",
    "LABELS": "sums, each over {LABELS}, the labels before the shift, were added",
    "labels": "sums, each over its labels before the shift, were added{never}",
    "seen": "sums, each over the tokens seen so far and not over N = {N}, were added",
    "last": "sums, each over {last}, the tokens of the last microbatch alone, were added",
    "first": "sums, each over {first}, the tokens of the first microbatch alone, were added",
    "s": "microbatches gave the mean of each sequence, and these were added{never}",
    "s b": "averages of sequence means were added{never}",
    "b": "sums, each over its number of sequences, were added{never}",
}
DIVIDED = {
    name: Part(DENOMINATORS[name].count, words, DENOMINATORS[name].fix, cost=int(name != "N"))
    for name, words in SUMS.items()
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
NAMED = {("all", divided, "K" * power): word for (divided, power), word in RULES.items()} | {
    ("all", "s", "B"): "sequence-means",
    ("last", "N", ""): "last-microbatch-only",
    ("all", "n", "always"): "tail-divided-by-k",
}
Loop = tuple[str, str, str]


def predict(loop: Loop, f: Counts) -> Tensor:
    """The weight × N that a loop of the tables gives every sequence with a valid token.

    >>> from labkit.corpus import made
    >>> from labkit.denominators import counts
    >>> predict(("all", "n", "K"), counts(made([[[8, 5]], [[3]]])))
    tensor([0.7500, 1.5000], dtype=torch.float64)
    """
    which, divided, then = loop
    weights: Tensor = WHICH[which].value(f) * f.N / DIVIDED[divided].value(f) * THEN[then].value(f)
    return weights
