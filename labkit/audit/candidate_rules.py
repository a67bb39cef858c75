"""From weights to words: which rule of the table gives the gradient that reached the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit import rules
from labkit.audit.references import References, tensors
from labkit.corpus import Window as Counts
from labkit.nets import IGNORE

WEIGHTS = ("token-mean", "mean-of-means", "sum-of-means", "token-sum", "double-division", "last-microbatch-only")
OBJECTIVES = ("token-mean", "sequence-mean", "mean-of-means")


@dataclass(frozen=True, eq=False)
class Prediction:
    """A word, and the gradient that it predicts from the references."""

    word: str
    gradient: Tensor
    detail: str
    rare: bool = False  # gives way to another rule that predicts the same


def objective(word: str, references: References, sequences: References | None) -> Tensor:
    """The gradient of the objective: what a correct step has."""
    n = references.counts
    if word == "token-mean":
        return references.gradients.sum(0) / n.sum()
    if word == "mean-of-means":
        return inverse(n) @ references.gradients / len(n)
    assert sequences is not None
    return inverse(sequences.counts) @ sequences.gradients / len(sequences.counts)


def predictions(
    references: References,
    sequences: References | None,
    microbatch_of_sequence: Tensor,
    microbatches: Sequence[Any],
    inputs: Sequence[tuple[int, int]] = (),
) -> Iterator[Prediction]:
    """Every rule of the table that has weights, with what it predicts here."""
    rows, n = references.gradients, references.counts
    K, N, total = len(n), float(n.sum()), rows.sum(0)
    for word in WEIGHTS:
        yield Prediction(word, rules.rule(word).weights(_counts(n)) / N @ rows, "")
    yield Prediction("token-sum", total / K, "The sums were divided by the accumulation steps.", rare=True)
    for what, weight in (("mean", 1 / n[-1]), ("mean over K", 1 / (K * n[-1])), ("sum", 1.0)):
        if n[-1] > 0:
            yield Prediction("last-microbatch-only", weight * rows[-1], f"It is the last microbatch's {what}.")
    heights = torch.bincount(microbatch_of_sequence, minlength=K).double()
    if sequences is not None and bool((sequences.counts != 1).any()):  # else a sequence is a token
        share, single = inverse(sequences.counts), len(microbatch_of_sequence) == K
        yield Prediction("sequence-means", share @ sequences.gradients / len(share), "", rare=single)
        within = (share / heights[microbatch_of_sequence]) @ sequences.gradients / K
        yield Prediction("sequence-means", within, "Averaged in each microbatch first.", rare=True)
    if len(heights) == K and heights.all():
        weighted = (heights / heights.sum() * inverse(n)) @ rows
        yield Prediction("mean-of-means", weighted, "Every mean was weighted by its number of rows.", rare=True)
    for word, sizes, entries in denominators(microbatches, n):
        yield Prediction(word, total / sizes.sum(), f"Every sum was divided by {int(sizes.sum())}, {entries}.")
        yield Prediction(word, (1 / sizes) @ rows / K, f"Every mean was taken over {entries}.")
    for drop in (1, 0) if len(inputs) == K else ():  # the only trace of a microbatch that the step made by itself
        places = sum(height * (columns - drop) for height, columns in inputs)
        if places not in (0, N):
            divisor = f"Every sum was divided by {places}, padding and all."
            yield Prediction("padded-count", total / places, divisor, rare=True)


def denominators(microbatches: Sequence[Any], n: Tensor) -> Iterator[tuple[str, Tensor, str]]:
    """Counts of each microbatch that people mistake for its valid tokens: word, [K], and what is counted."""
    known: list[list[float]] = [n.tolist()]
    for word, sizes, entries in _sizes(microbatches, len(n)):
        if sizes not in known and all(size > 0 for size in sizes):
            known.append(sizes)
            yield word, torch.tensor(sizes, dtype=torch.float64), entries


def _sizes(microbatches: Sequence[Any], K: int) -> Iterator[tuple[str, list[float], str]]:
    """Every such count, tensors first, then texts."""
    columns = list(zip(*(tensors(each) for each in microbatches), strict=False)) if microbatches else []
    padded = any(bool((each == IGNORE).any()) for column in columns for each in column)
    for labels in columns:
        if len(labels) < K or not all(each.dim() and not each.is_complex() for each in labels):
            continue
        ignored = any(bool((each == IGNORE).any()) for each in labels)
        full = [float(each.numel()) for each in labels]
        unmasked = [float((each != IGNORE).sum()) if ignored else _not_padding(each) for each in labels]
        if all(each.dim() > 1 for each in labels):
            yield "padded-count", [float(each[:, 1:].numel()) for each in labels], "padding and all"
        if padded or unmasked != full:
            yield "padded-count", full, "padding and all"
        yield "unshifted-count", unmasked, "the labels before the shift"
        yield "unshifted-count", full, "the labels before the shift"
    texts = [[text for text in _texts(each)] for each in microbatches]
    if texts and all(texts):
        longest = [max(map(len, each)) for each in texts]
        for drop in (1, 0):
            yield (
                "padded-count",
                [float(len(t) * (most - drop)) for t, most in zip(texts, longest, strict=True)],
                "padding and all",
            )
        yield "unshifted-count", [float(sum(map(len, each))) for each in texts], "all letters, the first too"


def _not_padding(tokens: Tensor) -> float:
    """Entries of rows that end in zeros, up to those zeros; all entries, where zeros occur elsewhere."""
    nonzero = (tokens != 0).long()
    return float(nonzero.sum()) if bool((nonzero.diff(dim=-1) <= 0).all()) else float(tokens.numel())


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [text for each in inside for text in _texts(each)]


def _counts(counts: Tensor) -> Counts:
    valid: Any = tuple((n,) for n in counts.tolist())
    return Counts(valid, positions=1, labelled=1, steps=len(valid))


def inverse(n: Tensor) -> Tensor:
    """1/n, and 0 where n is 0.

    >>> inverse(torch.tensor([2.0, 0.0]))
    tensor([0.5000, 0.0000])
    """
    return torch.where(n > 0, 1 / n, 0.0)


def whole_number(value: float, tolerance: float) -> int | None:
    """The whole number above 1 that a value equals, or None.

    >>> whole_number(3.0000001, 1e-6), whole_number(2.5, 1e-6)
    (3, None)
    """
    near = round(value) if math.isfinite(value) else 0
    return near if near > 1 and abs(value / near - 1) <= tolerance else None
