"""Real text without a download: the docstrings of Python's own standard library, one document each.

Read where the running interpreter keeps them; nothing is written. A token is an ASCII character
(others become "?"); a document belongs to the training or the held-out part by a hash of its text.
"""

from __future__ import annotations

import ast
import bisect
import functools
import hashlib
import math
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from labkit.declare import Choice, Range
from labkit.errors import LabError
from labkit.nets import IGNORE

Batch = tuple[Tensor, Tensor]
SHORTEST = 4

Steps = Annotated[int, Range(1, 32, unit="microbatches", help="K, microbatches of one optimizer step")]
Sequences = Annotated[int, Range(1, 32, unit="sequences", help="sequences of one optimizer step, in K microbatches")]
Shortest = Annotated[int, Range(SHORTEST, 32, unit="tokens", help="shortest document drawn; at 32 all are equal")]
Text = Annotated[str, Choice(("documents", "made"), help="the standard library's docstrings, or made letters")]
Seed = Annotated[int, Range(0, 9999, help="draws the text and the model's weights")]


def documents(held_out: bool = False) -> tuple[str, ...]:
    """The documents of one part, each once, shortest first.

    >>> train, other = documents(), documents(held_out=True)
    >>> len(train) > 5 * len(other) > 0, set(train) & set(other)
    (True, set())

    One in ten is held out, by a hash of its text. A thousand and more, of 4 to some thousand characters, from
    every third module. Raises LabError where this Python has no source.
    """
    return _parts()[held_out]


@functools.lru_cache
def _parts() -> tuple[tuple[str, ...], tuple[str, ...]]:
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    trees = (ast.parse(path.read_bytes()) for path in sorted(folder.glob("*.py"))[::3])
    texts = sorted({text for tree in trees for text in _docstrings(tree) if len(text) >= SHORTEST})
    if not texts:
        raise LabError(f"no source of the standard library in {folder}: try a Python that comes with its .py files")
    train, other = ([text for text in texts if _held_out(text) == part] for part in (False, True))
    return tuple(sorted(train, key=len)), tuple(sorted(other, key=len))


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    yield (ast.get_docstring(node) or "").encode("ascii", "replace").decode()
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child)


def _held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < 26


def batch(
    seed: int,
    sequences: int = 8,
    length: int = 32,
    *,
    shortest: int = SHORTEST,
    text: str = "documents",
    held_out: bool = False,
) -> Batch:
    """Sequences of very unequal length: tokens, and labels that ignore the padding.

    >>> tokens, labels = batch(0, 3, 16)
    >>> tokens.shape, bool((tokens[labels != IGNORE] == labels[labels != IGNORE]).all())
    (torch.Size([3, 16]), True)

    Wanted lengths are drawn evenly on a log scale from `shortest` to twice `length`, and longer ones are cut, so
    `shortest = length` gives equal counts. text "documents": documents of about that length, no two that begin
    alike while there are enough; "made": letters that are the same on every Python, held out or not.
    Shapes: both [sequences, length], int64. Raises LabError for no sequences, a length below 4, another text, or
    a shortest outside 4 … length.
    """
    Choice(("documents", "made")).check("text", text, str)
    if sequences < 1 or length < SHORTEST:
        raise LabError(f"{sequences} sequences of {length} tokens are none: try sequences=1, length={SHORTEST} or more")
    if not SHORTEST <= shortest <= length:
        near = max(SHORTEST, min(length, shortest))
        raise LabError(f"shortest = {shortest} is outside {SHORTEST} … {length} tokens: try {near}")
    generator = torch.Generator().manual_seed(seed)
    write = _made_text if text == "made" else functools.partial(_document, documents(held_out))
    rows: list[str] = []
    patience = 50 * sequences
    while len(rows) < sequences:
        u, *v = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        row = write(shortest * (2 * length / shortest) ** u, *v)[:length]
        patience -= 1
        if row not in rows or patience < 0:
            rows.append(row)
    return _pad([list(row.encode()) for row in rows], length)


def _document(texts: Sequence[str], length: float, u: float, *_: float) -> str:
    """A document of the length wanted to a quarter more, or the next longer one, or the longest."""
    first = min(bisect.bisect_left(texts, length, key=len), len(texts) - 1)
    beyond = bisect.bisect_right(texts, 1.25 * length, lo=first + 1, key=len)
    return texts[first + int(u * (beyond - first))]


