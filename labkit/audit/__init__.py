"""Point it at a training step: it measures the weight that every microbatch received, and names what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.audit.across_ranks import ranks as ranks
from labkit.audit.candidate_rules import OBJECTIVES, predictions
from labkit.audit.candidate_rules import objective as objective_gradient
from labkit.audit.collect_evidence import collect
from labkit.audit.inspection import Finding as Finding
from labkit.audit.inspection import inspect as inspect
from labkit.audit.judge import judge
from labkit.audit.measurements import Evidence, Fault, Judgement, near
from labkit.audit.probes import probe as probe
from labkit.audit.references import LossSum
from labkit.audit.report import Report as Report
from labkit.audit.report import same_looks, write_report
from labkit.audit.runs import Build
from labkit.declare import Choice, Range
from labkit.errors import LabError


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

    >>> import torch
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
    as a sum, and the number of its valid tokens. concat(list): all microbatches as one, needed only for layers that
    look at the batch. objective: token-mean, sequence-mean or mean-of-means. Raises LabError where the step raises, and
    for arguments of another kind. Random state, hooks and everything else it touches are put back.
    """
    word = Choice(OBJECTIVES).check("objective", objective, str)
    count = int(Range(1, 100).check("windows", windows, int))
    if not microbatches:
        raise LabError("0 microbatches make no step: try a list of two or more")
    evidence = collect(build, microbatches, loss_sum, count=count, objective=word, concat=concat)
    faults, judgement = judge(evidence)
    return write_report(evidence, judgement, faults, cannot_tell=_cannot_tell(evidence, faults, judgement))


def _cannot_tell(evidence: Evidence, faults: tuple[Fault, ...], judgement: Judgement) -> list[str]:
    """What would look the same on these microbatches."""
    window = evidence.windows[judgement.window]
    sentences = same_looks([word for fault in faults for word in fault.lookalikes] if faults else _same_here(evidence))
    if judgement.scaleless and any(step.summed for step in window.effective_steps):
        sentences.append("the length of a gradient that an optimizer accumulates internally: try it with SGD")
    if window.without_gradient:
        sentences.append("the gradient, where only the movement of the weights is seen: put it into .grad")
    if len(evidence.windows) == 1 and evidence.windows[0].leftover.any():
        sentences.append("whether what is left in .grad is cleared before the next window: ask for windows=2")
    return sentences


def _same_here(evidence: Evidence) -> set[str]:
    """Rules other than the objective whose gradient is the objective's here."""
    references, sequences = evidence.references[0], evidence.sequences[0] if evidence.sequences else None
    target = objective_gradient(evidence.objective, references, sequences)
    rules = predictions(references, sequences, evidence.microbatch_of_sequence, evidence.microbatches)
    same = {each.word for each in rules if near(each.gradient, target, evidence.tolerance)}
    return same - {evidence.objective, "token-mean"}
