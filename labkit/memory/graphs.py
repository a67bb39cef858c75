"""When a loop releases its graphs: backward in the loop, the classic mistake, and its lookalikes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from labkit import rules
from labkit.corpus import Batch, Seed, batch, split
from labkit.declare import Choice, Range, quantity
from labkit.fit import distance, flat, gradient
from labkit.memory.saved_tensors import Length, Loop, Net, Timeline, rounding, watch
from labkit.nets import next_token_loss, valid_tokens
from labkit.tolerance import Compared, Tolerance


def summed_loss(model: nn.Module, microbatches: Sequence[Batch]) -> None:
    """One backward at the end."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    loss = torch.tensor(0.0)
    for tokens, labels in microbatches:
        loss = loss + next_token_loss(model, tokens, labels) / N
    loss.backward()


def all_forwards_first(model: nn.Module, microbatches: Sequence[Batch]) -> None:
    """A backward for each loss, after the last forward."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    losses = [next_token_loss(model, tokens, labels) / N for tokens, labels in microbatches]
    for loss in losses:
        loss.backward()


def retained_graph(model: nn.Module, microbatches: Sequence[Batch]) -> None:
    """retain_graph=True keeps the graph until `loss` names another one, which is built before."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels) / N
        loss.backward(retain_graph=True)


def logged_forward(model: nn.Module, microbatches: Sequence[Batch]) -> None:
    """A second forward, for the log: its loss has a graph, and no backward ever releases it."""
    N, log = sum(valid_tokens(labels) for _, labels in microbatches), []
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels) / N
        loss.backward()
        log.append(next_token_loss(model, tokens, labels, "mean"))


def logged_loss(model: nn.Module, microbatches: Sequence[Batch]) -> None:
    """The loss is added to a total for the log, graph and all, after its own backward."""
    N, total = sum(valid_tokens(labels) for _, labels in microbatches), torch.tensor(0.0)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels) / N
        loss.backward()
        total = total + loss


LOOPS: dict[str, Loop] = {
    "summed loss": summed_loss,
    "all forwards first": all_forwards_first,
    "retained graph": retained_graph,
    "logged forward": logged_forward,
    "logged loss": logged_loss,
}


@dataclass(frozen=True)
class Classic(Compared):
    """One window by backward in the loop, by another loop, and with checkpointing."""

    loop: str = quantity("the loop beside backward in the loop")
    right: Timeline = quantity("backward in the loop")
    other: Timeline = quantity("the other loop")
    checkpointed: Timeline = quantity("backward in the loop, with checkpointing")
    full: int = quantity("most kept at once for the full batch in one", "B")
    relative_error: float = quantity("largest ‖g − G‖ / ‖G‖ of the three, G the full batch's gradient")
    tolerance: Tolerance = quantity("relative error that rounding alone explains")

    @property
    def ratio(self) -> float:
        """The other loop's peak over that of backward in the loop."""
        return self.other.peak / self.right.peak


def classic(
    *,
    loop: Annotated[str, Choice(tuple(LOOPS), help="the loop beside backward in the loop")] = "summed loss",
    accumulation_steps: Annotated[
        int, Range(1, 16, unit="microbatches", help="K, microbatches of one optimizer step")
    ] = 4,
    microbatch: Annotated[int, Range(1, 2, unit="sequences", help="b, sequences of one microbatch")] = 1,
    length: Length = 32,
    seed: Seed = 0,
) -> Classic:
    """Bytes kept for backward, microbatch by microbatch: backward in the loop, another loop, and checkpointing.

    >>> comparison = classic()
    >>> round(comparison.ratio, 2), comparison.equal
    (4.0, True)

    The same gradient by all of them; float64.
    """
    pair = batch(seed, accumulation_steps * microbatch, length)
    microbatches, plain = split(*pair, accumulation_steps), Net(seed, length)
    full, G = watch(plain, [pair], rules.token_mean).peak, flat(gradient(plain))
    runs = (plain, rules.token_mean), (plain, LOOPS[loop]), (Net(seed, length, True), rules.token_mean)
    right, other, checkpointed = ((watch(model, microbatches, each), _off(model, G)) for model, each in runs)
    off, bound = max(right[1], other[1], checkpointed[1]), rounding(seed, length, microbatches)
    return Classic(loop, right[0], other[0], checkpointed[0], full, off, bound)


def _off(model: nn.Module, G: Tensor) -> float:
    return distance(flat(gradient(model)), G).relative_error
