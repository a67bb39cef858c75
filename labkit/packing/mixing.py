"""Mixture and order: the kinds of text in a step, and the order of the steps."""

from __future__ import annotations

import ast
import functools
import importlib
import math
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from labkit import corpus
from labkit.corpus import Batch, Seed
from labkit.declare import Choice, Range, quantity
from labkit.errors import LabError
from labkit.fit import distance, fit, flat, gradient_of
from labkit.nets import IGNORE, Transformer, next_token_loss, valid_tokens

PAIRS = ("docstrings + help", "code + docstrings", "code + help")


@functools.lru_cache
def domain(name: str) -> tuple[str, ...]:
    """Documents of one kind of text, from the running Python's own standard library.

    >>> [len(domain(name)) > 50 for name in ("code", "docstrings", "help")]
    [True, True, True]

    code: functions without their docstrings; help: the topics of the language reference that `help()` shows.
    Raises LabError if this Python was installed without them.
    """
    texts = (text.encode("ascii", "replace").decode() for text in SOURCES[name]())
    documents = tuple(text for text in texts if len(text) >= corpus.SHORTEST)
    if not documents:
        raise LabError(f"{name} = 0 documents in this Python: try a Python that comes with its .py files")
    return documents


def _functions() -> Iterator[str]:
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[::9]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                yield "\n".join(map(ast.unparse, body))