def _made_text(length: float, u: float, v: float, w: float) -> str:
    """Letters by a quadratic congruence: each text has its own step and alphabet."""
    a, b, c = int(97 * u), int(89 * v), int(20 * w)
    return "".join(chr(97 + c + (a * t * t + b * t) % 101 % (3 + b % 5)) for t in range(math.ceil(length)))


def _pad(rows: list[list[int]], length: int) -> Batch:
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = labels[at, : len(row)] = torch.tensor(row)
    return tokens, labels


def split(tokens: Tensor, labels: Tensor, accumulation_steps: int) -> list[Batch]:
    """The batch as microbatches, in order; where K does not divide it, the first hold one sequence more.

    >>> [len(tokens) for tokens, _ in split(*batch(0, 8), 3)]
    [3, 3, 2]

    Shapes: [B, T] each into K of [b, T]. Raises LabError for more microbatches than sequences, or none.
    """
    if not 1 <= accumulation_steps <= len(tokens):
        near = max(1, min(len(tokens), accumulation_steps))
        allowed = f"outside 1 … {len(tokens)}, the number of sequences"
        raise LabError(f"accumulation steps = {accumulation_steps} is {allowed}: try {near}")
    chunks = (torch.tensor_split(each, accumulation_steps) for each in (tokens, labels))
    return list(zip(*chunks, strict=True))


def made(gradients: Sequence[Sequence[Sequence[int]]]) -> list[Batch]:
    """Microbatches for `nets.Scalar` whose every target has the gradient given: microbatches of sequences of targets.

    >>> [(tokens.tolist(), labels.tolist()) for tokens, labels in made([[[8]], [[3, 2, 1]]])]
    [([[8, 0]], [[1, 1]]), ([[3, 2, 1, 0]], [[1, 1, 1, 1]])]

    Every sequence of a microbatch is padded to its longest; one without targets has no label at all.
    Raises LabError for a microbatch without sequences.
    """
    return [_made(sequences) for sequences in gradients]


def _made(sequences: Sequence[Sequence[int]]) -> Batch:
    if not sequences:
        raise LabError("a microbatch of no sequences: try [[]], one sequence without targets")
    length = 1 + max(1, *map(len, sequences))
    tokens = torch.tensor([[*targets, *[0] * (length - len(targets))] for targets in sequences])
    labels = [[1] * (len(targets) + 1) if targets else [IGNORE] for targets in sequences]
    return tokens, torch.tensor([[*row, *[IGNORE] * (length - len(row))] for row in labels])


@dataclass(frozen=True)
class Window:
    """The counts of one window, all that a predicted weight may depend on."""

    valid: tuple[tuple[int, ...], ...]
    positions: int
    labelled: int
    steps: int

    @property
    def counts(self) -> Tensor:
        """Valid tokens n_m of each microbatch, [K], float64."""
        return torch.tensor([sum(sequences) for sequences in self.valid], dtype=torch.float64)

    @property
    def sequences(self) -> Tensor:
        """Valid tokens of each sequence, [B], float64."""
        return torch.tensor([n for sequences in self.valid for n in sequences], dtype=torch.float64)

    @property
    def total(self) -> float:
        """N: valid tokens of the window's K microbatches; leftovers before them are not its own."""
        return float(self.counts[-self.steps :].sum())


def window(microbatches: Sequence[Batch], steps: int | None = None) -> Window:
    """Count a window; `steps` is the K declared, the number of microbatches if left out.

    >>> labels = torch.tensor([[7, 8, 9, IGNORE], [7, 8, IGNORE, IGNORE]])
    >>> window([(labels, labels)])
    Window(valid=((2, 1),), positions=6, labelled=5, steps=1)

    positions and labelled: targets with the padding, and labels before the shift. Raises LabError for no
    microbatches, steps below 1, or a window without a valid token.
    """
    steps = len(microbatches) if steps is None else steps
    if not microbatches or steps < 1:
        raise LabError(f"{len(microbatches)} microbatches in {steps} accumulation steps: try at least 1 of each")
    rows = [labels for _, labels in microbatches]
    valid = tuple(tuple((labels[:, 1:] != IGNORE).sum(1).tolist()) for labels in rows)
    counts = Window(
        valid,
        positions=sum(labels[:, 1:].numel() for labels in rows),
        labelled=sum(int((labels != IGNORE).sum()) for labels in rows),
        steps=steps,
    )
    if not counts.total:
        raise LabError("0 valid tokens in the window, nothing to divide by: try labels that are not all ignored")
    return counts
