"""Steps built as frameworks build theirs: each does what its algebra says, and the audit says so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from labkit.audit import audit
from labkit.errors import LabError
from tests.audit.built_alike import ALIKE, Alike, signs
from tests.audit.tasks import LANGUAGE
from tests.audit.watching import weights_of

WINDOWS = 2
NEAR = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}
each = pytest.mark.parametrize("entry", ALIKE, ids=lambda entry: entry.name)


def by_algebra(entry: Alike) -> torch.Tensor:
    """How far the weights go in float64, one backward a microbatch, torch's own optimizer and clip."""
    model = copy.deepcopy(entry.task.model()).double()
    parameters, optimizer = list(model.parameters()), entry.optimizer(list(model.parameters()))
    start, left = weights_of(model), [torch.zeros_like(p) for p in parameters]
    for _ in range(WINDOWS):
        n = torch.tensor([float(entry.task.loss_sum(model, mb)[1]) for mb in entry.task.microbatches])
        rows = torch.tensor([float(len(tokens)) for tokens, _ in entry.task.microbatches])
        total = [g.clone() if "stale-gradient" in entry.faults else torch.zeros_like(g) for g in left]
        for weight, microbatch in zip(entry.weights(n.double(), rows.double()), entry.task.microbatches, strict=True):
            loss = entry.task.loss_sum(model, microbatch)[0]
            for g, part in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                g += weight * part
            if entry.each or microbatch is entry.task.microbatches[-1]:
                for p, g in zip(parameters, total, strict=True):
                    p.grad = g.clone()
                if entry.max_norm is not None:
                    clip_grad_norm_(parameters, entry.max_norm)
                optimizer.step()
                left = total
                total = [torch.zeros_like(g) for g in total] if entry.each else total
    return weights_of(model) - start


@each
def test_it_does_what_its_algebra_says(entry: Alike) -> None:
    model, step = entry.build()
    start, expected = weights_of(model), by_algebra(entry)
    for _ in range(WINDOWS):
        step(list(entry.task.microbatches))
    found = weights_of(model) - start
    half = "half_precision" in entry.name
    allowed = 0.2 if half else NEAR[entry.task.dtype]
    if entry.task.dtype is not torch.bfloat16:  # there the weights have no digits for so short a way
        assert float((found - expected).norm() / expected.norm()) <= allowed


@each
def test_the_audit_says_what_it_does(entry: Alike) -> None:
    report = audit(entry.build, entry.task.microbatches, entry.task.loss_sum, concat=entry.task.concat, windows=WINDOWS)
    assert report.faults == entry.faults, report.explain()
    assert report.optimizer_steps <= (len(report.counts) if entry.each else 1)


def test_there_are_right_ones_and_faulty_ones_of_every_kind() -> None:
    assert sum(not entry.faults for entry in ALIKE) >= 10 and sum(bool(entry.faults) for entry in ALIKE) >= 10
    assert len({entry.name for entry in ALIKE}) == len(ALIKE)


@pytest.mark.parametrize("mean", [False, True])
def test_a_length_that_only_the_optimizer_knows_is_not_told(mean: bool) -> None:
    def build():  # type: ignore[no-untyped-def]
        model = LANGUAGE.model()
        return model, signs(model, mean)

    report = audit(build, LANGUAGE.microbatches, LANGUAGE.loss_sum, windows=WINDOWS)
    assert report.faults == (("mean-of-means",) if mean else ())
    assert any("length of a gradient" in told for told in report.cannot_tell)
    assert any("sum-of-means" in told for told in report.cannot_tell) == mean


def test_a_forward_bound_to_another_model_gets_no_verdict() -> None:
    """Its weights would be another model's: every reference is zero."""

    class Bound(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = LANGUAGE.model()

    def build():  # type: ignore[no-untyped-def]
        model = Bound()
        kept.append(model.net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(window):  # type: ignore[no-untyped-def]
            for microbatch in window:
                LANGUAGE.loss_sum(model.net, microbatch)[0].backward()
            optimizer.step()

        return model, step

    kept: list[torch.nn.Module] = []
    with pytest.raises(LabError, match="loss_sum gives a copy of the model no gradient: try"):
        audit(build, LANGUAGE.microbatches, lambda model, microbatch: LANGUAGE.loss_sum(kept[0], microbatch))