def _topics() -> list[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return []
    return list(topics.values())


SOURCES: dict[str, Callable[[], Iterable[str]]] = {
    "code": _functions,
    "docstrings": corpus.documents,
    "help": _topics,
}


# Weights of the mixture.


def by_documents(model: Transformer, batches: list[Batch], share: float) -> Tensor:
    """The usual mean over all tokens: the numbers of documents do not determine the numbers of tokens."""
    N = sum(valid_tokens(labels) for _, labels in batches)
    first, second = (next_token_loss(model, tokens, labels, "sum") for tokens, labels in batches)
    return (first + second) / N


def by_tokens(model: Transformer, batches: list[Batch], share: float) -> Tensor:
    """Each kind's own mean over tokens, weighted as the mixture says."""
    first, second = (next_token_loss(model, tokens, labels, "mean") for tokens, labels in batches)
    return share * first + (1 - share) * second


LOSSES: dict[str, Callable[[Transformer, list[Batch], float], Tensor]] = {
    "by tokens": by_tokens,
    "by documents": by_documents,
}


@dataclass(frozen=True)
class Mixed:
    """The gradient of one way to count the share."""

    name: str = quantity("what the share is counted by")
    share: float = quantity("weight of the first kind of text in the gradient, fitted; the second has the rest")
    residual: float = quantity("share of the gradient that no weights explain")
    cosines: tuple[float, float] = quantity("cosine with the gradient of each kind of text alone")
    relative_error: float = quantity("‖g − G‖ / ‖G‖, G as the mixture says")


@dataclass(frozen=True, eq=False)
class Mixture:
    """Two kinds of text in one step: the weights wanted, those of the gradient, and where it points."""

    names: tuple[str, str] = quantity("the two kinds of text")
    documents: tuple[int, int] = quantity("documents of each in the batch", "documents")
    tokens: tuple[int, int] = quantity("targets of each in the batch", "tokens")
    wanted: float = quantity("share of the first, as the mixture says")
    ways: tuple[Mixed, ...] = quantity("the result of each way to count")
    shares: Tensor = quantity("shares of the first, from 0 to 1")
    cosines: Tensor = quantity("cosine with the gradient of each kind, at these shares, [2, shares]")


def mixture(
    *,
    texts: Annotated[str, Choice(PAIRS, help="two kinds of text of the standard library")] = PAIRS[0],
    share: Annotated[float, Range(0.1, 0.9, step=0.05, help="share of the first kind")] = 0.5,
    documents: Annotated[int, Range(4, 24, unit="documents", help="documents of one step")] = 8,
    length: Annotated[int, Range(32, 256, log=True, unit="tokens", help="where longer documents are cut")] = 128,
    seed: Seed = 0,
) -> Mixture:
    """The share of two kinds of text by documents and by tokens, and where the gradient points.

    >>> mix = mixture()
    >>> [(way.name, way.share < 0.49) for way in mix.ways]
    [('by tokens', False), ('by documents', True)]

    One batch with the share of its documents, rounded, at least one of each kind. The curves are exact: a gradient
    is linear in the weights. Raises LabError if this Python was installed without its texts.
    """
    names = texts.split(" + ")
    of_first = min(max(1, round(share * documents)), documents - 1)
    counts = (of_first, documents - of_first)
    batches = [_batch(name, count, length, seed) for name, count in zip(names, counts, strict=True)]
    model = Transformer(seed=seed, length=length, dtype=torch.float64)
    alone = [gradient_of(model, next_token_loss(model, *each, "mean")) for each in batches]
    right = share * alone[0] + (1 - share) * alone[1]
    gradients = {name: gradient_of(model, loss(model, batches, share)) for name, loss in LOSSES.items()}
    shares = torch.linspace(0, 1, 41, dtype=torch.float64)
    path = shares[:, None] * alone[0] + (1 - shares[:, None]) * alone[1]
    return Mixture(
        (names[0], names[1]),
        counts,
        (valid_tokens(batches[0][1]), valid_tokens(batches[1][1])),
        share,
        tuple(_mixed(name, gradient, alone, right) for name, gradient in gradients.items()),
        shares,
        torch.stack([torch.cosine_similarity(path, each[None]) for each in alone]),
    )


def _mixed(name: str, gradient: Tensor, alone: list[Tensor], right: Tensor) -> Mixed:
    weights = fit(gradient, alone)
    one, other = (distance(gradient, each).cosine for each in alone)
    return Mixed(
        name, float(weights.values[0]), weights.residual, (one, other), distance(gradient, right).relative_error
    )


def _batch(name: str, count: int, length: int, seed: int) -> Batch:
    """Documents of a kind, every one as likely, cut and padded."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(len(domain(name)), generator=generator)[:count].tolist()
    rows = [torch.tensor(list(domain(name)[at][:length].encode())) for at in indices]
    return pad_sequence(rows, batch_first=True), pad_sequence(rows, batch_first=True, padding_value=IGNORE)


# The order of the data.


def token_mean(model: Transformer, tokens: Tensor, labels: Tensor, usual: float) -> Tensor:
    """A batch's own mean: the weight of a document depends on the rest of its batch."""
    return next_token_loss(model, tokens, labels, "mean")


def fixed_mean(model: Transformer, tokens: Tensor, labels: Tensor, usual: float) -> Tensor:
    """Divided by the tokens that a batch usually has: a document has the same weight in any batch."""
    return next_token_loss(model, tokens, labels, "sum") / usual


DIVISORS: dict[str, Callable[[Transformer, Tensor, Tensor, float], Tensor]] = {
    "its own tokens": token_mean,
    "the same for all": fixed_mean,
}
ORDERS = ("shuffled", "reversed", "sorted by length")


def epoch(
    model: Transformer, examples: Batch, order: Tensor, batch: int, learning_rate: float, divisor: str
) -> Iterator[Tensor]:
    """One epoch of plain SGD: the weights, flat, before it and after each step."""
    tokens, labels = examples
    parameters = list(model.parameters())
    usual = valid_tokens(labels) / math.ceil(len(tokens) / batch)
    yield flat(parameters)
    for members in order.split(batch):
        loss = DIVISORS[divisor](model, tokens[members], labels[members], usual)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.sub_(learning_rate * g)
        yield flat(parameters)


@dataclass(frozen=True, eq=False)
class Order:
    """Two epochs over the same examples in two orders, from the same weights."""

    first: tuple[int, int] = quantity("targets in the first batch of each order", "tokens")
    step_error: float = quantity("‖g − G‖ / ‖G‖ at the first step, G of the order as drawn")
    step_cosine: float = quantity("cosine of the two first gradients")
    apart: Tensor = quantity("‖W − V‖ / ‖V at the end − V at the start‖ after each step, V of the order as drawn")

    @property
    def end(self) -> float:
        """How far apart the weights are after the epoch, as a share of the way."""
        return float(self.apart[-1])


def order(
    *,
    order: Annotated[str, Choice(ORDERS, help="the other order of the same examples")] = "shuffled",
    divisor: Annotated[str, Choice(tuple(DIVISORS), help="what the summed loss of a batch is divided by")] = (
        "its own tokens"
    ),
    examples: Annotated[int, Range(8, 64, unit="documents", help="documents of the epoch")] = 32,
    batch: Annotated[int, Range(1, 64, unit="documents", help="documents of one step")] = 8,
    learning_rate: Annotated[float, Range(0.001, 1, log=True, help="η of plain SGD")] = 0.3,
    seed: Seed = 0,
) -> Order:
    """The same examples in another order: the first gradient, and the weights after one epoch.

    >>> epochs = order()
    >>> epochs.step_error > 0.5, 0.01 < epochs.end < 0.5
    (True, True)

    float64. Where every document weighs the same, the difference is of second order in η: for two steps a, b the
    weights differ by η² (H_b g_a − H_a g_b), to lowest order (expand the second step's gradient at the first weights).
    """
    data = corpus.batch(seed, examples)
    orders = (torch.arange(examples), _ordered(order, data[1], seed))
    models = [Transformer(seed=seed, dtype=torch.float64) for _ in orders]
    one, other = (
        torch.stack(list(epoch(model, data, each, batch, learning_rate, divisor)))
        for model, each in zip(models, orders, strict=True)
    )
    first = distance(other[1] - other[0], one[1] - one[0])  # the first steps, −η g each
    return Order(
        (valid_tokens(data[1][orders[0][:batch]]), valid_tokens(data[1][orders[1][:batch]])),
        first.relative_error,
        first.cosine,
        (other - one).norm(dim=1) / (one[-1] - one[0]).norm(),
    )


def _ordered(order: str, labels: Tensor, seed: int) -> Tensor:
    """Another order of the examples."""
    n = len(labels)
    if order == "shuffled":
        return torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    if order == "sorted by length":
        return (labels != IGNORE).sum(1).argsort(stable=True)
    return torch.arange(n).flip(0)
