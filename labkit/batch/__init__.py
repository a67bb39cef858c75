"""Batch quantities: what a plan consumes, the plan that a batch asks for, two plans, a step in time, and progress.

All of it is modelled: arithmetic on a plan, before anything runs. What a plan is stands in `labkit.batch.plans`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from labkit.batch.plans import Plan as Plan
from labkit.batch.plans import plan as plan
from labkit.batch.step_timeline import Steps
from labkit.batch.step_timeline import timeline as timeline
from labkit.declare import Range, quantity

Microbatch = Annotated[int, Range(1, 64, log=True, unit="sequences", help="b, one forward pass of one replica")]
Replicas = Annotated[int, Range(1, 1024, log=True, unit="replicas", help="D, each with sequences of its own")]
Length = Annotated[int, Range(128, 131072, log=True, unit="tokens", help="S, tokens of one sequence")]
Dataset = Annotated[int, Range(1, 10**6, log=True, unit="sequences", help="sequences of one epoch")]


@dataclass(frozen=True)
class Planned:
    """A plan, and what it means for an epoch."""

    plan: Plan = quantity("microbatch, replicas, accumulation steps")
    devices: int = quantity("tp × pp × cp, the devices that make one replica", "devices")
    replicas: int = quantity("D = world / (tp × pp × cp)")
    global_batch: int = quantity("b × D × K", "sequences")
    tokens_per_microbatch: int = quantity("S × b, what one replica holds at a time", "tokens")
    tokens_per_update: int = quantity("S × b × D × K", "tokens")
    updates: int = quantity("full optimizer steps of one epoch")
    left: int = quantity("what fills no optimizer step", "sequences")


def planner(
    *,
    microbatch: Microbatch = 8,
    accumulation_steps: Steps = 4,
    world: Annotated[int, Range(1, 4096, log=True, unit="devices", help="all devices together")] = 64,
    tp: Annotated[int, Range(1, 8, log=True, help="tensor-parallel ranks of one replica")] = 4,
    pp: Annotated[int, Range(1, 16, log=True, help="pipeline-parallel ranks of one replica")] = 2,
    cp: Annotated[int, Range(1, 8, log=True, help="context-parallel ranks of one replica")] = 1,
    sequence_length: Length = 4096,
    sequences: Dataset = 25_600,
) -> Planned:
    """What one optimizer step consumes, and how many of them an epoch holds.

    >>> result = planner()
    >>> result.replicas, result.global_batch, result.updates
    (8, 256, 100)

    Raises LabError for a world that tp × pp × cp does not divide. Source: as `plan`.
    """
    step_plan = plan(
        microbatch=microbatch,
        accumulation=accumulation_steps,
        sequence_length=sequence_length,
        world=world,
        tp=tp,
        pp=pp,
        cp=cp,
    )
    return Planned(
        plan=step_plan,
        devices=tp * pp * cp,
        replicas=step_plan.replicas,
        global_batch=step_plan.global_batch,
        tokens_per_microbatch=sequence_length * microbatch,
        tokens_per_update=step_plan.tokens_per_update,
        updates=step_plan.updates(sequences),
        left=step_plan.left(sequences),
    )


@dataclass(frozen=True)
class Way:
    """One way to cut a batch."""

    microbatch: int = quantity("b", "sequences")
    accumulation: int = quantity("K", "microbatches")
    tokens: int = quantity("S × b × D × K", "tokens")
    off: int = quantity("more or fewer than wanted; 0 is exact", "tokens")


@dataclass(frozen=True)
class Wanted:
    """The ways to cut a wanted batch into microbatches that fit."""

    tokens: int = quantity("wanted for one optimizer step", "tokens")
    smallest: int = quantity("S × D: one sequence on every replica, the finest the batch can be cut", "tokens")
    replicas: int = quantity("D")
    ways: tuple[Way, ...] = quantity("for every b that fits, the K just below and just above, or the exact one")

    @property
    def exact(self) -> tuple[Way, ...]:
        """The ways that give exactly what is wanted, the fewest microbatches first."""
        return tuple(sorted((way for way in self.ways if not way.off), key=lambda way: way.accumulation))

    @property
    def best(self) -> Way:
        """The nearest way; of those equally near the one with the fewest microbatches."""
        return min(self.ways, key=lambda way: (abs(way.off), way.accumulation))

    @property
    def below(self) -> Way | None:
        """Where none is exact: the nearest with fewer tokens; None where one sequence a replica is more already."""
        fewer = [way for way in self.ways if way.off < 0]
        return max(fewer, key=lambda way: (way.off, -way.accumulation), default=None)

    @property
    def above(self) -> Way | None:
        """Where none is exact: the nearest with more tokens."""
        more = [way for way in self.ways if way.off > 0]
        return min(more, key=lambda way: (way.off, way.accumulation), default=None)


def cuts(*, tokens: int, largest_microbatch: int, replicas: int, sequence_length: int) -> Wanted:
    """The ways to cut a batch of so many tokens, one for each K next to it, for every microbatch that fits.

    >>> cuts(tokens=16_777_216, largest_microbatch=6, replicas=128, sequence_length=4096).best
    Way(microbatch=4, accumulation=8, tokens=16777216, off=0)
    """
    ways = []
    for b in range(1, largest_microbatch + 1):
        each = sequence_length * b * replicas  # tokens that one more accumulation step adds
        below, above = tokens // each, -(-tokens // each)
        ways += [Way(b, K, K * each, K * each - tokens) for K in sorted({below, above}) if K]
    return Wanted(tokens, sequence_length * replicas, replicas, tuple(ways))


def wanted(
    *,
    ki_tokens: Annotated[
        int, Range(1, 2**20, log=True, unit="× 1024 tokens", help="wanted for one optimizer step")
    ] = 16_384,
    largest_microbatch: Annotated[
        int, Range(1, 64, log=True, unit="sequences", help="what the memory of one replica holds")
    ] = 6,
    replicas: Replicas = 128,
    sequence_length: Length = 4096,
) -> Wanted:
    """The reverse question: a batch is wanted, memory limits the microbatch; which b and K are possible?

    >>> ways = wanted()
    >>> ways.tokens, ways.best.microbatch, ways.best.accumulation
    (16777216, 4, 8)

    A batch can be cut exactly where it is a multiple of S × D tokens, at worst with b = 1. Source: as `plan`.
    """
    return cuts(
        tokens=1024 * ki_tokens,
        largest_microbatch=largest_microbatch,
        replicas=replicas,
        sequence_length=sequence_length,
    )


@dataclass(frozen=True)
class Row:
    """One quantity of two plans."""

    name: str = quantity("what is counted")
    unit: str = quantity("its unit")
    a: float = quantity("plan A")
    b: float = quantity("plan B")

    @property
    def same(self) -> bool:
        """Whether both plans agree."""
        return self.a == self.b


@dataclass(frozen=True)
class TwoPlans:
    """Two plans beside each other."""

    a: Plan = quantity("plan A: microbatch, replicas, accumulation steps")
    b: Plan = quantity("plan B: microbatch, replicas, accumulation steps")
    rows: tuple[Row, ...] = quantity("what stays the same, and what changes")

    @property
    def changed(self) -> tuple[str, ...]:
        """What the comparison varies: of global batch, microbatch and replicas those that differ."""
        names = ("global_batch", "microbatch", "replicas")
        return tuple(name.replace("_", " ") for name in names if getattr(self.a, name) != getattr(self.b, name))


def two_plans(
    *,
    microbatch_a: Microbatch = 8,
    replicas_a: Replicas = 8,
    accumulation_a: Steps = 4,
    microbatch_b: Microbatch = 4,
    replicas_b: Replicas = 8,
    accumulation_b: Steps = 8,
    sequences: Dataset = 25_600,
    warmup: Annotated[int, Range(1, 10**5, log=True, unit="optimizer steps", help="the same for both plans")] = 100,
) -> TwoPlans:
    """Two plans: what stays the same, what changes, and whether comparing them varies two things at once.

    >>> two_plans().changed, two_plans(accumulation_b=1).changed
    (('microbatch',), ('global batch', 'microbatch'))

    Sequences of 4096 tokens. Gradients are synchronised once for an update. Activation memory is taken as
    proportional to the microbatch, in units of one sequence.
    """
    plans = (
        plan(microbatch=microbatch_a, replicas=replicas_a, accumulation=accumulation_a),
        plan(microbatch=microbatch_b, replicas=replicas_b, accumulation=accumulation_b),
    )
    a, b = (_counted(each, sequences, warmup) for each in plans)
    return TwoPlans(*plans, tuple(Row(name, unit, a[name, unit], b[name, unit]) for name, unit in a))


def _counted(plan: Plan, sequences: int, warmup: int) -> dict[tuple[str, str], float]:
    return {
        ("global batch", "sequences"): plan.global_batch,
        ("tokens per update", "tokens"): plan.tokens_per_update,
        ("updates per epoch", "updates"): plan.updates(sequences),
        ("sequences in warmup", "sequences"): plan.samples_after(warmup),
        ("syncs per update", "synchronisations"): 1,
        ("syncs per 1000 sequences", "synchronisations"): 1000 / plan.global_batch,
        ("passes per update", "forward and backward passes of a replica"): plan.accumulation,
        ("activation memory", "sequences held at a time"): plan.microbatch,
    }


@dataclass(frozen=True)
class Reading:
    """What a number on a counter means."""

    counted: str = quantity("what the counter counts")
    steps: int = quantity("optimizer steps made")
    iterations: int = quantity("taken from the dataloader by every replica", "microbatches")
    samples: int = quantity("seen by all replicas, repetitions included", "sequences")
    positions: int = quantity("token positions, padding included", "tokens")
    valid: float = quantity("valid tokens", "tokens")


@dataclass(frozen=True)
class Progress:
    """The same number, read in two ways."""

    counter: int = quantity("the number on the screen")
    plan: Plan = quantity("microbatch, replicas, accumulation steps")
    tokens_per_update: int = quantity("S × b × D × K", "tokens")
    right: Reading = quantity("the number counts optimizer steps")
    wrong: Reading = quantity("the number counts dataloader iterations")


def progress(
    *,
    counter: Annotated[int, Range(1, 10**6, log=True, help="the number on the screen")] = 83_421,
    microbatch: Microbatch = 8,
    replicas: Replicas = 64,
    accumulation_steps: Steps = 4,
    sequence_length: Length = 4096,
    padding: Annotated[float, Range(0, 0.95, step=0.05, help="share of positions without a valid token")] = 0.0,
) -> Progress:
    """How far a training is: a counter as samples and valid tokens, if it counts optimizer steps and if it does not.

    >>> reading = progress()
    >>> reading.tokens_per_update, reading.right.positions
    (8388608, 699786067968)

    Valid tokens are positions × (1 − padding), an average: where lengths vary, count them.
    """
    step_plan = plan(
        microbatch=microbatch, replicas=replicas, accumulation=accumulation_steps, sequence_length=sequence_length
    )
    K = accumulation_steps
    right = _reading("optimizer steps", counter, counter * K, step_plan, padding)
    wrong = _reading("dataloader iterations", counter // K, counter, step_plan, padding)
    return Progress(counter, step_plan, step_plan.tokens_per_update, right, wrong)


def _reading(counted: str, steps: int, iterations: int, plan: Plan, padding: float) -> Reading:
    samples = iterations * plan.microbatch * plan.replicas
    positions = samples * plan.sequence_length
    return Reading(counted, steps, iterations, samples, positions, positions * (1 - padding))
