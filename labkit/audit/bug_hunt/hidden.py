"""The steps of the bug hunt: one trainer, written in four ways, with one fault or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from labkit.cadence.stepping import adam_states
from labkit.corpus import Batch, window
from labkit.nets import draw, next_token_loss
from labkit.rules import rule

VOCABULARY, WIDTH = 32, 6
LIMIT = {"clip-per-microbatch": 0.03}  # elsewhere the clip has nothing to shorten
SECRET = 3  # how many microbatches a window has less than its K, where it is a tail

LOSSES = (  # the loss of a microbatch is another
    *("token-mean", "mean-of-means", "sum-of-means", "token-sum", "double-division"),
    *("padded-count", "unshifted-count", "tail-divided-by-k", "sequence-means"),
)
EACH = (  # what happens at every microbatch
    *("last-microbatch-only", "clip-per-microbatch", "step-per-microbatch"),
    *("schedule-per-microbatch", "adam-count-per-microbatch"),
)
LAYERS = ("nondeterministic", "batch-dependent-layer")
WORDS = (*LOSSES, *EACH, *LAYERS)

Microbatches = Sequence[Batch]


class Suspect(nn.Module):
    """Two layers that predict the next token from this one, with something between them.

    >>> Suspect(nn.Identity(), seed=0)(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(self, middle: nn.Module, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        self.middle = middle
        self.head = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        self.double()
        draw(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, T, V] of tokens [b, T]."""
        x = self.embedding[tokens]
        mixed: Tensor = self.middle(x.flatten(0, 1))
        return mixed.view_as(x) @ self.head.T


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "nondeterministic": lambda: nn.Dropout(0.2),
    "batch-dependent-layer": lambda: nn.BatchNorm1d(WIDTH),
}


class Trainer:
    """A model, its AdamW and its schedule, and one fault."""

    def __init__(self, word: str, structure: str, seed: int) -> None:
        self.word, self.gather = word, STRUCTURES[structure]
        self.model = Suspect(MIDDLES.get(word, nn.Identity)(), seed)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def step(self, microbatches: Microbatches) -> None:
        """One update."""
        if self.gather is closed:
            self.optimizer.step(lambda: closed(self, microbatches))
            self.finish(stepped=True)
            return
        self.gather(self, microbatches)
        self.clip()
        self.finish(stepped=self.word == "step-per-microbatch")

    def losses(self, microbatches: Microbatches) -> Iterator[Tensor]:
        """The loss of every microbatch, its sequences weighted as the word has it."""
        counts = window(microbatches, len(microbatches) + SECRET * (self.word == "tail-divided-by-k"))
        method = rule(self.word if self.word in LOSSES else "token-mean")
        weights = (method.sequence_weights(counts) / counts.total).split([len(tokens) for tokens, _ in microbatches])
        for (tokens, labels), weight in zip(microbatches, weights, strict=True):
            yield next_token_loss(self.model, tokens, labels, "none").sum(1) @ weight

    def each(self, last: bool) -> None:
        """What happens after every backward."""
        if self.word == "clip-per-microbatch":
            self.clip()
        elif self.word == "step-per-microbatch":
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif self.word == "schedule-per-microbatch" and not last:
            self.scheduler.step()
        elif self.word == "last-microbatch-only" and not last:
            self.optimizer.zero_grad()
        elif self.word == "adam-count-per-microbatch" and not last:
            for state in adam_states(self.optimizer):
                state["step"] += 1

    def clip(self) -> None:
        """Shorten the gradient that is there."""
        clip_grad_norm_(self.model.parameters(), LIMIT.get(self.word, 1000.0))

    def finish(self, stepped: bool) -> None:
        """Step, unless that is done."""
        if not stepped:
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


# The structures: how the gradient comes into .grad.


def looped(trainer: Trainer, microbatches: Microbatches) -> None:
    """One backward for each microbatch."""
    for at, loss in enumerate(trainer.losses(microbatches), 1):
        loss.backward()
        trainer.each(last=at == len(microbatches))


def closed(trainer: Trainer, microbatches: Microbatches) -> Tensor:
    """The same inside the optimizer's closure."""
    total = torch.zeros((), dtype=torch.float64)
    for loss in trainer.losses(microbatches):
        loss.backward()
        total += loss.detach()
    trainer.clip()
    return total


def summed(trainer: Trainer, microbatches: Microbatches) -> None:
    """One backward for the sum of all losses."""
    torch.stack(list(trainer.losses(microbatches))).sum().backward()


def buffered(trainer: Trainer, microbatches: Microbatches) -> None:
    """Gradients are kept in buffers of its own until the step."""
    parameters = list(trainer.model.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    for loss in trainer.losses(microbatches):
        for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            total += gradient
    for p, total in zip(parameters, sums, strict=True):
        p.grad = total


STRUCTURES: dict[str, Callable[[Trainer, Microbatches], object]] = {
    "loop": looped,
    "closure": closed,
    "one backward": summed,
    "buffers": buffered,
}
