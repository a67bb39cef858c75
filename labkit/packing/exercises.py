"""The exercises of the packing lab: who may look at whom in a packed row, and what each token shall predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from labkit.exercise import sandbox
from labkit.exercise.verdict import Function, Verdict, aside, exercise, refusal, within
from labkit.nets import IGNORE
from labkit.packing import rows

CASES: dict[str, list[int]] = {
    "two documents": [3, 2],
    "equal lengths": [3, 3, 3],
    "a document of one token": [4, 1, 2],
    "six documents": [5, 1, 4, 2, 6, 3],
    "one document": [4],
}


def judge(
    function: Function,
    names: tuple[str, ...],
    arguments_of: Callable[[list[int]], tuple[object, ...]],
    fault: Callable[[object, list[int], tuple[object, ...]], str],
    hint: Callable[[dict[str, object]], str],
    seconds: float,
) -> Verdict:
    """Run it in every case; the first fault is told with its numbers, and the slip that explains all cases."""
    if why := refusal(function, *names):
        return Verdict(False, tuple((check, False) for check in CASES), why, "")
    outcomes: list[sandbox.Outcome] = []
    faults = []
    for lengths in CASES.values():
        remaining, arguments = seconds - sum(outcome.seconds for outcome in outcomes), arguments_of(list(lengths))
        outcomes.append(sandbox.run(function, *arguments, seconds=max(remaining, 0.01)))
        faults.append(outcomes[-1].error or fault(outcomes[-1].value, lengths, arguments))
    checks = tuple((check, not each) for check, each in zip(CASES, faults, strict=True))
    wrong = [at for at, each in enumerate(faults) if each]
    if not wrong:
        return Verdict(True, checks, "Right in all cases." + aside(outcomes[0]), outcomes[0].printed)
    first = outcomes[wrong[0]]
    sentence = within(list(CASES)[wrong[0]], faults[wrong[0]])
    values = {check: each.value for check, each in zip(CASES, outcomes, strict=True) if not each.error}
    return Verdict(False, checks, f"{sentence} {hint(values)}".strip() + aside(first), first.printed)


def slip(values: Mapping[str, object], slips: Mapping[str, Callable[[list[int]], Tensor]], read: Function) -> str:
    """The words of the first slip that gives what was returned in all cases."""
    answers = {check: read(value) for check, value in values.items()}
    for words, wrong in slips.items():
        if answers and all(_same(each, wrong(CASES[check])) for check, each in answers.items()):
            return words
    return ""


def _same(answer: object, expected: Tensor) -> bool:
    return isinstance(answer, Tensor) and answer.shape == expected.shape and bool((answer == expected).all())


def _tensor(value: object) -> Tensor | None:
    """What was returned as a tensor; None for what is none."""
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        return None


def _shape(value: object, expected: tuple[int, ...], requirement: str) -> str:
    """What is wrong before any number is looked at."""
    answer = _tensor(value)
    if answer is None:
        return f"Your function returns {'None' if value is None else f'a {type(value).__name__}'}, and {requirement}."
    if tuple(answer.shape) != expected:
        return f"Your function returns the shape {tuple(answer.shape)}, and {expected} is asked: {requirement}."
    return ""


# The block mask.


def _one_late(lengths: list[int]) -> Tensor:
    owner = rows.document_of(lengths).roll(1)
    owner[0] = 0
    return (owner[:, None] == owner).tril()


def _equal_blocks(lengths: list[int]) -> Tensor:
    block = torch.arange(sum(lengths)) // max(1, sum(lengths) // len(lengths))
    return (block[:, None] == block).tril()


def _first_block(lengths: list[int]) -> Tensor:
    return rows.block_causal(lengths) & (rows.document_of(lengths)[:, None] == 0)


def _up_to_own_document(lengths: list[int]) -> Tensor:
    owner = rows.document_of(lengths)
    return owner[:, None] >= owner


MASK_SLIPS: dict[str, Callable[[list[int]], Tensor]] = {
    "This is the plain causal mask, it knows no documents: both tokens must be of one document too.": rows.plain_causal,
    "Nothing keeps a token from what it shall predict: s must be at most t too.": rows.block_both_ways,
    "Everybody may look at everybody: same document, and s at most t.": lambda n: torch.ones(sum(n), sum(n)).bool(),
    "Nobody may look at anybody: True shall mean “may look”.": lambda n: torch.zeros(sum(n), sum(n)).bool(),
    "True and False are swapped: True shall mean “may look”.": lambda n: ~rows.block_causal(n),
    "Rows and columns are swapped: row t is who looks, column s at whom.": lambda n: rows.block_causal(n).T,
    "A token may look at itself too: compare with s <= t, not with s < t.": lambda n: rows.block_causal(n).tril(-1),
    "A token may look at more than itself: at all that stands before it in its document.": lambda n: torch.eye(
        sum(n)
    ).bool(),
    "Every block begins one token too early, at the last token of the document before.": rows.block_off_by_one,
    "Every boundary stands one token too late: a document's first token is counted to the one before.": (_one_late),
    "All blocks have one length, and the documents do not.": _equal_blocks,
    "Only the first document has its block: the others begin where it ends.": _first_block,
    "Documents are compared with >=, so that earlier ones are seen whole: they must be equal.": _up_to_own_document,
    "The blocks stand in reverse order.": lambda n: rows.block_causal(n[::-1]),
}


@exercise
def block_mask(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `block_mask(lengths)`: [T, T] for a packed row, True where token t (row) may look at token s (column).

    >>> print(block_mask(rows.plain_causal))
    1 of 5 checks
    In the check “two documents” 6 pairs leak: token 3 (document 2) may look
    at token 0 (document 1). This is the plain causal mask, it knows no
    documents: both tokens must be of one document too.
      ✗ two documents
      ✗ equal lengths
      ✗ a document of one token
      ✗ six documents
      ✓ one document

    bool, or whole numbers 0 and 1. `seconds` is for all cases together.
    """
    return judge(
        function,
        ("lengths",),
        lambda lengths: (lengths,),
        lambda value, lengths, _: _mask_fault(value, lengths),
        lambda values: slip(values, MASK_SLIPS, _tensor),
        seconds,
    )


