"""The rule table: every way to accumulate a gradient, right or wrong, once.

A rule has its word, the loop as one would write it, the weight that algebra predicts for it, what it looks
like, and the fix. A loop takes the model and the microbatches, (tokens, labels) each, finds the gradients
clear, and leaves its own in .grad. Rules of other topics join the table by `add`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.corpus import Batch, Window, window
from labkit.errors import LabError
from labkit.folders import topics
from labkit.nets import IGNORE, next_token_loss, valid_tokens

Microbatches = Sequence[Batch]


# The loops. N: valid tokens of the window; K: accumulation steps.


def token_mean(model: nn.Module, microbatches: Microbatches) -> None:
    """Every contribution is divided by the N of the whole window, counted before the first backward."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        loss.backward()


def token_mean_once(model: nn.Module, microbatches: Microbatches) -> None:
    """Sums are added, and the gradient is divided once at the end."""
    N = 0
    for tokens, labels in microbatches:
        next_token_loss(model, tokens, labels, "sum").backward()
        N += valid_tokens(labels)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= N


def mean_of_means(model: nn.Module, microbatches: Microbatches) -> None:
    """Every microbatch's own mean, divided by the number of microbatches."""
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "mean")
        (loss / len(microbatches)).backward()


def sum_of_means(model: nn.Module, microbatches: Microbatches) -> None:
    """Every microbatch's own mean, and no division."""
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "mean")
        loss.backward()


def token_sum(model: nn.Module, microbatches: Microbatches) -> None:
    """The sum over tokens, never divided."""
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum")
        loss.backward()


def double_division(model: nn.Module, microbatches: Microbatches) -> None:
    """Divided by the window's N, and then by the accumulation steps too."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        (loss / len(microbatches)).backward()


def padded_count(model: nn.Module, microbatches: Microbatches) -> None:
    """The denominator counts the padding."""
    N = sum(labels[:, 1:].numel() for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        loss.backward()


def unshifted_count(model: nn.Module, microbatches: Microbatches) -> None:
    """The denominator counts the labels before the shift: one too many for every sequence."""
    N = sum(int((labels != IGNORE).sum()) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        loss.backward()


def sequence_means(model: nn.Module, microbatches: Microbatches) -> None:
    """Every sequence's own mean, averaged over the B sequences of the window."""
    B = sum(len(tokens) for tokens, _ in microbatches)
    for tokens, labels in microbatches:
        losses = next_token_loss(model, tokens, labels, "none").sum(1)
        means = losses / (labels[:, 1:] != IGNORE).sum(1).clamp(min=1)
        (means.sum() / B).backward()


