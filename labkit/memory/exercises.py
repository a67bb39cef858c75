"""The exercises of the memory lab: a loop judged by what it keeps at once, and the bytes of a training step."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit import rules
from labkit.accumulation.exercises import accumulate
from labkit.corpus import Batch, batch, split
from labkit.device import quota_threads
from labkit.exercise import sandbox
from labkit.exercise.formula import Exercise
from labkit.exercise.verdict import Function, Verdict, aside, exercise, refusal
from labkit.exercise.watched_arguments import LoopArguments
from labkit.memory.saved_tensors import Kept, Net, watch
from labkit.wording import three, word

PRAISE = "Right: the gradient of the full batch, and never more than one microbatch's graph, with 2, 4 or 8 of them."
STEPS = (2, 4, 8)  # K of the hidden windows, two sequences in each microbatch
SMALL = 0.01  # of what one microbatch needs: a loss or two
CHECKS = (
    "the gradient of the full batch",
    "one microbatch at a time",
    "no more for more microbatches",
    "nothing left at the end",
)


@dataclass(frozen=True)
class Usage:
    """What a loop held in one window; memory as multiples of what one microbatch needs."""

    K: int
    forwards: int
    passes: int  # backward passes that reached .grad
    first: int  # forwards before the first of them
    peak: float  # most kept for backward at once
    outputs: float  # most of the earlier outputs of the model alive when a forward began
    rest: float  # kept when it returned
    outcome: sandbox.Outcome
    error: str


@exercise
@quota_threads(1)
def accumulate_memory(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge a loop `accumulate(model, microbatches)` by its gradient, and by the bytes that it keeps at once.

    >>> accumulate_memory(rules.token_mean).passed
    True
    >>> from labkit.memory.graphs import summed_loss
    >>> print(accumulate_memory(summed_loss).sentence.partition(":")[0])
    Eight forwards, then one backward(), and until then every graph is kept

    The gradient is judged as in `accumulate`. Memory is what autograd keeps for backward, and outputs of the model that
    stay alive, in windows of 2, 4 and 8 equal microbatches; what one microbatch needs is the measure.
    """
    if why := refusal(function, "model", "microbatches"):
        return Verdict(False, tuple((check, False) for check in CHECKS), why, "")
    usages: list[Usage] = []
    while len(usages) < len(STEPS) and not (usages and usages[-1].error):
        usages.append(_usage(function, STEPS[len(usages)], seconds))
    if usages[-1].error:
        sentence, outcome = usages[-1].error, usages[-1].outcome
        return Verdict(False, tuple((check, False) for check in CHECKS), sentence + aside(outcome), outcome.printed)
    gradient, small, large = accumulate(function, seconds=seconds), usages[0], usages[-1]
    single, growth = large.peak < 1 + SMALL, large.peak + large.outputs - small.peak - small.outputs
    right = (gradient.passed, single, growth < SMALL, large.rest < SMALL)
    sentence = "" if gradient.passed else gradient.sentence
    sentence = f"{sentence} {'' if all(right[1:]) else _cause(large)}".strip() or PRAISE
    return Verdict(all(right), tuple(zip(CHECKS, right, strict=True)), sentence, gradient.printed)


def _window(K: int) -> tuple[Net, list[Batch]]:
    return Net(K, 16), split(*batch(K, 2 * K, 16, text="made"), K)


def _usage(function: Function, K: int, seconds: float) -> Usage:
    model, microbatches = _window(K)
    unit = watch(model, microbatches[:1], rules.token_mean).peak
    model.zero_grad()
    arguments = LoopArguments(model, microbatches)
    outputs = _Outputs(model)
    first: list[int] = []
    arguments.weights[0].register_post_accumulate_grad_hook(lambda _: first.append(arguments.calls))
    with Kept(*arguments.weights, *arguments.inputs) as saved:
        outcome = sandbox.run(function, arguments.model, arguments.microbatches, seconds=seconds)
    usage = Usage(
        K,
        forwards=arguments.calls,
        passes=arguments.passes,
        first=first[0] if first else arguments.calls,
        peak=saved.peak / unit,
        outputs=outputs.most / unit,
        rest=saved.bytes / unit,
        outcome=outcome,
        error=outcome.error or arguments.fault(outcome.value),
    )
    arguments.model.zero_grad()  # with create_graph=True a gradient and its graph hold each other
    return usage


class _Outputs:
    """Bytes of a model's earlier outputs that are alive when a forward begins: the most there were."""

    def __init__(self, model: nn.Module) -> None:
        self.most, self.references = 0, list[weakref.ref[torch.UntypedStorage]]()
        model.register_forward_pre_hook(self._look)
        model.register_forward_hook(self._keep)

    def _look(self, *_: object) -> None:
        alive = [each for each in (reference() for reference in self.references) if each is not None]
        self.most = max(self.most, sum(each.nbytes() for each in alive))

    def _keep(self, _: nn.Module, inputs: object, output: Tensor) -> None:
        self.references.append(weakref.ref(output.untyped_storage()))  # lives as long as any view of the output


# Saying it.


@dataclass(frozen=True)
class Cause:
    """Why more is held than one microbatch needs: how it is recognised, how it is said, and the fix."""

    holds: Callable[[Usage], bool]
    words: str
    fix: str