def _mask_fault(value: object, lengths: list[int]) -> str:
    """What is wrong with a mask, or nothing."""
    T = sum(lengths)
    if fault := _shape(value, (T, T), "a row and a column for each of the row's tokens"):
        return fault
    mask = torch.as_tensor(value).detach().cpu()
    if mask.is_floating_point() and bool(mask.isinf().any()):
        return "Your mask holds −∞, to be added to the scores: asked is True where a token may look, else False."
    if bool(((mask != 0) & (mask != 1)).any()):
        other = mask[(mask != 0) & (mask != 1)].flatten()[0].item()
        return f"Your mask holds {other}: asked is True where a token may look, else False."
    owner, looks = rows.document_of(lengths), mask.bool()
    own = owner[:, None] == owner
    return (
        _pairs(looks & ~own, owner, "pair leaks", "pairs leak", "may look at")
        or _pairs((looks & own).triu(1), owner, "pair looks ahead", "pairs look ahead", "may look at")
        or _pairs((~looks & own).tril(), owner, "pair is missing", "pairs are missing", "may not look at")
    )


def _pairs(wrong: Tensor, owner: Tensor, one: str, many: str, may: str) -> str:
    """How many pairs are wrong, and the first of them."""
    if not wrong.any():
        return ""
    t, s = wrong.nonzero()[0].tolist()
    first = f"token {t} (document {1 + int(owner[t])}) {may} token {s} (document {1 + int(owner[s])})"
    return f"{_count(wrong, one, many)}: {first}."


def _count(wrong: Tensor, one: str, many: str) -> str:
    count = int(wrong.sum())
    return f"{count} {many if count > 1 else one}"


# The targets.


def _tokens(lengths: Sequence[int]) -> Tensor:
    """Tokens that are all different."""
    return torch.arange(11, 11 + sum(lengths))


def _shifted(lengths: list[int]) -> Tensor:
    return torch.cat([_tokens(lengths)[1:], torch.tensor([IGNORE])])


def _shifted_and_ended(lengths: list[int]) -> Tensor:
    return _shifted(lengths).masked_fill(rows.positions_of(lengths).roll(-1) == 0, IGNORE)


def _at(lengths: list[int], places: Sequence[int]) -> Tensor:
    """The tokens, those at some places ignored; places beyond the row are none."""
    labels = _tokens(lengths)
    labels[[at for at in places if at < len(labels)]] = IGNORE
    return labels


def _instead(lengths: list[int], value: int) -> Tensor:
    return _tokens(lengths).masked_fill(rows.positions_of(lengths) == 0, value)


