"""Faulty steps: what an optimizer remembers advances at every microbatch."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.audit.steps import Plan, faulty, one
from tests.audit.tasks import LANGUAGE, SINGLE, lm_loss, valid


class AccumulatingAdam(Optimizer):
    """Adam that is called at every microbatch, and moves at the last: its t counts the calls."""

    def __init__(self, params, lr, steps, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.steps, self.calls = steps, 0

    @torch.no_grad()
    def accumulate(self):
        self.calls += 1
        if self.calls % self.steps == 0:
            self.step()
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (first, second), t = group["betas"], self.calls
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 1 - first)
                v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                v.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                state["step"] = torch.tensor(float(t))
                p -= group["lr"] * m / (1 - first**t) / ((v / (1 - second**t)).sqrt() + group["eps"])


@faulty(
    "adam-count-per-microbatch",
    structure="own Optimizer subclass",
    task=LANGUAGE,
    plan=Plan(one(Adam, lr=0.05)),
    windows=2,
)
def an_adam_that_counts_its_calls(model):
    optimizer = AccumulatingAdam(model.parameters(), lr=0.05, steps=4)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            optimizer.accumulate()

    return step


@faulty(
    "adam-count-per-microbatch",
    structure="optimizer state set by hand",
    task=SINGLE,
    plan=Plan(one(AdamW, lr=0.05)),
    windows=3,
)
def the_count_is_restored_from_the_microbatches_seen(model):
    optimizer = AdamW(model.parameters(), lr=0.05)
    for p in model.parameters():
        zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}
    seen = 0

    def step(microbatches):
        nonlocal seen
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            seen += 1
        for state in optimizer.state.values():
            state["step"].fill_(seen - 1)
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty(
    "moments-per-microbatch",
    structure="optimizer stepped with lr 0",
    task=LANGUAGE,
    plan=Plan(one(AdamW, lr=0.05, weight_decay=0.1)),
    windows=2,
)
def steps_without_a_learning_rate_feed_the_moments(model):
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.1)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for i, (tokens, labels) in enumerate(microbatches, 1):
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            optimizer.param_groups[0]["lr"] = 0.05 if i == len(microbatches) else 0.0
            optimizer.step()
            optimizer.zero_grad()

    return step


class LazyAdam(Optimizer):
    """Adam that updates its moments with every gradient it is shown, and moves the parameters when it is due."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None, move=True):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                if move:
                    root = (state["exp_avg_sq"] / (1 - 0.999 ** state["step"])).sqrt().add_(1e-8)
                    p.addcdiv_(state["exp_avg"] / (1 - 0.9 ** state["step"]), root, value=-group["lr"])


@faulty(
    "moments-per-microbatch",
    structure="own Optimizer subclass",
    task=LANGUAGE,
    plan=Plan(one(Adam, lr=0.05), cleared=False, unmoved=True),
    windows=2,
)
def moments_updated_with_every_running_sum(model):
    optimizer = LazyAdam(model.parameters(), lr=0.05)

    def step(microbatches):
        optimizer.zero_grad()
        N = sum(valid(labels) for _, labels in microbatches)
        for at, (tokens, labels) in enumerate(microbatches):
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            optimizer.step(move=at == len(microbatches) - 1)

    return step


@faulty(
    "momentum-per-microbatch",
    structure="optimizer stepped with lr 0",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.5, momentum=0.9)),
    windows=2,
)
def steps_without_a_learning_rate_feed_the_momentum(model):
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        last = len(microbatches) - 1
        for i, (tokens, labels) in enumerate(microbatches):
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.5 * (i == last)
            optimizer.step()
            optimizer.zero_grad()

    return step


class HeavyBall(Optimizer):
    """SGD whose velocity takes in every gradient that is added, and which moves by the velocity."""

    def __init__(self, params, lr, momentum):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None, move=True):
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                velocity.mul_(group["momentum"]).add_(p.grad)
                if move:
                    p.sub_(velocity, alpha=group["lr"])
        self.zero_grad()


@faulty(
    "momentum-per-microbatch",
    structure="own Optimizer subclass",
    task=SINGLE,
    plan=Plan(one(SGD, lr=0.2, momentum=0.8), unmoved=True),
    windows=3,
)
def a_velocity_that_takes_in_every_gradient(model):
    optimizer = HeavyBall(model.parameters(), lr=0.2, momentum=0.8)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches[:-1]:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            optimizer.step(move=False)
        tokens, labels = microbatches[-1]
        (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()

    return step