INSIDE = "call backward() on each loss before the next forward; it lets go of that microbatch's graph"
NUMBERS = "keep numbers, as loss.item() gives them"
CAUSES = (
    Cause(
        lambda h: h.forwards < h.K and h.first == h.forwards,
        "{Forwards} for {k} microbatches, so that they stand in one graph",
        "a forward and a backward() for each microbatch",
    ),
    Cause(
        lambda h: h.first == h.forwards and h.passes <= 1,
        "{Forwards}, then one backward(), and until then every graph is kept",
        INSIDE,
    ),
    Cause(lambda h: h.first == h.forwards, "{Forwards} come before the first backward()", INSIDE),
    Cause(
        lambda h: h.forwards > h.passes >= h.K and h.peak > 2,
        "{Forwards} and {passes} backward(), and a loss that gets no backward keeps its graph while something holds it",
        f"{NUMBERS}, or run that forward under torch.no_grad()",
    ),
    Cause(
        lambda h: 1 < h.passes < h.forwards,
        "{Forwards} and {passes} backward(), so that several graphs wait for each",
        INSIDE,
    ),
    Cause(
        lambda h: h.peak > 2.5,
        "{Forwards} and {passes} backward(), and yet no graph goes, since retain_graph or create_graph keeps each "
        "and a name, a list or .grad holds them all",
        f"leave retain_graph and create_graph out, and {NUMBERS}",
    ),
    Cause(
        lambda h: h.peak > 1 + SMALL,
        "The graph of one microbatch is still there while the next is built, since retain_graph=True keeps it until "
        "its loss is overwritten",
        "leave retain_graph out",
    ),
    Cause(
        lambda h: h.outputs > SMALL,
        "The graphs go, but the model's outputs stay in a name or a list",
        f"{NUMBERS}; the tensor stays as large when it is detached",
    ),
    Cause(
        lambda h: h.rest > SMALL,
        "When your function returns, a graph is still kept by what it returns, after retain_graph=True",
        "leave retain_graph out, and return a number",
    ),
)


def _cause(usage: Usage) -> str:
    """The first cause that fits, the multiple, and the fix."""
    cause = next((cause for cause in CAUSES if cause.holds(usage)), None)
    most = three(max(usage.peak + usage.outputs, usage.rest))
    at_once = f"{most} times what one microbatch needs, in a window of {usage.K}"
    if cause is None:
        return f"Your loop holds {at_once}."
    forwards = f"{word(usage.forwards)} forward{'s' if usage.forwards > 1 else ''}"
    figures = {"Forwards": forwards.capitalize(), "k": word(usage.K), "passes": word(usage.passes)}
    return f"{cause.words.format_map(figures)}: {at_once}. The fix: {cause.fix}."


# The bytes of a step.

Bytes = Callable[..., float]
STATES = {"SGD": 0, "momentum": 1, "Adam": 2}
COPIES: dict[str, Callable[[int, int], float]] = {  # numbers for each weight, of the state's numbers and K
    "": lambda state, K: 2 + state,
    "the gradients, one number for each weight, are not counted": lambda state, K: 1 + state,
    "the optimizer's state is not counted": lambda state, K: 2,
    "Adam keeps two numbers for each weight, and one was counted": lambda state, K: 2 + min(state, 1),
    "a gradient was counted for each microbatch, and they are added into one": lambda state, K: 1 + K + state,
    "only the weights are counted beside what is kept": lambda state, K: 1,
}
ITEM: dict[str, Callable[[int], int]] = {
    "": lambda itemsize: itemsize,
    "itemsize is missing": lambda itemsize: 1,
    "bits were counted, not bytes": lambda itemsize: 8 * itemsize,
}
KEPT: dict[str, Bytes] = {
    "": lambda kept, b, K, itemsize: kept * b,
    "K microbatches were counted as if all were kept at once, and each backward() lets its own go": (
        lambda kept, b, K, itemsize: kept * b * K
    ),
    "kept is for one sequence, and a microbatch has b of them": lambda kept, b, K, itemsize: kept,
    "what is kept was divided by K": lambda kept, b, K, itemsize: kept * b / K,
    "kept is in bytes already, and was multiplied by itemsize": lambda kept, b, K, itemsize: kept * b * itemsize,
    "what is kept for backward is not counted": lambda kept, b, K, itemsize: 0,
}


def _training_bytes(
    slips: tuple[str, str, str], parameters: int, itemsize: int, optimizer: str, kept: int, b: int, K: int
) -> float:
    copies, item, graph = slips
    return parameters * COPIES[copies](STATES[optimizer], K) * ITEM[item](itemsize) + KEPT[graph](kept, b, K, itemsize)


def _slips() -> dict[str, Bytes]:
    """Every combination of slips, the fewest first; the first is none."""
    tables = sorted(itertools.product(COPIES, ITEM, KEPT), key=lambda slips: sum(map(bool, slips)))
    return {"; ".join(filter(None, slips)): functools.partial(_training_bytes, slips) for slips in tables}


TRAINING_BYTES = Exercise(
    ("parameters", "itemsize", "optimizer", "kept", "microbatch", "accumulation_steps"),
    {
        "SGD": (1000, 4, "SGD", 300, 2, 3),
        "momentum": (770, 2, "momentum", 510, 3, 5),
        "Adam": (10_752, 8, "Adam", 4100, 4, 8),
        "one microbatch": (52, 4, "Adam", 90, 7, 1),
        "many microbatches": (1000, 4, "SGD", 300, 2, 30),
    },
    _slips()[""],
    _slips(),
)


@exercise
def training_bytes(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `training_bytes(parameters, itemsize, optimizer, kept, microbatch, accumulation_steps)`.

    >>> training_bytes(lambda p, size, optimizer, kept, b, K: 2 * p * size + kept * b).sentence.partition(": ")[2]
    "the optimizer's state is not counted."

    Bytes of weights, gradients and optimizer state, each number of `itemsize` bytes, and of what is kept for backward
    at once, where `kept` is in bytes for one sequence. The optimizer is "SGD", "momentum" or "Adam": 0, 1 or 2 numbers
    for each weight. Source: the parts as `labkit.memory.parts` measures them, without Adam's few bytes of step counts.
    """
    return TRAINING_BYTES.judge(function, seconds)
