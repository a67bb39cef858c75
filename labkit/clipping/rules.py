"""The rules of clipping and loss scaling: in which order to accumulate, unscale, clip and step."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

from labkit.clipping.ordering import ORDERS, Order
from labkit.clipping.overflow_across_ranks import half_a_step
from labkit.rules import Microbatches, Rule, add, none


def on_its_own(order: Order) -> Callable[[nn.Module, Microbatches], None]:
    """The order as the rule table runs it: plain SGD, loss scale 1024, threshold 1."""

    @functools.wraps(order)
    def loop(model: nn.Module, microbatches: Microbatches) -> None:
        order(model, microbatches, SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=1024.0), 1.0)

    return loop


AFTER = "accumulate all, then scaler.unscale_(optimizer) once, then clip_grad_norm_ once, then scaler.step(optimizer)"


def _rule(word: str, looks_like: str, fix: str, changes: str, right: bool = False) -> Rule:
    return Rule(word, on_its_own(ORDERS[word][0]), none, looks_like, fix, right, topic="clipping", changes=changes)


add(
    _rule(
        "clip-once",
        "every microbatch weighs min(1, c/‖G‖), and the norm that is clipped is the effective batch's",
        "nothing to fix",
        "",
        right=True,
    ),
    _rule(
        "clip-per-microbatch",
        "steps shorter than the threshold, turned away from microbatches with a large gradient",
        "move clip_grad_norm_ behind the loop",
        "weights min(1, c/‖g_m‖): another algorithm, bounded by c too",
    ),
    _rule(
        "clip-running-sum",
        "early microbatches weigh less than late ones, and the order of the data changes the step",
        "move clip_grad_norm_ behind the loop",
        "a microbatch is clipped once more with every one that follows it",
    ),
    _rule(
        "unscale-early",
        "the first microbatch weighs 1/S of the others; the logged norm jumps with S, or stands at c in every step",
        AFTER,
        "weights [1, S, S, …] before the clip: torch documents the rule and does not check it",
    ),
    _rule(
        "unscale-every",
        "only the last microbatch counts, as if zero_grad stood in the loop",
        AFTER,
        "weights […, 1/S², 1/S, 1]: torch's own unscale_ refuses, a division by hand does not",
    ),
    _rule(
        "clip-scaled",
        "every step is clipped, to c/S: training stands still, and the logged norm is S times too large",
        "clip the gradient at its true size: first scaler.unscale_(optimizer), or the division by N, then the clip",
        "the threshold is c/S for the gradient that is stepped with",
    ),
    Rule(
        "overflow-disagreement",
        half_a_step,
        none,
        "parts of one model drift apart after an overflow, and their loss scales differ from then on",
        "all-reduce what the overflow check found, so that every rank skips and every scale is halved",
        topic="clipping",
        changes="a rank that saw no overflow steps alone, and later unscales by another scale than was used",
    ),
)
