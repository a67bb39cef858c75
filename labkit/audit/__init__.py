"""Point it at a training step: it measures the weight that every microbatch received, and names what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.audit.across_ranks import ranks as ranks
from labkit.audit.cadence import counted, one_forward, second_run
from labkit.audit.candidate_rules import OBJECTIVES, named
from labkit.audit.candidate_rules import objective as objective_gradient
from labkit.audit.inspection import Finding as Finding
from labkit.audit.inspection import inspect as inspect
from labkit.audit.judge import judge
from labkit.audit.measurements import Fault, Judged, Seen, near, solve
from labkit.audit.probes import probe as probe
from labkit.audit.references import LossSum, Model64, References, Rounded, pieces
from labkit.audit.report import Report as Report
from labkit.audit.rounding import rounding
from labkit.audit.runs import Build, again, built, fewer, watched
from labkit.audit.watch import Watch
from labkit.audit.window import Sampled, Window
from labkit.declare import Choice, Range
from labkit.errors import LabError

Met = list[tuple[int, dict[str, Tensor]]]  # microbatches that moved weights saw, and those weights
MOST = 16  # microbatches whose gradients are taken at every place where the weights stood


def audit(
    build: Build,
    microbatches: Sequence[Any],
    loss_sum: LossSum,
    *,
    concat: Callable[[list[Any]], Any] | None = None,
    windows: int = 1,
    objective: str = "token-mean",
) -> Report:
    """Run a training step unchanged, watch it, and say which weights it gives and what is wrong with it.

    >>> from labkit.corpus import made
    >>> from labkit.nets import Scalar, next_token_loss, valid_tokens
    >>> def build():
    ...     model = Scalar()
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     def step(microbatches):
    ...         optimizer.zero_grad()
    ...         for tokens, labels in microbatches:
    ...             (next_token_loss(model, tokens, labels, "mean") / len(microbatches)).backward()
    ...         optimizer.step()
    ...     return model, step
    >>> loss_sum = lambda model, batch: (next_token_loss(model, *batch, "sum"), valid_tokens(batch[1]))
    >>> audit(build, made([[[8]], [[3, 2, 1]]]), loss_sum).faults
    ('mean-of-means',)

    build: gives a fresh model and step, with the same weights at every call. step(microbatches) makes one logical
    update of that model; it is called `windows` times with the same list. loss_sum(model, microbatch): the objective
    as a sum, and the number of its valid tokens. concat(list): one microbatch of all, only for layers that look at the
    batch. objective: token-mean, sequence-mean or mean-of-means. Raises LabError where the step raises, and for
    arguments that are no such thing. Random state, hooks and everything else touched are put back.
    """
    word = Choice(OBJECTIVES).check("objective", objective, str)
    count = int(Range(1, 100).check("windows", windows, int))
    if not microbatches:
        raise LabError("0 microbatches make no step: try a list of two or more")
    model, step = built(build)
    sampled = Sampled(model)
    seen, states = watched(Watch(model, sampled), model, step, microbatches, count)
    twin = Model64(model, sampled, loss_sum)
    still = [twin.at(state).references(microbatches) for state in states]
    met = [list(_met(twin, window, found, microbatches)) for window, found in zip(seen, still, strict=True)]
    references = [_moving(twin, moved, found, microbatches) for moved, found in zip(met, still, strict=True)]
    owner, sequences = _sequences(twin, states, met, still, microbatches)
    if word == "sequence-mean" and sequences is None:
        raise LabError("objective = 'sequence-mean' needs microbatches that can be cut by rows: try 'token-mean'")
    _admit(references[0], still[0], seen[0])

    def trial(autocast: torch.dtype | None) -> References:
        return Rounded(model, sampled, loss_sum, autocast).at(states[0]).references(microbatches)

    found = Seen(
        seen,
        references,
        still[0],
        sequences,
        owner,
        microbatches,
        word,
        rounding(model, seen, still[0], trial),
        again(build, sampled, microbatches),
        twin.at(states[0]).references([concat(list(microbatches))]) if concat else None,
        fewer(build, sampled, microbatches, count),
    )
    return _report(found, word)


def _admit(references: References, still: References, window: Window) -> None:
    """Refuse what nothing can be judged by."""
    if not references.counts.sum() > 0:
        raise LabError("the microbatches have 0 valid tokens: try microbatches with something to predict")
    if not still.gradients.any() and any(each.gradient.any() for each in window.passes):
        raise LabError("loss_sum gives a copy of the model no gradient: try a loss_sum that computes with its argument")


def _sequences(
    twin: Model64,
    states: list[dict[str, Tensor]],
    met: list[Met],
    still: list[References],
    microbatches: Sequence[Any],
) -> tuple[Tensor, list[References] | None]:
    """Which microbatch each sequence stands in, and their gradients, where microbatches can be cut into sequences."""
    cut = [pieces(microbatch) for microbatch in microbatches]
    owner = torch.repeat_interleave(torch.tensor([len(each) for each in cut]))
    if not all(cut):
        return owner, None
    flat = [piece for each in cut for piece in each]
    try:
        found = [twin.at(state).references(flat) for state in states]
    except Exception:  # a layer that cannot do with a single row
        return owner, None
    if not _adds_up(found[0], still[0]):
        return owner, None
    for moved, each in zip(met, found, strict=True):
        for at, state in moved:
            each.gradients[owner == at] = twin.at(state).references(cut[at]).gradients
    return owner, found


def _met(
    twin: Model64, window: Window, found: References, microbatches: Sequence[Any]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Microbatches that were seen by weights which had moved since the window began, and those weights."""
    held: set[int] = set()
    for number, each in enumerate(window.passes if len(microbatches) <= MOST else ()):
        there = found.gradients if each.state is None else twin.at(each.state).references(microbatches).gradients
        alike = (there @ each.gradient / there.norm(dim=1).clamp(min=1e-300)).nan_to_num()
        at = int(alike.argmax())
        if number < len(window.before) or at not in held:  # after the step only what it has not seen
            held.add(at)
            if each.state is not None:
                yield at, each.state