LABEL_SLIPS: dict[str, Callable[[list[int]], Tensor]] = {
    "No boundary is ignored: set the label of each document's first token to -100.": _tokens,
    "The ends are ignored, but the loss shifts the labels: it is the first token that nobody shall predict.": (
        lambda n: rows.wrong_end(_tokens(n), n)
    ),
    "Both ends are ignored: the first token is enough, the last one is a good target.": (
        lambda n: rows.both_ends(_tokens(n), n)
    ),
    "The labels are shifted already, and the loss shifts them again: leave each label beside its token.": _shifted,
    "The labels are shifted already, with -100 at the ends, and the loss shifts them again: ignore the first token of "
    "each document, and leave the other labels beside their tokens.": _shifted_and_ended,
    "Everything is ignored, so there is no loss.": lambda n: torch.full((sum(n),), IGNORE),
    "Only the second document's first token is ignored: the others begin at sums of lengths.": (
        lambda n: _at(n, [0, n[0]])
    ),
    "The lengths were taken as places: a document begins at the sum of the lengths before it.": lambda n: _at(n, n),
    "The second token of each document is ignored, one too late.": lambda n: _at(
        n, [1 + sum(n[:at]) for at in range(len(n))]
    ),
    "The loss ignores -100 alone: 0 is a token like any other.": lambda n: _instead(n, 0),
    "The loss ignores -100 alone, and -1 is no token at all.": lambda n: _instead(n, -1),
}


@exercise
def targets(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `targets(tokens, lengths)`: the labels [T] of a packed row, -100 where a token is nobody's target.

    >>> print(targets(lambda tokens, lengths: tokens.clone()).sentence)
    In the check “two documents” 1 target crosses a boundary: token 2, the last of document 1, shall predict token 3. \
No boundary is ignored: set the label of each document's first token to -100.

    Labels stand beside their tokens, and the loss shifts them: the label at t + 1 judges the logits at t. So the very
    first label is never used, and may be anything. `seconds` is for all cases together.
    """
    return judge(
        function,
        ("tokens", "lengths"),
        lambda lengths: (_tokens(lengths), lengths),
        _label_fault,
        lambda values: slip(values, {words: _but_first(wrong) for words, wrong in LABEL_SLIPS.items()}, _without_first),
        seconds,
    )


def _without_first(value: object) -> Tensor | None:
    labels = _tensor(value)
    return None if labels is None or not labels.dim() else labels[1:]


def _but_first(wrong: Callable[[list[int]], Tensor]) -> Callable[[list[int]], Tensor]:
    return lambda lengths: wrong(lengths)[1:]


def _label_fault(value: object, lengths: list[int], arguments: tuple[object, ...]) -> str:
    """What is wrong with labels, or nothing."""
    tokens = _tokens(lengths)
    if not _same(arguments[0], tokens):
        return (
            "Your function changed the tokens that it was given, and the model reads them: begin with tokens.clone()."
        )
    if fault := _shape(value, (len(tokens),), "a label for each token"):
        return fault
    labels = torch.as_tensor(value).detach().cpu()
    if labels.is_floating_point() or labels.dtype == torch.bool:
        return f"Your labels are of {labels.dtype}: whole numbers are asked, the tokens themselves or -100."
    return _misplaced(labels, tokens, lengths)


def _misplaced(labels: Tensor, tokens: Tensor, lengths: list[int]) -> str:
    """Which labels cross a boundary, are no tokens, or are lost; the very first is never used."""
    document, used, counted = 1 + rows.document_of(lengths), torch.arange(len(tokens)) > 0, labels != IGNORE
    start = rows.positions_of(lengths) == 0
    if (crossing := start & used & counted).any():
        t = int(crossing.nonzero()[0])
        many = _count(crossing, "target crosses", "targets cross")
        return f"{many} a boundary: token {t - 1}, the last of document {document[t - 1]}, shall predict token {t}."
    if (other := ~start & used & counted & (labels != tokens)).any():
        t = int(other.nonzero()[0])
        many = _count(other, "label is not its token", "labels are not their tokens")
        return f"{many}: at {t} stands {labels[t]}, and the token is {tokens[t]}."
    if (missing := ~start & used & ~counted).any():
        t = int(missing.nonzero()[0])
        many = _count(missing, "good target is lost", "good targets are lost")
        return f"{many}: token {t} stands behind another one of document {document[t]}, which can predict it."
    return ""
