"""Steps built as training frameworks build theirs, in plain torch: what each is meant to do, and its faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from tests.audit.tasks import IGNORE, LANGUAGE, SINGLE, Task, language, lm_loss, valid

Step = Callable[[list[Any]], None]


@dataclass(frozen=True)
class Alike:
    """A step, its words, and the algebra of what it does: the weight of each microbatch's sum, by n and rows."""

    name: str
    faults: tuple[str, ...]
    task: Task
    weights: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    max_norm: float | None
    each: bool  # whether every microbatch is stepped with by itself
    make: Callable[[nn.Module], Step]

    def build(self) -> tuple[nn.Module, Step]:
        model = self.task.model()
        return model, self.make(model)


ALIKE: list[Alike] = []


def right(n: Tensor, rows: Tensor) -> Tensor:
    return torch.ones_like(n) / n.sum()


def means(n: Tensor, rows: Tensor) -> Tensor:
    return 1 / (len(n) * n)


def by_rows(n: Tensor, rows: Tensor) -> Tensor:
    return rows / rows.sum() / n


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.01)


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.05)


def alike(
    *faults: str,
    weights: Any = right,
    optimizer: Any = adam,
    task: Task = LANGUAGE,
    max_norm: float | None = None,
    each: bool = False,
    name: str = "",
) -> Callable[[Callable[[nn.Module], Step]], Callable[[nn.Module], Step]]:
    def add(make: Callable[[nn.Module], Step]) -> Callable[[nn.Module], Step]:
        ALIKE.append(Alike(name or make.__name__, faults, task, weights, optimizer, max_norm, each, make))
        return make

    return add


def total(window: list[Any]) -> int:
    return sum(valid(labels) for _, labels in window)


# Copies of the weights in float32, one for each or one flat, and buffers of their own for the gradient