def _moving(twin: Model64, moved: Met, found: References, microbatches: Sequence[Any]) -> References:
    """Where the weights moved inside the window, each microbatch's gradient at the weights that it met."""
    rows = found.gradients.clone()
    for at, state in moved:
        rows[at] = twin.at(state).references([microbatches[at]]).gradients[0]
    return References(rows, found.counts, found.losses)


def _adds_up(sequences: References, found: References) -> bool:
    """Whether the pieces are the microbatches: a loss may hold more than the sum over its rows."""
    same = near(sequences.gradients.sum(0), found.gradients.sum(0), 1e-6)
    return same and bool(sequences.counts.sum() == found.counts.sum())


def _report(seen: Seen, word: str) -> Report:
    faults, shown = judge(seen)
    window = seen.windows[0]
    N = float(seen.references[0].counts.sum())
    per_optimizer: dict[int, int] = {}
    for each in window.real:
        per_optimizer[each.optimizer] = per_optimizer.get(each.optimizer, 0) + 1
    return Report(
        faults[0].word if faults else word,
        tuple(fault.word for fault in faults),
        word,
        tuple((shown.weights.values * N).tolist()),
        tuple(int(n) for n in seen.references[0].counts),
        shown.error if shown.gradient.isfinite().all() else float("nan"),
        shown.weights.residual,
        seen.tolerance,
        max(per_optimizer.values(), default=0),
        len(window.passes),
        max(window.schedule.values(), default=0),
        len(window.clips),
        sum(each.skipped for each in seen.windows),
        _cannot_tell(seen, faults, shown),
        tuple(faults),
        counted(seen),
        second_run(seen),
        one_forward(seen),
        _of_sequences(seen, shown),
    )


def _of_sequences(seen: Seen, shown: Judged) -> tuple[float, ...]:
    """The weight of every row, in the window that is shown."""
    if seen.sequences is None or not shown.gradient.isfinite().all():
        return ()
    found = seen.sequences[shown.at]
    return tuple((solve(shown.gradient, found.gradients).values * found.counts.sum()).tolist())


def _cannot_tell(seen: Seen, faults: list[Fault], shown: Judged) -> tuple[str, ...]:
    """What would look the same on these microbatches."""
    found, sequences = seen.references[0], seen.sequences[0] if seen.sequences else None
    words = {word for fault in faults for word in fault.alike}
    if not faults:
        right = objective_gradient(seen.meant, found, sequences)
        others = named(found, sequences, seen.owner, seen.microbatches)
        words = {each.word for each in others if near(each.gradient, right, seen.tolerance)} - {
            seen.meant,
            "token-mean",
        }
    told = [f"{word} would look the same: take unequal counts, K at least 3" for word in sorted(words)]
    if shown.scaleless and any(step.summed for step in seen.windows[shown.at].real):
        told.append("the length of a gradient that an optimizer adds up by itself: try it with SGD")
    if seen.windows[shown.at].unseen:
        told.append("the gradient, where only the way that the weights went is seen: put it into .grad")
    if len(seen.windows) == 1 and seen.windows[0].left.any():
        told.append("whether what is left in .grad is cleared before the next window: ask for windows=2")
    return tuple(told)
