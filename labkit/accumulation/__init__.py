"""Mean or token sum: what each way to accumulate does to the gradient, measured on the gradient itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit import rules
from labkit.accumulation.equivalence import by_hand as by_hand
from labkit.accumulation.equivalence import conditions as conditions
from labkit.accumulation.equivalence import empty as empty
from labkit.accumulation.training import trainings as trainings
from labkit.corpus import Batch, Seed, Sequences, Shortest, Steps, Text, Window, batch, split, window
from labkit.declare import Choice, Range, quantity
from labkit.errors import LabError
from labkit.fit import Distance, Weights, distance, fit, flat, gradient, per_layer
from labkit.gradients import Gradients, composed
from labkit.nets import IGNORE, Transformer, sequence_gradients
from labkit.rules import Rule
from labkit.tolerance import Compared, Tolerance, depth, tolerance

ALL = tuple(each.word for each in rules.TABLE.values() if each.topic == "accumulation")
WINDOW = tuple(word for word in ALL if rules.TABLE[word].needs != "steps")
COUNTS = tuple(word for word in ALL if rules.TABLE[word].needs == "counts")
EPOCH = ("token-mean", "tail-divided-by-k", "carried-over")

Method = Annotated[str, Choice(WINDOW, help="how the microbatches' gradients are put together")]


def token_weights(counts: Sequence[int] | Tensor, rule: str) -> Tensor:
    """The weight that a rule gives each microbatch's token-sum gradient, × N, from the counts of valid tokens alone.

    >>> token_weights([1, 3], "mean-of-means")
    tensor([2.0000, 0.6667], dtype=torch.float64)

    Shapes: [K] in and out; 1 is right; 0 where a microbatch has no valid token. Raises LabError for a rule that
    follows from more than counts, and for counts that are negative, not whole, or all zero.
    Source: the algebra of `rules`, S_m weighted 1/(K n_m) against 1/N for the mean of means.
    """
    word = Choice(COUNTS).check("rule", rule, str)
    n = torch.as_tensor(counts, dtype=torch.float64).flatten()
    if not (n.numel() and bool(((n >= 0) & (n == n.floor()) & n.isfinite()).all()) and n.any()):
        raise LabError(f"counts = {n.tolist()} are no counts of valid tokens (whole, ≥ 0, not all 0): try [1, 3]")
    counted = Window(tuple((int(each),) for each in n), positions=0, labelled=0, steps=len(n))
    return rules.rule(word).weights(counted)


@dataclass(frozen=True, eq=False)
class Comparison(Distance, Compared):
    """The gradient that a rule leaves, beside the correct one, and the weights it is made of."""

    rule: str = quantity("the method's word")
    per_layer: Mapping[str, Distance] = quantity("the same distance for every parameter tensor")
    counts: Tensor = quantity("valid tokens of each sequence", "tokens")
    microbatch: Tensor = quantity("which microbatch each sequence stands in")
    token_weights: Tensor = quantity("fitted weight × N of each microbatch; 1 is right")
    sequence_weights: Tensor = quantity("fitted weight × N of each sequence; NaN where it cannot be told")
    predicted: Tensor = quantity("weight × N of each sequence by the rule's algebra")
    map: Tensor = quantity("weight × N of each target, sequences × positions; NaN where there is none")
    residual: float = quantity("share of the gradient that no weights explain")
    condition: float = quantity("how much the fit may enlarge an error")
    indistinguishable: tuple[tuple[int, ...], ...] = quantity("sequences whose gradients cannot be told apart")
    tolerance: Tolerance = quantity("relative error that rounding alone explains")
    gradients: Gradients = quantity("both gradients, and what each microbatch contributes to them")


def compare(
    model: nn.Module, microbatches: Sequence[Batch], rule: str | Rule | Callable[..., None], *, steps: int | None = None
) -> Comparison:
    """Run a rule's loop, and fit the weight that every microbatch and sequence received in the gradient it left.

    >>> from labkit.corpus import made
    >>> from labkit.nets import Scalar
    >>> comparison = compare(Scalar(), made([[[8]], [[3, 2, 1]]]), "mean-of-means")  # (8/1 + 6/3) / 2 against 14/4
    >>> comparison.norm, comparison.right_norm
    (5.0, 3.5)

    `rule`: a word, a Rule, or a loop of your own, `loop(model, microbatches)`. `steps`: the K declared, for the
    rules that need it, where the window holds fewer microbatches or leftovers beside them. The right gradient is
    Σ S_s / N over the sequences of the window, each S_s from a forward of its own. The model's .grad is cleared.
    Raises LabError for an unknown word, no microbatches, no valid token, and a right gradient of zero.
    """
    method = rule if isinstance(rule, Rule) else rules.rule(rule) if isinstance(rule, str) else _yours(rule)
    w = window(microbatches, steps if method.needs == "steps" else None)
    rows = sequence_gradients(model, microbatches)
    method.run(model, microbatches, steps)
    g = flat(gradient(model))
    model.zero_grad()
    return _measured(method, w, model, microbatches, rows, g)


def _measured(
    method: Rule, w: Window, model: nn.Module, microbatches: Sequence[Batch], rows: Tensor, g: Tensor
) -> Comparison:
    """The gradient found, against the gradient of each sequence, rows [B, P]."""
    owner = torch.repeat_interleave(torch.tensor([len(sequences) for sequences in w.valid]))
    own = rows[int((owner < len(microbatches) - w.steps).sum()) :]
    right = own.sum(0, dtype=torch.float64) / w.total
    N, length = w.total, float(right.norm() * w.total)
    by_microbatch = rows.new_zeros(len(microbatches), len(right)).index_add(0, owner, rows)
    fitted = _fitted(g, rows, w.sequences, N)
    explained = tolerance(own, count=int(N), depth=depth(model), dtype=rows.dtype, result=length)
    reference_parts = by_microbatch.double() / N
    parts = torch.zeros_like(reference_parts).index_add(0, owner, fitted.values.nan_to_num()[:, None] * rows / N)
    reference_parts[: len(microbatches) - w.steps] = 0.0
    return Comparison(
        **vars(distance(g, right)),
        rule=method.word,
        per_layer=per_layer(model, g, right),
        counts=w.sequences,
        microbatch=owner,
        token_weights=_fitted(g, by_microbatch, w.counts, N).values,
        sequence_weights=fitted.values,
        predicted=method.sequence_weights(w),
        map=_map(microbatches, fitted.values),
        residual=fitted.residual,
        condition=fitted.condition,
        indistinguishable=fitted.indistinguishable,
        tolerance=explained,
        gradients=composed(g, parts, reference_parts, [str(int(n)) for n in w.counts], explained.value, model=model),
    )


def _yours(loop: Callable[..., None]) -> Rule:
    """A loop that is not in the table, beside what a correct one would give."""
    return replace(rules.rule("token-mean"), word=getattr(loop, "__name__", "yours"), loop=loop)


def _fitted(g: Tensor, references: Tensor, counts: Tensor, total: float) -> Weights:
    """Weights × N; 0 for what has no valid token, NaN for all where the gradient itself is not finite."""
    finite = bool(g.isfinite().all())
    weights = fit(g if finite else torch.zeros_like(g), references)
    values = (weights.values * total).masked_fill(counts == 0, 0.0)
    if finite:
        return replace(weights, values=values)
    return replace(weights, values=torch.full_like(values, math.nan), residual=math.nan)


def _map(microbatches: Sequence[Batch], weights: Tensor) -> Tensor:
    longest = max(labels.shape[1] for _, labels in microbatches)
    rows = torch.cat([F.pad(labels, (0, longest - labels.shape[1]), value=IGNORE) for _, labels in microbatches]).cpu()
    target = rows != IGNORE
    target[:, 0] = False
    return torch.where(target, weights[:, None], math.nan)


def weights(
    *,
    rule: Method = "mean-of-means",
    accumulation_steps: Steps = 4,
    sequences: Sequences = 8,
    shortest: Shortest = 4,
    text: Text = "documents",
    seed: Seed = 0,
) -> Comparison:
    """The weight that each token really received.

    >>> comparison = weights(rule="sum-of-means", shortest=32)  # equal counts
    >>> comparison.token_weights.round(decimals=9)
    tensor([4., 4., 4., 4.], dtype=torch.float64)

    A transformer in float64 on real text. Raises LabError for more microbatches than sequences.
    """
    model = Transformer(seed=seed, dtype=torch.float64)
    microbatches = split(*batch(seed, sequences, shortest=shortest, text=text), accumulation_steps)
    return compare(model, microbatches, rule)


def layers(
    *,
    rule: Method = "mean-of-means",
    accumulation_steps: Steps = 4,
    sequences: Sequences = 8,
    shortest: Shortest = 4,
    text: Text = "made",
    seed: Seed = 2493,
) -> Comparison:
    """The gradient of each layer, faulty beside correct; by default a projection of 1.00 hides an error of 27 %.

    >>> comparison = layers()
    >>> round(comparison.projection, 2), round(comparison.relative_error, 2)
    (1.0, 0.27)

    The same measurement as `weights`, on a window whose error is perpendicular to the correct gradient.
    """
    return weights(
        rule=rule,
        accumulation_steps=accumulation_steps,
        sequences=sequences,
        shortest=shortest,
        text=text,
        seed=seed,
    )


@dataclass(frozen=True, eq=False)
class Tail:
    """The optimizer steps of two epochs, and the weight that every microbatch has in each."""

    weights: Tensor = quantity("fitted weight × N, optimizer steps × microbatches of both epochs; NaN: not in it")
    predicted: Tensor = quantity("the same by the rule's algebra")
    epoch: tuple[int, ...] = quantity("epoch in which each step is made")
    norm_ratio: tuple[float, ...] = quantity("‖g‖ / ‖G‖ of each step")
    relative_error: tuple[float, ...] = quantity("‖g − G‖ / ‖G‖ of each step")
    left: int = quantity("microbatches that no step has seen", "microbatches")


def tail(
    *,
    rule: Annotated[
        str, Choice(EPOCH, help="what becomes of the microbatches that do not fill a window")
    ] = "carried-over",
    microbatches: Annotated[int, Range(1, 24, unit="microbatches", help="microbatches of one epoch")] = 10,
    accumulation_steps: Annotated[
        int, Range(1, 8, unit="microbatches", help="K, microbatches of one optimizer step")
    ] = 4,
    shortest: Shortest = 32,
    seed: Seed = 0,
) -> Tail:
    """Two epochs of microbatches that K does not divide, at fixed weights of the model, in the same order.

    >>> epochs = tail(rule="tail-divided-by-k")
    >>> [round(each, 2) for each in epochs.norm_ratio]
    [1.0, 1.0, 0.5, 1.0, 1.0, 0.5]

    One sequence a microbatch, of equal counts unless `shortest` says otherwise. Carried over, a tail makes no step:
    its gradient stays in the first step of the next epoch. Raises LabError where it would never make any.
    """
    K, M = accumulation_steps, microbatches
    if rule == "carried-over" and M < K:
        raise LabError(f"accumulation steps = {K} is more than the {M} microbatches of an epoch, no step ever: try {M}")
    model = Transformer(seed=seed, dtype=torch.float64)
    epoch = split(*batch(seed, M, shortest=shortest), M)
    windows = _windows(M, K, carried=rule == "carried-over")
    comparisons = [compare(model, [epoch[at % M] for at in members], rule, steps=K) for members in windows]
    weights, predicted = torch.full((2, len(windows), 2 * M), math.nan, dtype=torch.float64)
    for step, members in enumerate(windows):
        weights[step, members], predicted[step, members] = comparisons[step].token_weights, comparisons[step].predicted
    return Tail(
        weights,
        predicted,
        epoch=tuple(1 + members[-1] // M for members in windows),
        norm_ratio=tuple(each.norm_ratio for each in comparisons),
        relative_error=tuple(each.relative_error for each in comparisons),
        left=2 * M - len({at for members in windows for at in members}),
    )


def _windows(M: int, K: int, carried: bool) -> list[list[int]]:
    """Which microbatches, numbered through both epochs, each optimizer step holds."""
    epochs = [range(M), range(M, 2 * M)]
    windows = [list(epoch[at : at + K]) for epoch in epochs for at in range(0, M, K)]
    if not carried or M % K == 0:
        return windows
    full = [members for members in windows if len(members) == K]
    full[M // K] = windows[M // K] + full[M // K]
    return full
