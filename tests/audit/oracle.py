"""What a step should have done, and what its faults make of it: algebra on float64 gradients, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.audit.plain import double
from tests.audit.steps import Step
from tests.audit.tasks import IGNORE, Task, lm_loss, rows_of, valid
from tests.audit.watching import Window, closed, flat, watched, weights_of

# What each word says of the weights, times N; n: valid tokens of each microbatch


def counted(task: Task, microbatches: list[Any]) -> tuple[int, int, int]:
    """Targets with the padding, labels before the shift, and sequences."""
    labels = [task.language(mb)[1] for mb in microbatches]
    positions = sum(each[:, 1:].numel() for each in labels)
    return positions, sum(int((each != IGNORE).sum()) for each in labels), sum(len(each) for each in labels)


def weights(word: str, n: Tensor, N: float, K: int, entry: Step) -> Tensor:
    """The weight of every microbatch's summed gradient; N: tokens of the window, K: its microbatches."""
    ones, means = torch.ones_like(n), torch.where(n > 0, 1 / n, 0.0)
    match word:
        case "token-mean":
            return ones / N
        case "mean-of-means":
            return means / K
        case "sum-of-means":
            return means
        case "token-sum":
            return ones
        case "double-division":
            return ones / (N * K)
        case "padded-count":
            return ones / counted(entry.task, entry.microbatches)[0]
        case "unshifted-count":
            return ones / counted(entry.task, entry.microbatches)[1]
        case "tail-divided-by-k":
            return K / entry.plan.declared * ones / N if entry.plan.shared_tail else means / entry.plan.declared
    raise KeyError(word)


WEIGHTS = (
    "mean-of-means",
    "sum-of-means",
    "token-sum",
    "double-division",
    "padded-count",
    "unshifted-count",
    "tail-divided-by-k",
)
IN_THE_LOOP = {"step-per-microbatch", "moments-per-microbatch", "momentum-per-microbatch"}