def masters(model: nn.Module, kind: Any, flat: bool, mean: bool, max_norm: float | None) -> Step:
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    copies = [nn.Parameter(p.detach().float().clone()) for p in parameters]
    if flat:
        copies = [nn.Parameter(torch.cat([p.detach().float().reshape(-1) for p in parameters]))]
    main = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    optimizer = kind(copies)

    def collected(at: int) -> Callable[[nn.Parameter], None]:
        def hook(p: nn.Parameter) -> None:
            main[at].add_(p.grad.float())
            p.grad = None

        return hook

    for at, p in enumerate(parameters):
        p.register_post_accumulate_grad_hook(collected(at))

    def step(window: list[Any]) -> None:
        N = total(window)
        for tokens, labels in window:
            loss = lm_loss(model, tokens, labels, "sum")
            (loss / (len(window) * valid(labels) if mean else N)).backward()
        gradients = [torch.cat([g.reshape(-1) for g in main])] if flat else [g.clone() for g in main]
        for copy, g in zip(copies, gradients, strict=True):
            copy.grad = g
        if max_norm is not None:
            clip_grad_norm_((copy for copy in copies) if flat else copies, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        parts = copies[0].detach().split(sizes) if flat else copies
        for p, part, g in zip(parameters, parts, main, strict=True):
            p.data.copy_(part.detach().reshape(p.shape))
            g.zero_()

    return step


HALF = SINGLE.but(dtype=torch.bfloat16)
for word in ((), ("mean-of-means",)):
    for kind in (adam, sgd):
        for flat in (False, True):
            for limit in (None, 0.1):
                for where in (SINGLE, HALF):

                    def make(model, kind=kind, flat=flat, word=word, limit=limit):
                        return masters(model, kind, flat, bool(word), limit)

                    called = f"masters_{kind.__name__}_{'flat' if flat else 'each'}_{limit}_{where.dtype}_{bool(word)}"
                    alike(
                        *word,
                        weights=means if word else right,
                        optimizer=kind,
                        task=where,
                        max_norm=limit,
                        name=called.replace("torch.", ""),
                    )(make)


@alike("step-per-microbatch", each=True)
def copies_that_step_at_every_microbatch(model):
    parameters = list(model.parameters())
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = adam(copies)

    def step(window):
        N = total(window)
        for tokens, labels in window:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            for p, copy in zip(parameters, copies, strict=True):
                copy.grad, p.grad = p.grad, None
            optimizer.step()
            torch._foreach_copy_([p.detach() for p in parameters], [copy.detach() for copy in copies])

    return step


# Optimizers that wait, that are called in hooks, that call another, or that are none


class Waiting(Optimizer):
    """Adds gradients up in its own state, and moves the weights at every fourth call."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p].setdefault("sum", torch.zeros_like(p))
                held += p.grad
                if self.calls % 4 == 0:
                    p -= group["lr"] * held
                    held.zero_()


@alike(optimizer=sgd)
def an_optimizer_that_adds_up(model):
    optimizer = Waiting(model.parameters(), lr=0.05)

    def step(window):
        for tokens, labels in window:
            optimizer.zero_grad()
            (lm_loss(model, tokens, labels, "sum") / total(window)).backward()
            optimizer.step()

    return step


@alike("mean-of-means", weights=means, optimizer=sgd)
def an_optimizer_that_adds_means_up(model):
    optimizer = Waiting(model.parameters(), lr=0.05)

    def step(window):
        for tokens, labels in window:
            optimizer.zero_grad()
            (lm_loss(model, tokens, labels) / 4).backward()
            optimizer.step()

    return step


class WaitingAdam(AdamW):
    """The same for AdamW, which is called with the mean of four."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            self.sums[p] = self.sums.get(p, 0.0) + p.grad
        if self.calls % 4 == 0:
            for p in parameters:
                p.grad = self.sums.pop(p) / 4
            super().step()


@alike("mean-of-means", weights=means)
def an_optimizer_that_waits_for_the_mean(model):
    optimizer = WaitingAdam(model.parameters(), lr=0.01)

    def step(window):
        for tokens, labels in window:
            optimizer.zero_grad()
            lm_loss(model, tokens, labels).backward()
            optimizer.step()

    return step


class Signs(Waiting):
    """Adds gradients up, and moves the weights by the signs of their sum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            held = self.state[p].setdefault("sum", torch.zeros_like(p))
            held += p.grad
            if self.calls % 4 == 0:
                p -= 0.001 * held.sign()
                held.zero_()


def signs(model: nn.Module, mean: bool) -> Step:
    """No length of the gradient can be seen from outside."""
    optimizer = Signs(model.parameters(), lr=0.001)

    def step(window: list[Any]) -> None:
        for tokens, labels in window:
            optimizer.zero_grad()
            loss = lm_loss(model, tokens, labels, "sum")
            (loss / (valid(labels) if mean else 1)).backward()
            optimizer.step()

    return step


def in_hooks(model: nn.Module, kind: Any) -> list[bool]:
    """Each parameter has an optimizer, called as soon as its gradient is complete; only while the flag is up."""
    now = [True]

    def hook(p: nn.Parameter) -> None:
        if now[0]:
            optimizers[p].step()
            optimizers[p].zero_grad()

    optimizers = {p: kind([p]) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return now


@alike("mean-of-means", "step-per-microbatch", weights=means, each=True)
def steps_in_every_backward(model):
    in_hooks(model, adam)

    def step(window):
        for tokens, labels in window:
            (lm_loss(model, tokens, labels) / len(window)).backward()

    return step


def steps_in_the_last_backward(model: nn.Module, mean: bool) -> Step:
    now = in_hooks(model, adam)

    def step(window: list[Any]) -> None:
        N = total(window)
        for at, (tokens, labels) in enumerate(window):
            now[0] = at == len(window) - 1
            loss = lm_loss(model, tokens, labels, "sum")
            (loss / (len(window) * valid(labels) if mean else N)).backward()

    return step


alike(name="steps_in_the_last_backward")(lambda model: steps_in_the_last_backward(model, False))
alike("mean-of-means", weights=means, name="means_in_the_last_backward")(
    lambda model: steps_in_the_last_backward(model, True)
)


@alike("step-per-microbatch", optimizer=sgd, each=True)
def weights_moved_in_every_backward(model):
    def hook(p):
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.05)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def step(window):
        for tokens, labels in window:
            (lm_loss(model, tokens, labels, "sum") / total(window)).backward()

    return step


class Synchronizing(AdamW):
    """Divides the gradient inside its step, and then calls the step that it stands in for."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad /= 4
        return super().step(closure)


@alike("mean-of-means", weights=means)
def an_optimizer_that_divides_inside(model):
    optimizer = Synchronizing(model.parameters(), lr=0.01)

    def step(window):
        optimizer.zero_grad()
        for tokens, labels in window:
            lm_loss(model, tokens, labels).backward()
        optimizer.step()

    return step


def by_hand(model: nn.Module, mean: bool) -> Step:
    parameters = list(model.parameters())
    first, second, steps = [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters], [0]

    @torch.no_grad()
    def update() -> None:
        steps[0] += 1
        for p, m, v in zip(parameters, first, second, strict=True):
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.mul_(1 - 0.01 * 0.01)
            scale = (v / (1 - 0.999 ** steps[0])).sqrt() + 1e-8
            p.data.addcdiv_(m / (1 - 0.9 ** steps[0]), scale, value=-0.01)
            p.grad.zero_()

    def step(window: list[Any]) -> None:
        N = total(window)
        for tokens, labels in window:
            loss = lm_loss(model, tokens, labels, "sum")
            (loss / (len(window) * valid(labels) if mean else N)).backward()
        update()

    return step


alike(name="adam_by_hand")(lambda model: by_hand(model, False))
alike("mean-of-means", weights=means, name="adam_by_hand_on_means")(lambda model: by_hand(model, True))


# Losses


@alike(
    "mean-of-means",
    weights=by_rows,
    task=LANGUAGE.but(microbatches=language((9, 4, 2), (8, 9), (3, 2, 5, 7), (2, 3))),
)
def means_by_rows_in_a_closure(model):
    optimizer = adam(list(model.parameters()))

    def step(window):
        rows = sum(len(tokens) for tokens, _ in window)

        def closure():
            optimizer.zero_grad()
            for tokens, labels in window:
                (lm_loss(model, tokens, labels) * len(tokens) / rows).backward()

        optimizer.step(closure)

    return step


@alike("token-sum", weights=lambda n, rows: torch.ones_like(n) / len(n))
def sums_over_the_accumulation_steps(model):
    optimizer = adam(list(model.parameters()))

    def step(window):
        for tokens, labels in window:
            (lm_loss(model, tokens, labels, "sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def half_inside(model: nn.Module, divisor: Callable[[list[Any], Tensor], float]) -> Step:
    """A forward that is patched to compute in bfloat16, as a wrapper's is."""
    forward, optimizer = model.forward, adam(list(model.parameters()))

    def patched(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(tokens)

    model.forward = patched  # type: ignore[method-assign]

    def step(window: list[Any]) -> None:
        for tokens, labels in window:
            logits = model(tokens)[:, :-1].float().transpose(1, 2)
            loss = F.cross_entropy(logits, labels[:, 1:], ignore_index=IGNORE, reduction="sum")
            (loss / divisor(window, labels)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


alike(task=SINGLE, name="half_precision_in_the_forward")(
    lambda model: half_inside(model, lambda window, labels: total(window))
)
alike("mean-of-means", weights=means, task=SINGLE, name="means_of_half_precision_in_the_forward")(
    lambda model: half_inside(model, lambda window, labels: len(window) * valid(labels))
)


@alike("stale-gradient")
def own_buffers_that_nobody_clears(model):
    parameters = list(model.parameters())
    main, optimizer = [torch.zeros_like(p) for p in parameters], adam(parameters)

    def step(window):
        for tokens, labels in window:
            (lm_loss(model, tokens, labels, "sum") / total(window)).backward()
            for g, p in zip(main, parameters, strict=True):
                g += p.grad
                p.grad = None
        for g, p in zip(main, parameters, strict=True):
            p.grad = g.clone()
        optimizer.step()
        optimizer.zero_grad()

    return step
