"""A step that runs on several ranks: the weight of every rank's microbatches in the gradient that each rank has."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit import workers
from labkit.audit.cadence import cadence_faults, layer_faults, step_faults
from labkit.audit.candidate_rules import Prediction, predictions
from labkit.audit.clips import judged_gradient
from labkit.audit.collect_evidence import collect
from labkit.audit.judge import ORDER as ALONE
from labkit.audit.measurements import Evidence, Fault, Judgement, first_of_each, near, solve, unknown_weights
from labkit.audit.references import References
from labkit.audit.report import Report, same_looks, write_report
from labkit.audit.runs import fresh
from labkit.audit.window import Window
from labkit.data_parallel import rank_losses
from labkit.declare import Range
from labkit.errors import LabError
from labkit.wording import percent, three

ACROSS = ("overflow-disagreement", "reduction-bypassed", "rank-means", "missing-world-factor", "extra-world-factor")
ORDER = (*ALONE[:2], *ACROSS, *ALONE[2:])  # the weightiest first


def ranks(build: str, ranks: int = 2, *, windows: int = 1, timeout: float = 120) -> Report:
    """Run a step on real ranks, unchanged, and report the weight of every rank's microbatches and what is wrong.

    >>> ranks("labkit.data_parallel.steps:build", 2).verdict
    'token-mean'

    build: "package.module:build" of a function that gives a fresh model and step on the rank that calls it, wrapped in
    DistributedDataParallel as always; the process group is there. Its module also has `loss_sum` as for `audit`, and
    `microbatches`, one list for all ranks: it is dealt out in order, the first part to rank 0.
    `windows` as for `audit`. The weights are those in the first rank's gradient. Raises LabError where a rank raises or
    hangs.
    """
    count = int(Range(1, 100).check("windows", windows, int))
    reports: list[Report] = workers.run(
        "labkit.audit.across_ranks:run_audit", ranks, timeout=timeout, build=build, windows=count
    )
    return reports[0]


def dealt(microbatches: Sequence[Any], world: int) -> list[list[Any]]:
    """Microbatches dealt out in order, a part to each rank; LabError where a rank would have none.

    >>> dealt([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    if len(microbatches) < world:
        raise LabError(f"{len(microbatches)} microbatches for {world} ranks: try {2 * world}")
    size, more = divmod(len(microbatches), world)
    edges = [rank * size + min(rank, more) for rank in range(world + 1)]
    return [list(microbatches[low:high]) for low, high in itertools.pairwise(edges)]


@dataclass(frozen=True, eq=False)
class Contribution:
    """What a rank sends to all others."""

    gradients: Tensor  # of every window, each microbatch's
    counts: Tensor
    losses: Tensor
    passes: list[Tensor]  # of every window, what each backward brought, before any reduction
    skipped: int


def run_audit(rank: int, world: int, *, build: str, windows: int) -> Report:
    """The audit on one rank: it runs and watches the step here, and judges it by the contributions of all ranks."""
    module = importlib.import_module(build.partition(":")[0])
    parts = dealt(module.microbatches, world)
    local = _local(getattr(module, build.partition(":")[2]), parts[rank], module.loss_sum, windows)
    contributions = _exchanged(_contribution(local))
    evidence = _everywhere(local, contributions, [each for part in parts for each in part])
    layout = rank_losses.layout([[int(n) for n in each.counts] for each in contributions], rank)
    judgement = _judge(evidence, layout)
    finite = bool(judgement.gradient.isfinite().all())
    gradients = _exchanged(judgement.gradient if finite else torch.zeros_like(judgement.gradient))
    distance = max(float((each - gradients[0]).norm()) for each in gradients) / float(judgement.target.norm())
    faults = _faults(local, judgement, [each.skipped for each in contributions], distance, layout)
    lookalikes = same_looks(word for fault in faults for word in fault.lookalikes)
    return write_report(evidence, judgement, faults, cannot_tell=lookalikes, local=local)


def _local(build: Any, microbatches: list[Any], loss_sum: Any, windows: int) -> Evidence:
    """What the step does here; every rank reruns it without its last microbatch, or none does."""

    def unwrapped() -> tuple[nn.Module, Callable[[list[Any]], object]]:
        model, step = fresh(build)
        return (model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model), step

    local = collect(unwrapped, microbatches, loss_sum, count=windows, objective="token-mean", on_ranks=True)
    rerun = local.rerun_without_last() if all(_exchanged(len(microbatches) > 1)) else None
    return replace(local, rerun_without_last=lambda: rerun)


def _exchanged(value: Any) -> list[Any]:
    """The value of every rank, rank by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _contribution(local: Evidence) -> Contribution:
    references, windows = local.references, local.windows
    rows = torch.stack([each.gradients for each in references])
    passes = [torch.stack([p.gradient for p in each.passes]) if each.passes else torch.zeros(0) for each in windows]
    return Contribution(rows, references[0].counts, references[0].losses, passes, sum(each.skipped for each in windows))


def _everywhere(local: Evidence, contributions: list[Contribution], microbatches: list[Any]) -> Evidence:
    """As if one process had done it all: the microbatches of all ranks, and passes averaged over the ranks."""
    counts, losses = (torch.cat([getattr(each, name) for each in contributions]) for name in ("counts", "losses"))
    references, windows = [], []
    for at, window in enumerate(local.windows):
        references.append(References(torch.cat([each.gradients[at] for each in contributions]), counts, losses))
        windows.append(_averaged(window, [each.passes[at] for each in contributions]))
    return replace(
        local,
        windows=windows,
        references=references,
        references_at_start=references[0],
        microbatch_of_sequence=torch.arange(len(microbatches)),
        microbatches=microbatches,
        tolerance=max(_exchanged(local.tolerance)),
    )


def _averaged(window: Window, passes: list[Tensor]) -> Window:
    """With what every backward brought on average over the ranks, where all ranks ran as many."""
    if len({each.shape for each in passes}) > 1 or not window.passes:
        return window
    mean = torch.stack(passes).mean(0)
    return replace(window, passes=[replace(each, gradient=g) for each, g in zip(window.passes, mean, strict=True)])


def _judge(evidence: Evidence, layout: rank_losses.Layout) -> Judgement:
    """The judgement of the first window whose gradient is faulty, else of the first."""
    judgements = [_window(evidence, at, layout) for at in range(len(evidence.windows))]
    return next((each for each in judgements if each.faults), judgements[0])


def _window(evidence: Evidence, at: int, layout: rank_losses.Layout) -> Judgement:
    window, references = evidence.windows[at], evidence.references[at]
    target = references.gradients.sum(0) / references.counts.sum()
    gradient, clip_faults = judged_gradient(evidence, window)
    faults = [*step_faults(window), *clip_faults]
    if not gradient.isfinite().all():
        faults.insert(0, Fault("non-finite", "The gradient is not finite."))
        return Judgement(at, gradient, target, unknown_weights(evidence.K), faults)
    judgement = Judgement(at, gradient, target, solve(gradient, references.gradients), faults)
    if not faults and not near(gradient, target, evidence.tolerance):
        faults.append(_name_fault(evidence, judgement, references, layout))
    return judgement


def _name_fault(evidence: Evidence, judgement: Judgement, references: References, layout: rank_losses.Layout) -> Fault:
    """The rule that gives the gradient."""
    rules = _predictions(evidence, references, layout)
    fitting = [each for each in rules if near(judgement.gradient, each.gradient, evidence.tolerance)]
    factors = f"{_factors(judgement, references, layout)}."
    if not fitting:
        residual = judgement.weights.residual
        share = f"{percent(residual)} of the gradient is no weighted sum of all ranks' microbatches."
        return Fault("unknown", share if residual > evidence.tolerance else factors)
    lookalikes = tuple(dict.fromkeys(each.word for each in fitting[1:] if each.word != fitting[0].word))
    return Fault(fitting[0].word, f"{factors} {fitting[0].detail}".strip(), lookalikes)


def _predictions(evidence: Evidence, references: References, layout: rank_losses.Layout) -> Iterator[Prediction]:
    """Every rule and the gradient that it predicts; of those that predict the same the first one counts."""
    N, rows = float(references.counts.sum()), references.gradients
    for word in ("missing-world-factor", "rank-means", "extra-world-factor", "mean-of-means"):
        yield Prediction(word, rank_losses.weights(word, layout) / N @ rows, _extra(word))
    yield Prediction("extra-world-factor", layout.ranks * rows.sum(0) / N, "")
    yield Prediction("double-division", rank_losses.weights("token-mean", layout) / (layout.own_steps * N) @ rows, "")
    for each in predictions(references, None, evidence.microbatch_of_sequence, evidence.microbatches):
        if each.word not in ("double-division", "mean-of-means"):
            yield each


def _extra(word: str) -> str:
    return "Every rank's mean was multiplied by the number of ranks." if word == "extra-world-factor" else ""


def _factors(judgement: Judgement, references: References, layout: rank_losses.Layout) -> str:
    """The weight of every rank, or of its microbatches where they differ."""
    weights = judgement.weights.values * references.counts.sum()
    parts = []
    for rank in range(layout.ranks):
        own = weights[torch.tensor(layout.owner) == rank]
        known = own[~own.isnan()]
        equal = len(known) and float(known.max() - known.min()) <= 1e-4 * float(known.abs().max())
        numbers = three(float(known.mean())) if equal else ", ".join("?" if w.isnan() else three(float(w)) for w in own)
        parts.append(f"rank {rank} received {numbers}")
    return f"Relative to their correct weight, the microbatches of {'; those of '.join(parts)}"


def _faults(
    local: Evidence, judgement: Judgement, skipped: list[int], distance: float, layout: rank_losses.Layout
) -> tuple[Fault, ...]:
    """All faults, the weightiest first."""
    faults = [*judgement.faults, *cadence_faults(local), *layer_faults(local)]
    if len(set(skipped)) > 1:
        numbers = ", ".join(f"rank {at}: {count}" for at, count in enumerate(skipped))
        faults.insert(0, Fault("overflow-disagreement", f"Steps that a loss scaler skipped differ: {numbers}."))
    elif distance > 10 * local.tolerance:
        what = f"The gradients of the ranks differ by {percent(distance)} of their length, so some were not reduced"
        faults = [fault for fault in faults if fault.word not in NAMES]
        faults.insert(0, Fault("reduction-bypassed", f"{what}. {_missing(judgement, layout)}."))
    return first_of_each(faults, ORDER)


NAMES = ("unknown", "rank-means", "missing-world-factor", "extra-world-factor", "mean-of-means", "double-division")


def _missing(judgement: Judgement, layout: rank_losses.Layout) -> str:
    """How many of the other ranks' microbatches are missing in this rank's gradient."""
    values = judgement.weights.values.nan_to_num().abs()
    others = torch.tensor([each != layout.seen_from for each in layout.owner])
    lost = int((others & (values <= 1e-6 * values.max())).sum())
    return f"{lost} of {int(others.sum())} microbatches of other ranks did not reach rank {layout.seen_from}"
