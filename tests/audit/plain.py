"""What is right: the whole window in one loss and one backward, in float64, with torch's own clip and optimizer."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from tests.audit.steps import Step
from tests.audit.tasks import lm_loss, rows_of, valid
from tests.audit.watching import Window, closed, watched, weights_of


def whole_loss(entry: Step, model: nn.Module) -> Tensor:
    """The objective of the whole window, in one forward where the microbatches can be joined."""
    microbatches, task = entry.microbatches, entry.task
    if entry.objective == "sequence-mean":
        sequences = [row for mb in microbatches for row in rows_of(task.language(mb))]
        return torch.stack([lm_loss(model, *row, "sum") / valid(row[1]) for row in sequences]).mean()
    if entry.objective == "mean-of-means":
        sums = [entry.loss_sum(model, mb) for mb in microbatches]
        return torch.stack([total / count for total, count in sums]).mean()
    joined = [entry.concat(microbatches)] if entry.concat else microbatches
    sums = [entry.loss_sum(model, mb) for mb in joined]
    return sum(total for total, _ in sums) / sum(count for _, count in sums)


def double(entry: Step) -> nn.Module:
    """The entry's model in float64, without random numbers."""
    model = copy.deepcopy(entry.build()[0]).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    return model


def plainly(entry: Step) -> list[Window]:
    """The windows of an entry as they should have been."""
    model, plan = double(entry), entry.plan
    optimizers = plan.optimizers(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    base = [group["lr"] for group in groups]
    average = [p.detach().clone() for p in model.parameters()]
    found: list[Window] = []
    seen: list[Optimizer] = []

    def set_rates(index: int) -> None:
        for group, rate in zip(groups, base, strict=True):
            group["lr"] = rate * (plan.schedule(index) if plan.schedule else 1.0)

    set_rates(0)
    for index in range(entry.windows):
        window = Window(weights_of(model))
        model.zero_grad()
        whole_loss(entry, model).backward()
        if plan.max_norm is not None:
            clip_grad_norm_(model.parameters(), plan.max_norm)
        if plan.max_value is not None:
            clip_grad_value_(model.parameters(), plan.max_value)
        with watched(model, window.events, seen):
            for optimizer in optimizers:
                optimizer.step()
        for a, p in zip(average, model.parameters(), strict=True):
            decay = 0.0 if plan.first_copied and index == 0 else plan.average or 0.0
            a.mul_(decay).add_(p.detach(), alpha=1 - decay)
        set_rates(index + 1)
        closed(window, model, seen, None if plan.average is None else average)
        found.append(window)
    return found
