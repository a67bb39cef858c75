"""How fast a learner's step is, in words: against a reference, in turn, with an interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import SGD

from labkit.corpus import Batch
from labkit.decision import Decision, decide
from labkit.device import quota_threads
from labkit.exercise import sandbox
from labkit.exercise.verdict import Function
from labkit.nets import Transformer, valid_tokens

RUNS, MARGIN = 7, 0.03


@quota_threads(1)
def scored(reference: Function, function: Function, pair: Batch, seconds: float = 5.0) -> str:
    """The score in words, from runs of the reference and of the function in turn, float32 on one thread of the CPU.

    >>> from labkit.corpus import batch
    >>> scored(lambda *_: None, lambda *_: None, batch(0))[:6]
    'Score:'

    Both are called with (model, optimizer, tokens, labels), each with a model of its own. `seconds`: for one call.
    """
    times: tuple[list[float], list[float]] = ([], [])
    trainees = [_clock(each, pair[0].shape[1]) for each in (reference, function)]
    for run in range(RUNS + 1):
        for step, own in zip(trainees, times, strict=True):
            value = sandbox.run(step, *(each.clone() for each in pair), seconds=seconds).value
            if not isinstance(value, float):
                return "It could not be timed in float32."
            if run:  # the first warms up
                own.append(value)
    valid = valid_tokens(pair[1])
    before, after = ([valid / each for each in own] for own in times)
    return score(before, after)


def _clock(function: Function, length: int) -> Callable[[Tensor, Tensor], float]:
    """Seconds of a step of a float32 model of its own, at the optimizer boundary."""
    model = Transformer(seed=0, length=length + 1)
    optimizer = SGD(model.parameters(), lr=1e-4)

    def run(tokens: Tensor, labels: Tensor) -> float:
        start = time.perf_counter()
        function(model, optimizer, tokens, labels)
        return time.perf_counter() - start

    return run


def score(before: Sequence[float], after: Sequence[float], margin: float = MARGIN) -> str:
    """How the valid tokens/s of a step compare to those of the reference, in words.

    >>> score([100, 101, 99], [300, 310, 290])
    'Score: faster, 3 times the valid tokens/s of one row at a time (90 % interval 2.87 … 3.13).'
    >>> score([300, 310, 290], [100, 101, 99]).split(",")[0], score([100] * 3, [101] * 3).split(",")[0]
    ('Score: slower', 'Score: as fast')
    """
    decision, reverse = decide(before, after, margin), decide(after, before, margin)
    name = f"{_name(decision, reverse)}, {decision.ratio:.3g} times the valid tokens/s of one row at a time"
    return f"Score: {name} (90 % interval {decision.low:.3g} … {decision.high:.3g})."


def _name(decision: Decision, reverse: Decision) -> str:
    if decision.verdict == "faster":
        return "faster"
    if reverse.verdict == "faster":
        return "slower"
    return "as fast" if decision.verdict == reverse.verdict == "not faster" else "cannot tell"
