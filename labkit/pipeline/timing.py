"""Time in a pipeline: the order in which ranks work and the bubble it leaves, modelled and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from labkit import workers
from labkit.declare import Range, quantity
from labkit.device import Spread
from labkit.errors import LabError
from labkit.pipeline.stages import Microbatches, Ranks, Schedule, accepts, admit, chunks

Action = tuple[str, int, int]  # forward or backward, stage, microbatch
Milliseconds = Annotated[float, Range(2, 40, log=True, unit="ms", help="forward of one microbatch on one rank")]
REPEATS = 3


def bubble(stages: int, microbatches: int) -> float:
    """The share of time that a rank waits while the pipeline fills and drains: (P − 1) / (M + P − 1).

    >>> bubble(2, 4), bubble(4, 4)
    (0.2, 0.42857142857142855)

    For GPipe and 1F1B alike, stages of equal time, messages that take none. Raises LabError for less than one stage or
    microbatch. Source: Huang et al. 2019 (GPipe), section 2.
    """
    for name, count in (("stages", stages), ("microbatches", microbatches)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise LabError(f"{name} = {count!r} is no whole number from 1 on: try 1")
    return (stages - 1) / (microbatches + stages - 1)


# The order of the work, as the papers have it. P ranks, M microbatches, stage s is held by rank s % P.


def order(schedule: str, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The actions of a rank, in order.

    >>> order("1F1B", 1, 2, 2)
    [('forward', 1, 0), ('backward', 1, 0), ('forward', 1, 1), ('backward', 1, 1)]

    GPipe: all forwards, then all backwards. 1F1B: as many forwards as stages are left, then in turn. Interleaved: the
    same over two stages a rank, in rounds of P microbatches; source: Narayanan et al. 2021, section 2.2.
    """
    V, M, P = chunks(schedule), microbatches, ranks
    round_ = M // max(1, M // P) if V > 1 else M
    turns = [(turn // round_ % V, turn % round_ + turn // (round_ * V) * round_) for turn in range(V * M)]
    forwards = [("forward", part * P + rank, m) for part, m in turns]
    backwards = [("backward", (V - 1 - part) * P + rank, m) for part, m in turns]
    ahead = {"GPipe": M, "1F1B": P - rank, "Interleaved": 2 * (P - 1 - rank) + (V - 1) * round_ + 1}[schedule]
    return interleave(forwards, backwards, min(ahead, V * M))


def interleave(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a backward and a forward in turn, then the backwards that are left.

    >>> interleave([("forward", 0, 0)], [("backward", 0, 0)], 1)
    [('forward', 0, 0), ('backward', 0, 0)]
    """
    pairs = zip(backwards, forwards[ahead:], strict=False)
    return [*forwards[:ahead], *(each for pair in pairs for each in pair), *backwards[len(forwards) - ahead :]]


@dataclass(frozen=True)
class Work:
    """One pass of one microbatch through one stage."""

    kind: str = quantity("forward or backward")
    rank: int = quantity("which rank")
    stage: int = quantity("which stage")
    microbatch: int = quantity("which microbatch")
    begin: float = quantity("from the start of the step", "ms")
    end: float = quantity("from the start of the step", "ms")


def simulate(orders: Sequence[list[Action]], forward: float, backward: float) -> list[Work]:
    """Every action, as soon as its rank is free and its input is there, modelled.

    >>> simulate([[("forward", 0, 0), ("backward", 0, 0)]], 1.0, 2.0)[1].end
    3.0

    A forward needs the stage before, a backward the stage after it; a message takes no time. Raises LabError for orders
    that never end.
    """
    last = max(stage for actions in orders for _, stage, _ in actions)
    cost, free, ends = {"forward": forward, "backward": backward}, [0.0] * len(orders), dict[Action, float]()
    todo, works = [list(actions) for actions in orders], list[Work]()
    while any(todo):
        before = len(works)
        for rank, actions in enumerate(todo):
            while actions and (ready := _ready(actions[0], last, ends)) is not None:
                action = actions.pop(0)
                begin = max(free[rank], ready)
                free[rank] = ends[action] = begin + cost[action[0]]
                works.append(Work(action[0], rank, action[1], action[2], begin, free[rank]))
        if len(works) == before:
            raise LabError("orders in which all ranks wait for each other: try those of one schedule")
    return works


def _ready(action: Action, last: int, ends: dict[Action, float]) -> float | None:
    """When the input of an action is there, None while it has not been made."""
    kind, stage, m = action
    if kind == "forward":
        return 0.0 if stage == 0 else ends.get(("forward", stage - 1, m))
    return ends.get(("forward", stage, m) if stage == last else ("backward", stage + 1, m))


def idle(works: Sequence[Work], ranks: int) -> float:
    """The share of the ranks' time, from the first begin to the last end, in which they do nothing.

    >>> idle([Work("forward", 0, 0, 0, 0.0, 1.0), Work("forward", 1, 1, 0, 1.0, 2.0)], 2)
    0.5
    """
    whole = max(work.end for work in works) - min(work.begin for work in works)
    return 1 - sum(work.end - work.begin for work in works) / (ranks * whole)


# One step, modelled and measured.


@dataclass(frozen=True)
class Timelines:
    """One step of a pipeline in time, modelled, and measured with stages that sleep."""

    schedule: str = quantity("the order in which a rank works")
    ranks: int = quantity("P, processes", "ranks")
    microbatches: int = quantity("M, parts of the batch", "microbatches")
    modelled: tuple[Work, ...] = quantity("what happens when, modelled")
    measured: tuple[Work, ...] = quantity("what happened when, measured")
    bubble: float = quantity("share of the ranks' time that they wait, modelled")
    measured_bubble: float = quantity("the same, measured")
    total: float = quantity("the whole step, modelled", "ms")
    measured_total: float = quantity("the same, measured", "ms")
    kept: tuple[int, ...] = quantity("most inputs that the stages of a rank kept for backward at once, counted")
    predicted_kept: tuple[int, ...] = quantity("the same by the order of its work")


def timeline(
    *,
    schedule: Schedule = "GPipe",
    ranks: Ranks = 2,
    microbatches: Microbatches = 4,
    forward: Milliseconds = 10.0,
    backward: Annotated[float, Range(1, 3, step=0.25, unit="× forward", help="a backward pass takes so long")] = 2.0,
) -> Timelines:
    """One step of a pipeline in time: its bars by the model, and those of real processes whose stages sleep.

    >>> step = timeline(microbatches=2, forward=2)
    >>> round(step.bubble, 9) == round(bubble(2, 2), 9), step.kept
    (True, (2, 2))

    Begin and end are taken by a clock that is common to the processes of one machine. Raises LabError for a number of
    microbatches that the schedule does not take.
    """
    admit(schedule, ranks, microbatches)
    orders = [order(schedule, rank, ranks, microbatches) for rank in range(ranks)]
    V, times = chunks(schedule), (forward, backward * forward)
    modelled = simulate(orders, *(time / V for time in times))
    reports = sleeping(schedule, ranks, microbatches, *times)
    measured = list(works(reports))
    return Timelines(
        schedule=schedule,
        ranks=ranks,
        microbatches=microbatches,
        modelled=tuple(modelled),
        measured=tuple(measured),
        bubble=idle(modelled, ranks),
        measured_bubble=idle(measured, ranks),
        total=max(work.end for work in modelled),
        measured_total=max(work.end for work in measured),
        kept=tuple(sum(most for most, _ in parts) for parts in reports),
        predicted_kept=tuple(kept(actions) for actions in orders),
    )


def sleeping(schedule: str, ranks: int, microbatches: int, forward: float, backward: float) -> list[Any]:
    """A real step whose stages sleep so many ms: for every rank, the record of each of its stages."""
    return workers.run(
        "labkit.pipeline.simulated_stages:run_sleepers",
        ranks,
        schedule=schedule,
        microbatches=microbatches,
        forward=forward / 1e3,
        backward=backward / 1e3,
    )


def works(reports: Sequence[Sequence[Any]]) -> Iterator[Work]:
    """The records of all stages on all ranks, in ms from the first begin."""
    start = min(begin for parts in reports for _, times in parts for _, begin, _ in times)
    for rank, parts in enumerate(reports):
        for at, (_, times) in enumerate(parts):
            for m, (kind, begin, end) in numbered(times):
                yield Work(kind, rank, at * len(reports) + rank, m, 1e3 * (begin - start), 1e3 * (end - start))


def numbered(times: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Each pass of a stage with its microbatch: they come in order, forward and backward separately.

    >>> [m for m, _ in numbered([("forward", 0, 1), ("forward", 1, 2), ("backward", 2, 3)])]
    [0, 1, 0]
    """
    count = {"forward": 0, "backward": 0}
    for each in times:
        yield count[each[0]], each
        count[each[0]] += 1


def kept(actions: Sequence[Action]) -> int:
    """Most microbatches at once whose forward is done and whose backward is not, stage by stage.

    >>> kept(order("GPipe", 0, 2, 8)), kept(order("1F1B", 0, 2, 8)), kept(order("1F1B", 1, 2, 8))
    (8, 2, 1)
    """
    total = 0
    for stage in {stage for _, stage, _ in actions}:
        now = most = 0
        for kind, at, _ in actions:
            now += (at == stage) * (1 if kind == "forward" else -1)
            most = max(most, now)
        total += most
    return total


# The bubble against M.


@dataclass(frozen=True)
class Bubbles:
    """The bubble over the number of microbatches."""

    schedule: str = quantity("the order in which a rank works")
    ranks: int = quantity("P, processes", "ranks")
    forward: float = quantity("what a rank sleeps for a microbatch, and as long backward", "ms")
    sizes: tuple[int, ...] = quantity("M, all that are measured", "microbatches")
    modelled: tuple[float, ...] = quantity("share of the ranks' time that they wait, modelled")
    measured: tuple[Spread, ...] = quantity("the same, measured, over three steps")
    kept: tuple[int, ...] = quantity("most inputs that the first rank's stages kept at once, counted")
    progress: float = quantity("share of the steps that are done")


def bubbles(
    *,
    schedule: Schedule = "GPipe",
    ranks: Ranks = 2,
    largest: Annotated[int, Range(4, 16, log=True, unit="microbatches", help="largest M of the sweep")] = 16,
    forward: Annotated[float, Range(2, 20, log=True, unit="ms", help="what a rank sleeps for a microbatch")] = 10.0,
) -> Iterator[Bubbles]:
    """The bubble for M = 1, 2, 4, …: the model, and real processes whose stages sleep, three steps each.

    >>> [round(share, 3) for share in next(bubbles()).modelled]
    [0.5, 0.333, 0.2, 0.111, 0.059]

    A backward pass sleeps as long as a forward. Numbers of microbatches that a schedule does not take are left out.
    """
    candidates = sorted({largest, *(2**k for k in range(largest.bit_length()))})
    sizes = [M for M in candidates if accepts(schedule, ranks, M)]
    model = tuple(modelled_bubble(schedule, ranks, M) for M in sizes)
    setting, spreads, most = (schedule, ranks, forward, tuple(sizes), model), list[Spread](), list[int]()
    yield Bubbles(*setting, measured=(), kept=(), progress=0.0)
    for at, M in enumerate(sizes):
        shares: list[float] = []
        for repeat in range(REPEATS):
            reports = sleeping(schedule, ranks, M, forward, forward)
            shares.append(idle(list(works(reports)), ranks))
            most[at:], spreads[at:] = [sum(count for count, _ in reports[0])], [Spread.of(shares)]
            share = (at + (repeat + 1) / REPEATS) / len(sizes)
            yield Bubbles(*setting, measured=tuple(spreads), kept=tuple(most), progress=share)


def modelled_bubble(schedule: str, ranks: int, microbatches: int) -> float:
    """The bubble of a schedule whose backward passes take as long as the forward ones.

    >>> round(modelled_bubble("GPipe", 4, 4), 9) == round(bubble(4, 4), 9)
    True
    """
    orders = [order(schedule, rank, ranks, microbatches) for rank in range(ranks)]
    return idle(simulate(orders, 1.0, 1.0), ranks)