class Oracle:
    """A float64 copy of an entry's model that is trained by algebra: the right update, or the one its words predict."""

    def __init__(self, entry: Step, faults: Sequence[str]) -> None:
        self.entry, self.plan, self.faults = entry, entry.plan, set(faults)
        self.model = double(entry)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = self.plan.optimizers(self.model)
        self.base = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        self.index, self.first = 0, True
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.left = self.nothing()
        self.seen: list[Optimizer] = []

    # Gradients

    def nothing(self) -> list[Tensor | None]:
        return [None] * len(self.parameters)

    def slope(self, microbatch: Any) -> list[Tensor | None]:
        """The gradient of one microbatch's summed loss at the present weights."""
        return self.derivative(self.entry.loss_sum(self.model, microbatch)[0])

    def derivative(self, loss: Tensor) -> list[Tensor | None]:
        return list(torch.autograd.grad(loss, self.parameters, allow_unused=True))

    def sizes(self, microbatches: list[Any]) -> Tensor:
        with torch.no_grad():
            counts = [float(self.entry.loss_sum(self.model, mb)[1]) for mb in microbatches]
        return torch.tensor(counts, dtype=torch.float64)

    def part(self, microbatch: Any, share: float) -> list[Tensor | None]:
        """What a microbatch adds; a mean over its sequences takes no other weight."""
        if self.by_sequence:
            B = counted(self.entry.task, self.entry.microbatches)[2]
            rows = [row for row in rows_of(self.entry.task.language(microbatch)) if valid(row[1])]
            if not rows:
                return self.nothing()
            return self.derivative(sum(lm_loss(self.model, *row, "sum") / valid(row[1]) for row in rows) / B)
        return times(share, self.slope(microbatch))

    @property
    def by_sequence(self) -> bool:
        objective = self.entry.objective == "sequence-mean" and not self.faults & {*WEIGHTS, "token-mean"}
        return objective or "sequence-means" in self.faults

    def weights(self, microbatches: list[Any], own: int) -> list[float]:
        """Of every microbatch; the first `own` make the window that is stepped with."""
        n = self.sizes(microbatches)
        word = next((each for each in (*WEIGHTS, "token-mean") if each in self.faults), self.entry.objective)
        word = "token-mean" if self.by_sequence else word
        return weights(word, n, float(n[:own].sum()), own, self.entry).tolist()

    # One window

    def window(self) -> Window:
        window = Window(weights_of(self.model))
        self.set_rates()
        with watched(self.model, window.events, self.seen):
            self.update(list(self.entry.microbatches))
        closed(window, self.model, self.seen, self.average if self.plan.average is not None else None)
        return window

    def update(self, microbatches: list[Any]) -> None:
        if self.entry.task.coupled and "batch-dependent-layer" not in self.faults:
            microbatches = [self.entry.concat(microbatches)]  # the whole window in one forward
        K = self.plan.declared if "carried-over" in self.faults else len(microbatches)
        shares, total = self.weights(microbatches, K), self.start()
        for k, mb in enumerate(microbatches[:K]):
            part = self.part(mb, shares[k])
            if "unscale-early" in self.faults and k > 0:
                part = times(self.plan.scale, part)
            total = self.inside(self.added(total, part, mb, shares[k]), k == K - 1)
        if not self.faults & IN_THE_LOOP:
            self.finish(total)
        for k, mb in enumerate(microbatches[K:], K):  # what no step has used
            self.left = add(self.left, self.part(mb, shares[k]))
        self.advance(len(microbatches))

    def start(self) -> list[Tensor | None]:
        """What is in .grad before the first backward."""
        if not self.late:
            return self.left
        self.step(self.left)
        return self.nothing()

    @property
    def late(self) -> bool:
        """Whether the step comes a window late."""
        return self.plan.delayed and "stale-gradient" in self.faults

    def added(self, total: list[Tensor | None], part: list[Tensor | None], mb: Any, share: float) -> Any:
        clips = self.plan.clips if "clip-per-microbatch" in self.faults else ""
        if clips == "mean":
            share *= float(self.sizes([mb]))  # of the microbatch's mean, not of its sum
            part = times(share, self.clipped(times(1 / share, part)))
        elif clips == "part":
            part = self.clipped(part)
        if "last-microbatch-only" in self.faults:
            total = self.nothing()
        total = add(total, part)
        return self.clipped(total) if clips == "running" else total

    def inside(self, total: list[Tensor | None], last: bool) -> list[Tensor | None]:
        """What a fault does at every microbatch."""
        if "step-per-microbatch" in self.faults:
            self.step(total if "clip-per-microbatch" in self.faults else self.clipped(total))
            if "schedule-per-microbatch" in self.faults:
                self.index += 1
                self.set_rates()
            if "ema-per-microbatch" in self.faults:
                self.follow()
            return self.nothing() if self.plan.cleared else total
        if self.faults & IN_THE_LOOP:
            self.remember(total, last)
            return self.nothing() if self.plan.cleared else total
        if "ema-per-microbatch" in self.faults and not last:
            self.follow()
        if "decay-per-microbatch" in self.faults and not last:
            self.decay()
        return total

    def finish(self, total: list[Tensor | None]) -> None:
        if "no-step" in self.faults:
            return
        if "clip-per-microbatch" not in self.faults:
            total = self.clipped(total, self.plan.scale if "clip-scaled" in self.faults else 1.0)
        if "adam-count-per-microbatch" in self.faults:
            self.count(len(self.entry.microbatches) - 1)
        if not self.late:
            self.step(total)
        kept = {id(p) for name, p in self.model.named_parameters() if self.plan.kept(name)}
        stale = "stale-gradient" in self.faults
        self.left = [g if stale and id(p) in kept else None for p, g in zip(self.parameters, total, strict=True)]

    def advance(self, K: int) -> None:
        """What comes once after the optimizer's step."""
        if not ("step-per-microbatch" in self.faults and "schedule-per-microbatch" in self.faults):
            faster = {"schedule-per-microbatch": K, "schedule-per-process": self.plan.processes}
            self.index += next((n for word, n in faster.items() if word in self.faults), 1)
        self.set_rates()
        if not {"ema-per-microbatch", "step-per-microbatch"} <= self.faults:
            self.follow()

    # Its parts

    def step(self, total: list[Tensor | None]) -> None:
        for p, g in zip(self.parameters, total, strict=True):
            p.grad = None if g is None else g.clone()
        for optimizer in self.optimizers:
            optimizer.step()
        for p in self.parameters:
            p.grad = None

    def remember(self, total: list[Tensor | None], last: bool) -> None:
        """A step that changes what the optimizer remembers; only the last one moves the parameters."""
        before = [p.detach().clone() for p in self.parameters]
        self.set_rates(1.0 if last or self.plan.unmoved else 0.0)
        self.step(total)
        if self.plan.unmoved and not last:
            torch._foreach_copy_([p.detach() for p in self.parameters], before)

    def clipped(self, total: list[Tensor | None], scale: float = 1.0) -> list[Tensor | None]:
        if self.plan.max_value is not None:
            bound = self.plan.max_value / scale
            return [None if g is None else g.clamp(-bound, bound) for g in total]
        if self.plan.max_norm is None:
            return total
        norm = float(flat([g for g in total if g is not None]).norm()) * scale
        return times(min(1.0, self.plan.max_norm / (norm + 1e-6)), total)

    def set_rates(self, factor: float = 1.0) -> None:
        factor *= self.plan.schedule(self.index) if self.plan.schedule else 1.0
        for optimizer, base in zip(self.optimizers, self.base, strict=True):
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = rate * factor

    @torch.no_grad()
    def follow(self) -> None:
        if self.plan.average is None:
            return
        share = 1.0 if self.plan.first_copied and self.first else 1 - self.plan.average
        self.first = False
        for value, p in zip(self.average, self.model.parameters(), strict=True):
            value += share * (p - value)

    @torch.no_grad()
    def decay(self) -> None:
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            for p in group["params"]:
                p *= 1 - group["lr"] * group["weight_decay"]

    def count(self, more: int) -> None:
        for optimizer in self.optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if not optimizer.state[p]:
                    zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}
                optimizer.state[p]["step"] += more


def add(x: Sequence[Tensor | None], y: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(x, y, strict=True)]


def times(factor: float, x: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if each is None else factor * each for each in x]


def predicted(entry: Step, faults: Sequence[str]) -> list[Window]:
    """What the windows of an entry come to under these faults."""
    oracle = Oracle(entry, faults)
    return [oracle.window() for _ in range(entry.windows)]
