"""What the steps train: tiny models of seeded weights, and windows of microbatches that hold unequal counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORE, VOCABULARY, WIDTH, LENGTH = -100, 29, 8, 9


# Models


@torch.no_grad()
def drawn(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A model whose weights come from a seed of their own; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        model = make().to(dtype)
    generator = torch.Generator().manual_seed(7)
    for name, p in model.named_parameters():
        values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        one_dimensional = (1.0 if name.endswith("weight") else 0.0) + 0.1 * values
        p.copy_(one_dimensional if p.dim() == 1 else values / p.shape[-1] ** 0.5)
    return model


class Language(nn.Module):
    """A causal language model: embedding, mean over the past, one hidden layer, head."""

    def __init__(self, dropout: float = 0.0, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        ages = torch.arange(1, tokens.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x.cumsum(1) / ages + x
        return self.head(checkpoint(self.hidden, x, use_reentrant=False) if self.checkpointed else self.hidden(x))


def classifier(middle: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), middle or nn.Identity(), nn.GELU(), nn.Linear(12, 5))


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 10), nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).squeeze(-1)


class Experts(nn.Module):
    """A common trunk, and a head for each domain: a microbatch uses one head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleDict({name: nn.Linear(8, 5) for name in "abc"})

    def forward(self, domain: str, x: Tensor) -> Tensor:
        return self.heads[domain](torch.tanh(self.trunk(x)))


# Losses


def lm_loss(model: nn.Module, tokens: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of the next tokens, padding left out; "none" gives [b, T - 1]."""
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORE, reduction=reduction)


def valid(labels: Tensor) -> int:
    return int((labels[:, 1:] != IGNORE).sum())


def like(model: nn.Module, x: Tensor) -> Tensor:
    return x.to(next(model.parameters()).dtype)


def language_sum(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return lm_loss(model, *microbatch, "sum"), valid(microbatch[1])


def class_sum(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = microbatch
    return F.cross_entropy(model(like(model, x)), y, reduction="sum"), len(y)


def expert_sum(model: nn.Module, microbatch: tuple[str, Tensor, Tensor]) -> tuple[Tensor, int]:
    domain, x, y = microbatch
    return F.cross_entropy(model(domain, like(model, x)), y, reduction="sum"), len(y)


def weighted_sum(model: nn.Module, microbatch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y, w = (like(model, each) for each in microbatch)
    return (w * (model(x) - y) ** 2).sum(), w.sum()


# Data


@dataclass(frozen=True)
class Rows:
    """A microbatch as a dataclass."""

    tokens: Tensor
    labels: Tensor


def pad(documents: Sequence[Sequence[int]], length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens and labels [b, T] of documents that are at most T long."""
    tokens = torch.zeros(len(documents), length, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE)
    for row, document in enumerate(documents):
        tokens[row, : len(document)] = labels[row, : len(document)] = torch.tensor(document)
    return tokens, labels


def tokenize(text: str) -> list[int]:
    """One token a letter; the space is 26, anything else 27."""
    return [ord(c) - 97 if c.islower() else 26 if c == " " else 27 for c in text.lower()]


def language(*lengths: Sequence[int], seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """A window of documents of these lengths, as (tokens, labels) of each microbatch."""
    generator = torch.Generator().manual_seed(seed)
    return [
        pad([torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in microbatch])
        for microbatch in lengths
    ]


def pictures(*sizes: int, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 6, generator=generator, dtype=torch.float64) + torch.randn(6, generator=generator),
            torch.randint(5, (n,), generator=generator),
        )
        for n in sizes
    ]


def measurements(*sizes: int, seed: int = 3) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(n, 4), draw(n), draw(n).abs() + 0.2) for n in sizes]


def joined(microbatches: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*microbatches, strict=True))


def rows_of(microbatch: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Microbatches of one sequence each."""
    return [tuple(part[at : at + 1] for part in microbatch) for at in range(len(microbatch[0]))]


# Tasks


@dataclass(frozen=True)
class Task:
    """A model, a window and the objective as a sum; language tasks can also give their (tokens, labels)."""

    make: Callable[[], nn.Module]
    microbatches: list[Any]
    loss_sum: Callable[[nn.Module, Any], tuple[Tensor, int | Tensor]]
    concat: Callable[[list[Any]], Any] | None = joined
    dtype: torch.dtype = torch.float64
    language: Callable[[Any], tuple[Tensor, Tensor]] = lambda microbatch: microbatch
    coupled: bool = False  # a layer makes the examples of a batch depend on each other

    def model(self) -> nn.Module:
        return drawn(self.make, self.dtype)

    def but(self, **changes: Any) -> Task:
        return replace(self, **changes)


LANGUAGE = Task(Language, language((9, 4, 2), (8, 9), (3, 2, 5), (2, 3)), language_sum)  # 12, 15, 7, 3 valid tokens
SINGLE = LANGUAGE.but(dtype=torch.float32)
EVEN_ROWS = LANGUAGE.but(microbatches=language((9, 4), (8, 9), (3, 2), (2, 5)))  # two documents each
FIVE = LANGUAGE.but(microbatches=language((9, 4, 2), (8, 9), (3, 2, 5), (2, 3), (9, 7)))
THREE = LANGUAGE.but(microbatches=LANGUAGE.microbatches[:3])
HOLLOW = LANGUAGE.but(microbatches=language((9, 4, 2), (8, 9), (1, 1), (2, 3)))  # the third has nothing to predict
TIED = LANGUAGE.but(make=lambda: Language(tied=True))
CHECKPOINTED = LANGUAGE.but(make=lambda: Language(checkpointed=True))
DROPOUT = LANGUAGE.but(make=lambda: Language(dropout=0.3))
DICTS = LANGUAGE.but(
    microbatches=[{"input_ids": tokens, "labels": labels} for tokens, labels in LANGUAGE.microbatches],
    loss_sum=lambda model, mb: language_sum(model, (mb["input_ids"], mb["labels"])),
    concat=lambda window: {key: torch.cat([each[key] for each in window]) for key in window[0]},
    language=lambda mb: (mb["input_ids"], mb["labels"]),
)
ROWS = LANGUAGE.but(
    microbatches=[Rows(*each) for each in LANGUAGE.microbatches],
    loss_sum=lambda model, mb: language_sum(model, (mb.tokens, mb.labels)),
    concat=lambda window: Rows(
        torch.cat([each.tokens for each in window]), torch.cat([each.labels for each in window])
    ),
    language=lambda mb: (mb.tokens, mb.labels),
)
TEXTS = LANGUAGE.but(
    microbatches=[["the mean", "of", "mea"], ["is not th", "e mean"], ["of tok", "en"]],
    loss_sum=lambda model, mb: language_sum(model, pad([tokenize(text) for text in mb])),
    concat=lambda window: [text for mb in window for text in mb],
    language=lambda mb: pad([tokenize(text) for text in mb]),
)
PICTURES = Task(classifier, pictures(2, 5, 3, 6), class_sum)
BATCHNORM = PICTURES.but(make=lambda: classifier(nn.BatchNorm1d(12)), coupled=True)
GROUPNORM = PICTURES.but(make=lambda: classifier(nn.GroupNorm(3, 12)))
MEASUREMENTS = Task(Regression, measurements(2, 5, 3, 6), weighted_sum)
DOMAINS = Task(
    Experts,
    [(domain, *each) for domain, each in zip("abab", pictures(2, 5, 3, 6), strict=True)],  # c has no microbatch
    expert_sum,
    concat=None,
)