def last_microbatch_only(model: nn.Module, microbatches: Microbatches) -> None:
    """zero_grad stands inside the loop."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        model.zero_grad()
        loss = next_token_loss(model, tokens, labels, "sum") / N
        loss.backward()


def tail_divided_by_k(model: nn.Module, microbatches: Microbatches, K: int) -> None:
    """The last window of an epoch holds fewer than K microbatches, and each mean is still divided by K."""
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "mean")
        (loss / K).backward()


def carried_over(model: nn.Module, microbatches: Microbatches, K: int) -> None:
    """All but the last K are left over from the epoch before: the count starts anew, the gradient does not."""
    N = 0
    for i, (tokens, labels) in enumerate(microbatches):
        if i == len(microbatches) - K:
            N = 0
        next_token_loss(model, tokens, labels, "sum").backward()
        N += valid_tokens(labels)
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= N


# The table.


@dataclass(frozen=True)
class Rule:
    """One method. `predicted` gives weight × N for the token-sum gradient of every microbatch, 1 is right.

    needs: what the prediction follows from: "counts" n_m alone, the "padding", the labels before the "shift", the
    counts of single "sequences" (then there is a weight for each of those), or the declared "steps" K, which the
    loop takes then too. changes: what is wrong, where it is not the weights.
    """

    word: str
    loop: Callable[..., None]
    predicted: Callable[[Window], Tensor]
    looks_like: str
    fix: str
    right: bool = False
    needs: str = "counts"
    topic: str = "accumulation"
    changes: str = ""

    def run(self, model: nn.Module, microbatches: Microbatches, steps: int | None = None) -> None:
        """Clear the gradients and run the loop; LabError for a rule of cadence, whose loop is a whole update."""
        if self.topic == "cadence":
            raise LabError(f"rule = {self.word!r} says when things advance, not what a token weighs: try 'token-mean'")
        model.zero_grad()
        if self.needs == "steps":
            self.loop(model, microbatches, window(microbatches, steps).steps)
        else:
            self.loop(model, microbatches)

    def weights(self, w: Window) -> Tensor:
        """The prediction, 0 where there is no valid token: a weight for every sequence, [B], or microbatch, [K]."""
        counts = w.sequences if self.needs == "sequences" else w.counts
        return torch.where(counts > 0, self.predicted(w), 0.0)

    def sequence_weights(self, w: Window) -> Tensor:
        """The same for every sequence, [B]."""
        weights = self.weights(w)
        if self.needs != "sequences":
            weights = weights.repeat_interleave(torch.tensor([len(sequences) for sequences in w.valid]))
        return torch.where(w.sequences > 0, weights, 0.0)


def ones(w: Window) -> Tensor:
    """The right weight for every microbatch."""
    return torch.ones(len(w.valid), dtype=torch.float64)


def none(w: Window) -> Tensor:
    """NaN for every microbatch: no weights explain the gradient."""
    return torch.full((len(w.valid),), torch.nan, dtype=torch.float64)


TABLE: dict[str, Rule] = {}


def add(*rules: Rule) -> None:
    """Put rules into the table; LabError for a word that is taken.

    >>> add(TABLE["token-mean"])
    Traceback (most recent call last):
    labkit.errors.LabError: the word 'token-mean' is taken by a rule of accumulation: try another word
    """
    for each in rules:
        if each.word in TABLE:
            raise LabError(f"the word {each.word!r} is taken by a rule of {TABLE[each.word].topic}: try another word")
        TABLE[each.word] = each


def rule(word: str) -> Rule:
    """The rule of that word.

    >>> rule("mean-of-mean")
    Traceback (most recent call last):
    labkit.errors.LabError: there is no rule 'mean-of-mean': try 'mean-of-means'
    """
    if word not in TABLE and word not in every():
        near = difflib.get_close_matches(str(word), TABLE, 1, 0.0)[0]
        raise LabError(f"there is no rule {word!r}: try {near!r}")
    return TABLE[word]


def every() -> dict[str, Rule]:
    """The whole table, with the rules of every topic that has a module `rules`.

    >>> every()["schedule-per-microbatch"].topic
    'cadence'
    """
    for topic in topics("rules"):
        importlib.import_module(f"labkit.{topic}.rules")
    return TABLE


COUNT_FIRST = "count the valid tokens N of the whole window first, and divide every summed loss by that N"

add(
    Rule(
        "token-mean",
        token_mean,
        ones,
        "every valid token weighs 1/N, however the window is cut",
        "nothing to fix",
        right=True,
    ),
    Rule(
        "token-mean-once",
        token_mean_once,
        ones,
        "every valid token weighs 1/N; .grad is N times too large until the division at the end",
        "nothing to fix; divide before clipping, logging and the optimizer step",
        right=True,
    ),
    Rule(
        "mean-of-means",
        mean_of_means,
        lambda w: w.total / (len(w.valid) * w.counts),
        "a token of a short microbatch weighs more; norm and projection stay near 1, and equal counts hide it",
        COUNT_FIRST,
    ),
    Rule(
        "sum-of-means",
        sum_of_means,
        lambda w: w.total / w.counts,
        "the gradient is about K times too large; Adam hides it, clipping, weight decay and logged norms do not",
        COUNT_FIRST,
    ),
    Rule(
        "token-sum",
        token_sum,
        lambda w: w.total * ones(w),
        "the gradient is N times too large and its norm follows the number of tokens",
        COUNT_FIRST,
    ),
    Rule(
        "double-division",
        double_division,
        lambda w: ones(w) / len(w.valid),
        "the right direction, 1/K of the length: the norm shrinks as K grows",
        "divide by N alone; switch off the framework's own division by the accumulation steps",
    ),
    Rule(
        "padded-count",
        padded_count,
        lambda w: w.total / w.positions * ones(w),
        "the right direction, too short by the share of padding: longer padding, smaller steps",
        "count (labels[:, 1:] != -100).sum(), not the size of the tensor",
        needs="padding",
    ),
    Rule(
        "unshifted-count",
        unshifted_count,
        lambda w: w.total / w.labelled * ones(w),
        "a few per cent too short: by one token for every sequence whose first label is not ignored",
        "count the labels that the loss sees, labels[:, 1:]",
        needs="shift",
    ),
    Rule(
        "sequence-means",
        sequence_means,
        lambda w: w.total / (len(w.sequences) * w.sequences),
        "a token of a short sequence weighs more, the same for any K: another objective, stable under regrouping",
        "sum over tokens and divide by N, unless every sequence shall count alike: then say so",
        needs="sequences",
    ),
    Rule(
        "last-microbatch-only",
        last_microbatch_only,
        lambda w: torch.eye(len(w.valid), dtype=torch.float64)[-1],
        "accumulation changes nothing: all weights are 0 but the last",
        "zero_grad once for a window, before its first backward or after its optimizer step",
    ),
    Rule(
        "tail-divided-by-k",
        tail_divided_by_k,
        lambda w: w.total / (w.steps * w.counts),
        "the last step of an epoch is r/K of its length",
        COUNT_FIRST + "; never by a K that the window does not have",
        needs="steps",
    ),
    Rule(
        "carried-over",
        carried_over,
        ones,
        "the first step of every epoch but the first is too large, and takes part in what the last epoch left",
        "step on the tail window, or clear its gradient, before the next epoch begins",
        needs="steps",
    ),
)
