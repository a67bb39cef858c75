"""Everything that an audit measures of a step, in one process or on one of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.audit.measurements import Evidence, near
from labkit.audit.references import LossSum, Model64, References, Rounded, pieces
from labkit.audit.rounding import rounding
from labkit.audit.runs import Build, fresh, rerun_other_seed, rerun_without_last, run_windows
from labkit.audit.watch import Watch
from labkit.audit.window import Sampled, Window
from labkit.errors import LabError

MovedWeights = list[tuple[int, dict[str, Tensor]]]  # microbatches that moved weights were run with, and those weights
MOST = 16  # microbatches whose gradients are taken at every place that the weights came to


def collect(
    build: Build,
    microbatches: Sequence[Any],
    loss_sum: LossSum,
    *,
    count: int,
    objective: str,
    concat: Callable[[list[Any]], Any] | None = None,
    on_ranks: bool = False,
) -> Evidence:
    """Run `count` windows of a fresh step, watch them, and compute the gradients that theirs are compared with.

    On ranks this is what one rank does with its own microbatches: their gradients are those at the weights before each
    window, and they are not cut into sequences.
    """
    model, step = fresh(build)
    sampled = Sampled(model)
    windows, states = run_windows(Watch(model, sampled), model, step, microbatches, count)
    twin = Model64(model, sampled, loss_sum)
    at_start = [twin.at(state).references(microbatches) for state in states]
    references, sequences, microbatch_of_sequence = at_start, None, torch.arange(len(microbatches))
    if not on_ranks:
        moved = [list(_moved_weights(twin, *pair, microbatches)) for pair in zip(windows, at_start, strict=True)]
        references = [_at_own_weights(twin, *pair, microbatches) for pair in zip(moved, at_start, strict=True)]
        microbatch_of_sequence, sequences = _sequences(twin, states, moved, at_start, microbatches)
        _admit(objective, sequences, references[0], at_start[0], windows[0])

    def trial(autocast: torch.dtype | None) -> References:
        return Rounded(model, sampled, loss_sum, autocast).at(states[0]).references(microbatches)

    return Evidence(
        windows=windows,
        references=references,
        references_at_start=at_start[0],
        sequences=sequences,
        microbatch_of_sequence=microbatch_of_sequence,
        microbatches=microbatches,
        objective=objective,
        tolerance=rounding(model, windows, at_start[0], trial),
        rerun_other_seed=rerun_other_seed(build, sampled, microbatches),
        one_forward=twin.at(states[0]).references([concat(list(microbatches))]) if concat else None,
        rerun_without_last=rerun_without_last(build, sampled, microbatches, count),
    )


def _admit(
    objective: str, sequences: list[References] | None, moved: References, at_start: References, window: Window
) -> None:
    """Refuse what nothing can be judged by."""
    if objective == "sequence-mean" and sequences is None:
        raise LabError("objective = 'sequence-mean' needs microbatches that can be cut by rows: try 'token-mean'")
    if not moved.counts.sum() > 0:
        raise LabError("the microbatches have 0 valid tokens: try microbatches with something to predict")
    if not at_start.gradients.any() and any(each.gradient.any() for each in window.passes):
        raise LabError("loss_sum gives a copy of the model no gradient: try a loss_sum that computes with its argument")


def _sequences(
    twin: Model64,
    states: list[dict[str, Tensor]],
    moved: list[MovedWeights],
    at_start: list[References],
    microbatches: Sequence[Any],
) -> tuple[Tensor, list[References] | None]:
    """The microbatch of each sequence, and the sequences' gradients where microbatches can be cut into sequences."""
    cut = [pieces(microbatch) for microbatch in microbatches]
    microbatch_of_sequence = torch.repeat_interleave(torch.tensor([len(each) for each in cut]))
    if not all(cut):
        return microbatch_of_sequence, None
    flat = [piece for each in cut for piece in each]
    try:
        sequences = [twin.at(state).references(flat) for state in states]
    except Exception:  # a layer that cannot compute with a single row
        return microbatch_of_sequence, None
    if not _adds_up(sequences[0], at_start[0]):
        return microbatch_of_sequence, None
    for weights, rows in zip(moved, sequences, strict=True):
        for at, state in weights:
            rows.gradients[microbatch_of_sequence == at] = twin.at(state).references(cut[at]).gradients
    return microbatch_of_sequence, sequences


def _moved_weights(
    twin: Model64, window: Window, at_start: References, microbatches: Sequence[Any]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Microbatches that were run with weights which had moved since the window began, and those weights."""
    done: set[int] = set()
    for number, each in enumerate(window.passes if len(microbatches) <= MOST else ()):
        rows = at_start.gradients if each.state is None else twin.at(each.state).references(microbatches).gradients
        cosines = (rows @ each.gradient / rows.norm(dim=1).clamp(min=1e-300)).nan_to_num()
        at = int(cosines.argmax())
        if number < len(window.passes_before_step) or at not in done:  # after the step only microbatches that are new
            done.add(at)
            if each.state is not None:
                yield at, each.state


def _at_own_weights(
    twin: Model64, moved: MovedWeights, at_start: References, microbatches: Sequence[Any]
) -> References:
    """Each microbatch's gradient at the weights that it was run with, where the weights moved inside the window."""
    rows = at_start.gradients.clone()
    for at, state in moved:
        rows[at] = twin.at(state).references([microbatches[at]]).gradients[0]
    return References(rows, at_start.counts, at_start.losses)


def _adds_up(sequences: References, microbatches: References) -> bool:
    """Whether the sequences sum to the microbatches: a loss may hold more than the sum over its rows."""
    same = near(sequences.gradients.sum(0), microbatches.gradients.sum(0), 1e-6)
    return same and bool(sequences.counts.sum() == microbatches.counts.sum())
