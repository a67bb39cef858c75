"""A step that runs on several ranks: what the microbatches of every rank weigh in the gradient that each rank has."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit import workers
from labkit.audit.cadence import cadence, counted, layers, second_run, steps
from labkit.audit.candidate_rules import Named, named
from labkit.audit.clips import reached
from labkit.audit.judge import HIDING
from labkit.audit.judge import ORDER as ALONE
from labkit.audit.measurements import Fault, Judged, Seen, near, solve
from labkit.audit.references import Model64, References, Rounded
from labkit.audit.report import Report
from labkit.audit.rounding import rounding
from labkit.audit.runs import again, built, tried, watched
from labkit.audit.watch import Watch
from labkit.audit.window import Sampled, Window
from labkit.data_parallel import rank_losses
from labkit.declare import Range
from labkit.errors import LabError
from labkit.wording import percent, three

ACROSS = ("overflow-disagreement", "reduction-bypassed", "rank-means", "missing-world-factor", "extra-world-factor")
ORDER = (*ALONE[:2], *ACROSS, *ALONE[2:])  # the weightiest first


def ranks(build: str, ranks: int = 2, *, windows: int = 1, timeout: float = 120) -> Report:
    """Run a step on real ranks, unchanged, and say what every rank's microbatches weigh in it and what is wrong.

    >>> ranks("labkit.data_parallel.steps:build", 2).verdict
    'token-mean'

    build: "package.module:build" of a function that gives a fresh model and step on the rank that calls it, wrapped in
    DistributedDataParallel as always; the process group is there. Its module also has `loss_sum` as for `audit`, and
    `microbatches`, one list for all ranks: it is dealt out in order, the first part to rank 0.
    `windows` as for `audit`. The weights are those in the first rank's gradient. Raises LabError where a rank raises or
    hangs.
    """
    count = int(Range(1, 100).check("windows", windows, int))
    found: list[Report] = workers.run(
        "labkit.audit.across_ranks:run_audit", ranks, timeout=timeout, build=build, windows=count
    )
    return found[0]


def dealt(microbatches: Sequence[Any], world: int) -> list[list[Any]]:
    """Microbatches in order, to every rank its part; LabError where one would have none.

    >>> dealt([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    if len(microbatches) < world:
        raise LabError(f"{len(microbatches)} microbatches for {world} ranks: try {2 * world}")
    size, more = divmod(len(microbatches), world)
    edges = [rank * size + min(rank, more) for rank in range(world + 1)]
    return [list(microbatches[low:high]) for low, high in itertools.pairwise(edges)]


@dataclass(frozen=True, eq=False)
class Told:
    """What a rank tells all others."""

    gradients: Tensor
    counts: Tensor
    losses: Tensor
    passes: list[Tensor]  # of every window, what each backward brought, before any reduction
    skipped: int


def run_audit(rank: int, world: int, *, build: str, windows: int) -> Report:
    """The audit on one rank: it runs and watches the step here, and judges it by what all ranks tell."""
    module = importlib.import_module(build.partition(":")[0])
    own = dealt(module.microbatches, world)
    local = _watched(getattr(module, build.partition(":")[2]), module.loss_sum, own[rank], windows)
    told = _exchanged(_told(local))
    everywhere = _everywhere(local, told, [each for part in own for each in part])
    owner = tuple(at for at, each in enumerate(told) for _ in each.counts)
    judged = _judged(everywhere, rank_losses.ranked([[int(n) for n in each.counts] for each in told], rank))
    gradients = _exchanged(judged.gradient)
    apart = max(float((each - gradients[0]).norm()) for each in gradients) / float(judged.right.norm())
    faults = _faults(local, judged, [each.skipped for each in told], apart, owner, rank)
    return _report(local, everywhere, judged, faults)


def _watched(build: Any, loss_sum: Any, own: list[Any], windows: int) -> Seen:
    """What the step does here."""

    def bare() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model, step = built(build)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inside: nn.Module = model.module
            return inside, step
        return model, step

    model, step = bare()
    sampled = Sampled(model)
    seen, states = watched(Watch(model, sampled), model, step, own, windows)
    twin = Model64(model, sampled, loss_sum)
    found = [twin.at(state).references(own) for state in states]

    def trial(autocast: torch.dtype | None) -> References:
        return Rounded(model, sampled, loss_sum, autocast).at(states[0]).references(own)

    second = again(bare, sampled, own)
    fewer = tried(bare, sampled, own[:-1], windows) if _all(len(own) > 1) else None
    owner = torch.arange(len(own))
    explained = rounding(model, seen, found[0], trial)
    return Seen(seen, found, found[0], None, owner, own, "token-mean", explained, second, None, lambda: fewer)


def _all(yes: bool) -> bool:
    """Whether it holds on every rank."""
    return all(_exchanged(yes))


def _exchanged(mine: Any) -> list[Any]:
    """What every rank has, rank by rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _told(local: Seen) -> Told:
    found, windows = local.references, local.windows
    rows = torch.stack([each.gradients for each in found])
    passes = [torch.stack([p.gradient for p in each.passes]) if each.passes else torch.zeros(0) for each in windows]
    return Told(rows, found[0].counts, found[0].losses, passes, sum(each.skipped for each in windows))


def _everywhere(local: Seen, told: list[Told], microbatches: list[Any]) -> Seen:
    """The same as if one process had done it: the microbatches of all ranks, and passes averaged over the ranks."""
    counts, losses = (torch.cat([getattr(each, name) for each in told]) for name in ("counts", "losses"))
    found, windows = [], []
    for at, window in enumerate(local.windows):
        found.append(References(torch.cat([each.gradients[at] for each in told]), counts, losses))
        windows.append(_averaged(window, [each.passes[at] for each in told]))
    owner, tolerance = torch.arange(len(microbatches)), max(_exchanged(local.tolerance))
    return replace(
        local,
        windows=windows,
        references=found,
        still=found[0],
        owner=owner,
        microbatches=microbatches,
        tolerance=tolerance,
    )


def _averaged(window: Window, passes: list[Tensor]) -> Window:
    """With what every backward brought to all ranks together, where they had as many."""
    if len({each.shape for each in passes}) > 1 or not window.passes:
        return window
    mean = torch.stack(passes).mean(0)
    return replace(window, passes=[replace(each, gradient=g) for each, g in zip(window.passes, mean, strict=True)])


def _judged(seen: Seen, w: rank_losses.Ranked) -> Judged:
    """The first window whose gradient is not the right one, else the first."""
    judged = [_window(seen, at, w) for at in range(len(seen.windows))]
    return next((each for each in judged if each.faults), judged[0])


def _window(seen: Seen, at: int, w: rank_losses.Ranked) -> Judged:
    window, found = seen.windows[at], seen.references[at]
    right = found.gradients.sum(0) / found.counts.sum()
    gradient, allowed = reached(seen, window)
    faults = [*steps(window), *allowed]
    if not gradient.isfinite().all():
        faults.insert(0, Fault("non-finite", "The gradient is not finite."))
        gradient = torch.zeros_like(right)
    judged = Judged(at, gradient, right, solve(gradient, found.gradients), faults)
    if not faults and not near(gradient, right, seen.tolerance):
        faults.append(_word(seen, judged, found, w))
    return judged


def _word(seen: Seen, judged: Judged, found: References, w: rank_losses.Ranked) -> Fault:
    """The rule that gives the gradient."""
    fitting = [each for each in _rules(seen, found, w) if near(judged.gradient, each.gradient, seen.tolerance)]
    said = f"{_factors(judged, found, w)}."
    if not fitting:
        if judged.weights.residual > seen.tolerance:
            said = f"{percent(judged.weights.residual)} of the gradient is no weighted sum of all ranks' microbatches."
        return Fault("unknown", said)
    alike = tuple(dict.fromkeys(each.word for each in fitting[1:] if each.word != fitting[0].word))
    return Fault(fitting[0].word, f"{said} {fitting[0].said}".strip(), alike)


def _rules(seen: Seen, found: References, w: rank_losses.Ranked) -> Iterator[Named]:
    """Every rule and the gradient that it predicts; of those that predict the same the first one counts."""
    N, rows = float(found.counts.sum()), found.gradients
    right = rows.sum(0) / N
    for word in ("missing-world-factor", "rank-means", "extra-world-factor", "mean-of-means"):
        yield Named(word, rank_losses.weights(word, w) / N @ rows, _extra(word))
    yield Named("extra-world-factor", w.ranks * right, "")
    yield Named("double-division", rank_losses.weights("token-mean", w) / (w.own_steps * N) @ rows, "")
    for each in named(found, None, seen.owner, seen.microbatches):
        if each.word not in ("double-division", "mean-of-means"):
            yield each


def _extra(word: str) -> str:
    return "Every rank's mean was multiplied by the number of ranks." if word == "extra-world-factor" else ""


def _factors(judged: Judged, found: References, w: rank_losses.Ranked) -> str:
    """The weight of every rank, or of its microbatches where they differ."""
    weights = judged.weights.values * found.counts.sum()
    said = []
    for rank in range(w.ranks):
        own = weights[torch.tensor(w.owner) == rank]
        known = own[~own.isnan()]
        alike = len(known) and float(known.max() - known.min()) <= 1e-4 * float(known.abs().max())
        listed = three(float(known.mean())) if alike else ", ".join("?" if w.isnan() else three(float(w)) for w in own)
        said.append(f"rank {rank} got {listed}")
    return f"Times their right weight, the microbatches of {'; of '.join(said)}"


def _faults(
    local: Seen, judged: Judged, skipped: list[int], apart: float, owner: tuple[int, ...], rank: int
) -> list[Fault]:
    """All faults, the weightiest first."""
    faults = [*judged.faults, *cadence(local), *layers(local)]
    disagree = len(set(skipped)) > 1
    if apart > 10 * local.tolerance and not disagree:
        what = f"The gradients of the ranks are {percent(apart)} of its length apart, so not all was reduced"
        faults = [fault for fault in faults if fault.word not in NAMES]
        faults.insert(0, Fault("reduction-bypassed", f"{what}. {_own(judged, owner, rank)}."))
    if disagree:
        told = ", ".join(f"rank {at}: {count}" for at, count in enumerate(skipped))
        faults.insert(0, Fault("overflow-disagreement", f"Steps that a loss scaler skipped differ: {told}."))
    if any(fault.word in HIDING for fault in faults):
        faults = [fault for fault in faults if fault.word != "unknown"]
    first: dict[str, Fault] = {}
    for fault in faults:
        first.setdefault(fault.word, fault)
    return sorted(first.values(), key=lambda fault: ORDER.index(fault.word))


NAMES = ("unknown", "rank-means", "missing-world-factor", "extra-world-factor", "mean-of-means", "double-division")


def _own(judged: Judged, owner: tuple[int, ...], rank: int) -> str:
    """How many of the other ranks' microbatches are in the first rank's gradient."""
    values = judged.weights.values.nan_to_num().abs()
    others = torch.tensor([each != rank for each in owner])
    lost = int((others & (values <= 1e-6 * values.max())).sum())
    return f"{lost} of {int(others.sum())} microbatches of other ranks did not reach rank {rank}"


def _report(local: Seen, seen: Seen, judged: Judged, faults: list[Fault]) -> Report:
    window, counts = local.windows[0], seen.references[0].counts
    per_optimizer = [
        sum(step.optimizer == each for step in window.steps) for each in {s.optimizer for s in window.steps}
    ]
    alike = sorted({word for fault in faults for word in fault.alike})
    return Report(
        faults[0].word if faults else "token-mean",
        tuple(fault.word for fault in faults),
        "token-mean",
        tuple((judged.weights.values * counts.sum()).tolist()),
        tuple(int(n) for n in counts),
        judged.error,
        judged.weights.residual,
        seen.tolerance,
        max(per_optimizer, default=0),
        len(window.passes),
        max(window.schedule.values(), default=0),
        len(window.clips),
        sum(each.skipped for each in local.windows),
        tuple(f"{word} would look the same: take unequal counts, K at least 3" for word in alike),
        tuple(faults),
        counted(local),
        second_run(local),
        math.nan,
        (),
    )
