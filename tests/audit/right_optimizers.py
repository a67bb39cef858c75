"""Right steps: several optimizers, groups, an optimizer of one's own, schedules and averages of the weights."""

from __future__ import annotations

import math

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.audit.steps import Plan, one, right
from tests.audit.tasks import LANGUAGE, SINGLE, lm_loss, valid


def accumulate(model, microbatches):
    """The right gradient, for steps that are about what follows it."""
    N = sum(valid(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        (lm_loss(model, tokens, labels, "sum") / N).backward()


class Lion(Optimizer):
    """Sign of an interpolation between the gradient and its average."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * average.lerp(p.grad, 1 - group["betas"][0]).tanh())
                average.lerp_(p.grad, 1 - group["betas"][1])


@right("own Optimizer subclass", LANGUAGE, Plan(one(Lion, lr=0.05, weight_decay=0.1)), windows=2)
def an_optimizer_of_ones_own(model):
    optimizer = Lion(model.parameters(), lr=0.05, weight_decay=0.1)

    def step(microbatches):
        accumulate(model, microbatches)
        optimizer.step()
        optimizer.zero_grad()

    return step


def embedding_and_rest(model):
    rest = [p for name, p in model.named_parameters() if not name.startswith("embedding")]
    return [SGD(model.embedding.parameters(), lr=1.0), AdamW(rest, lr=0.05)]


@right("several optimizers", LANGUAGE, Plan(embedding_and_rest), windows=2)
def one_optimizer_for_the_embedding_and_one_for_the_rest(model):
    embedding = SGD([model.embedding.weight], lr=1.0)
    rest = AdamW([*model.norm.parameters(), *model.up.parameters(), *model.down.parameters(), model.head.weight], 0.05)

    def step(microbatches):
        accumulate(model, microbatches)
        for optimizer in (embedding, rest):
            optimizer.step()
            optimizer.zero_grad()

    return step


def two_groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [AdamW([{"params": matrices}, {"params": vectors, "lr": 0.01, "weight_decay": 0.0}], 0.05, weight_decay=0.2)]


@right("parameter groups", LANGUAGE, Plan(two_groups), windows=2)
def groups_with_and_without_decay(model):
    decayed = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    plain = [p for name, p in model.named_parameters() if name not in decayed]
    groups = [{"params": decayed.values(), "weight_decay": 0.2}, {"params": plain, "weight_decay": 0.0, "lr": 0.01}]
    optimizer = AdamW(groups, lr=0.05)

    def step(microbatches):
        optimizer.zero_grad()
        accumulate(model, microbatches)
        optimizer.step()

    return step


@right("optimizers run by gradient hooks", LANGUAGE, Plan(lambda m: [SGD([p], lr=0.5) for p in m.parameters()]))
def stepped_by_hooks_as_soon_as_a_gradient_is_there(model):
    optimizers = {p: SGD([p], lr=0.5) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        torch.stack([lm_loss(model, *each, "sum") for each in microbatches]).sum().div(N).backward()

    return step


def warmup(index):
    return min(1.0, index / 2)


@right("LambdaLR", LANGUAGE, Plan(one(SGD, lr=0.5), schedule=warmup), windows=3)
def warmup_from_zero(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = LambdaLR(optimizer, lambda index: min(1.0, index / 2))

    def step(microbatches):
        accumulate(model, microbatches)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return step


def one_cycle(index):
    """Share of max_lr over 10 steps: a cosine from 1/25 to 1 until step 2, then one down to 1/250,000 at step 9."""
    start, end = (1 / 25, 1.0) if index <= 2 else (1.0, 1 / 250_000)
    progress = index / 2 if index <= 2 else (index - 2) / 7
    return end + (start - end) / 2 * (1 + math.cos(math.pi * progress))


@right("OneCycleLR", LANGUAGE, Plan(one(AdamW, lr=0.1), schedule=one_cycle), windows=3)
def one_cycle_of_ten_updates(model):
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)

    def step(microbatches):
        accumulate(model, microbatches)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    return step


@right("own schedule that sets lr", SINGLE, Plan(one(Adam, lr=0.1), schedule=lambda i: 0.5**i), windows=3)
def halved_after_every_update(model):
    optimizer = Adam(model.parameters(), lr=0.1)
    updates = 0

    def step(microbatches):
        nonlocal updates
        accumulate(model, microbatches)
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5**updates

    return step


@right("AveragedModel", LANGUAGE, Plan(one(SGD, lr=0.5), average=0.9, first_copied=True), windows=2)
def averaged_model(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(microbatches):
        accumulate(model, microbatches)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)

    return step


@right("own average of the weights", LANGUAGE, Plan(one(AdamW, lr=0.05), average=0.8), windows=2)
def own_average(model):
    optimizer = AdamW(model.parameters(), lr=0.05)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(microbatches):
        accumulate(model, microbatches)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            average[name].mul_(0.8).add_(p.detach(), alpha=0.2)

    return step
