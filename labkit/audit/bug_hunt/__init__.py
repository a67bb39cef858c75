"""The bug hunt: a training step with a hidden fault, and the measurements that reveal it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn
from torch.nn.utils.convert_parameters import parameters_to_vector

from labkit.audit import Report, audit, probe
from labkit.audit.bug_hunt.hidden import EACH, STRUCTURES, VOCABULARY, WORDS, Microbatches, Trainer
from labkit.audit.bug_hunt.suspects import loss_sum
from labkit.corpus import Batch, Window, window
from labkit.declare import Choice, Range, Switch, quantity

POINTS = 10
NOT_YET = "not yet"
NAMES = (
    "weights × N",
    "relative error",
    "optimizer steps",
    "schedule steps",
    "Adam's count",
    "clips",
    "second run",
    "one forward",
)


# What can be measured.


@dataclass(frozen=True)
class Measurement:
    """One measurement of a step."""

    name: str = quantity("what is measured")
    values: tuple[float, ...] = quantity("its values")
    right: float = quantity("what a correct step has")

    @property
    def off(self) -> bool:
        """Whether the three digits that are shown are not those of a correct step."""
        return any(abs(value - self.right) > 5e-4 for value in self.values)


@dataclass(frozen=True)
class Case:
    """A step, all that can be measured of it, and its fault."""

    word: str
    structure: str
    window: Window
    measurements: list[Measurement]
    report: Report


@dataclass(frozen=True)
class Hunt:
    """What was measured, and what the guess is worth."""

    case: int = quantity("which step")
    counts: tuple[int, ...] = quantity("valid tokens of each microbatch", "tokens")
    positions: int = quantity("targets of the window with the padding", "tokens")
    labelled: int = quantity("labels of the window before the shift", "tokens")
    measurements: tuple[Measurement, ...] = quantity("the measurements that were made")
    guess: str = quantity("the word that was guessed")
    verdict: str = quantity("the audit's word, once there is a guess")
    explanation: str = quantity("what the audit says, once there is a guess")
    points: int = quantity("10 less one for each measurement; 0 where the guess is wrong")


@functools.lru_cache(maxsize=4)  # each switch of a case asks again
def case(number: int) -> Case:
    """The step of that number: its word, how it is written, and everything measured of it.

    >>> case(3).word == case(3).report.verdict
    True
    """
    generator = torch.Generator().manual_seed(number)
    word = WORDS[_random_int(generator, len(WORDS))]
    structures = ("loop",) if word in EACH else tuple(STRUCTURES)
    structure = structures[_random_int(generator, len(structures))]
    microbatches = telling_microbatches(generator, number)
    with warnings.catch_warnings(action="ignore"):  # torch warns of schedules that step early
        report, measurements = _measure(functools.partial(Trainer, word, structure, number), microbatches)
    return Case(word, structure, window(microbatches), measurements, report)


def telling_microbatches(generator: torch.Generator, seed: int) -> list[Batch]:
    """Three to five microbatches, padded, of unequal counts.

    >>> from labkit.nets import valid_tokens
    >>> [valid_tokens(labels) for _, labels in telling_microbatches(torch.Generator().manual_seed(0), 0)]
    [3, 8, 13, 19, 24]
    """
    K, length = 3 + _random_int(generator, 3), 14 + _random_int(generator, 10)
    return probe(VOCABULARY, accumulation=K, length=length, seed=seed)


def _random_int(generator: torch.Generator, below: int) -> int:
    return int(torch.randint(below, (), generator=generator))


def _measure(make: Callable[[], Trainer], microbatches: Microbatches) -> tuple[Report, list[Measurement]]:
    def build() -> tuple[nn.Module, Callable[[Microbatches], None]]:
        trainer = make()
        return trainer.model, trainer.step

    report = audit(build, microbatches, loss_sum, concat=joined)
    count, differs = adam_count_and_rerun(make, microbatches)
    values = (
        report.token_weights,
        (report.relative_error,),
        (report.optimizer_steps,),
        (report.schedule_steps,),
        (count,),
        (report.clips,),
        (differs,),
        (one_forward_distance(make().model, microbatches),),
    )
    right = (1, 0, 1, 1, 1, 1, 0, 0)
    return report, [Measurement(*each) for each in zip(NAMES, values, right, strict=True)]


def joined(microbatches: Microbatches) -> Batch:
    """All microbatches as one.

    >>> joined([(torch.zeros(2, 3), torch.ones(2, 3))] * 2)[0].shape
    torch.Size([4, 3])
    """
    tokens, labels = zip(*microbatches, strict=True)
    return torch.cat(tokens), torch.cat(labels)


def adam_count_and_rerun(make: Callable[[], Trainer], microbatches: Microbatches) -> tuple[float, float]:
    """Adam's count after one update, and how much that update changes with other random numbers, ‖Δ′ − Δ‖ / ‖Δ‖."""
    updates = []
    for seed in range(2):
        trainer = make()
        before = parameters_to_vector(trainer.model.parameters()).detach()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            trainer.step(microbatches)
        updates.append(parameters_to_vector(trainer.model.parameters()).detach() - before)
    count = max(float(state["step"]) for state in trainer.optimizer.state.values())
    return count, float((updates[1] - updates[0]).norm() / updates[0].norm())


def one_forward_distance(model: nn.Module, microbatches: Microbatches) -> float:
    """How far the gradient of one forward of all is from the sum of the microbatches', ‖g − G‖ / ‖G‖."""
    gradients = []
    for batches in ([joined(microbatches)], microbatches):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loss = torch.stack([loss_sum(model, each)[0] for each in batches]).sum()
        gradients.append(parameters_to_vector(torch.autograd.grad(loss, list(model.parameters()))))
    return float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


def hunt(
    *,
    case_number: Annotated[int, Range(0, 9999, help="which step: each has one fault, or none")] = 7,
    weights: Annotated[bool, Switch(help="weight × N of each microbatch, for one point")] = False,
    relative_error: Annotated[bool, Switch(help="how far the gradient is off, for one point")] = False,
    optimizer_steps: Annotated[bool, Switch(help="optimizer steps in the window, for one point")] = False,
    schedule_steps: Annotated[bool, Switch(help="steps of the schedule, for one point")] = False,
    adam_count: Annotated[bool, Switch(help="how far Adam's own count moved, for one point")] = False,
    clips: Annotated[bool, Switch(help="calls of the clip, for one point")] = False,
    second_run: Annotated[bool, Switch(help="a run with other random numbers, for one point")] = False,
    one_forward: Annotated[bool, Switch(help="all microbatches in one forward, for one point")] = False,
    guess: Annotated[str, Choice((NOT_YET, *WORDS), help="what is wrong: ends the hunt")] = NOT_YET,
) -> Hunt:
    """A hidden step: measure as little as you need, then name its fault.

    >>> result = hunt(weights=True)
    >>> result.points, result.verdict
    (9, '')
    """
    switches = (weights, relative_error, optimizer_steps, schedule_steps, adam_count, clips, second_run, one_forward)
    hidden = case(case_number)
    measurements = tuple(each for each, on in zip(hidden.measurements, switches, strict=True) if on)
    over = guess != NOT_YET
    left = POINTS - len(measurements)
    return Hunt(
        case_number,
        counts=tuple(map(int, hidden.window.counts)),
        positions=hidden.window.positions,
        labelled=hidden.window.labelled,
        measurements=measurements,
        guess=guess,
        verdict=hidden.report.verdict if over else "",
        explanation=hidden.report.explain() if over else "",
        points=left if guess in (NOT_YET, hidden.report.verdict) else 0,
    )
