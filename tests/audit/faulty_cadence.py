"""Faulty steps: what advances at every microbatch: the optimizer, the decay, the average of the weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.audit.steps import Plan, faulty, one
from tests.audit.tasks import DICTS, LANGUAGE, PICTURES, SINGLE, lm_loss, valid


@faulty("step-per-microbatch", structure="plain for loop", task=LANGUAGE, plan=Plan(one(AdamW, lr=0.05)))
def the_step_is_indented_once_too_often(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            loss = lm_loss(model, tokens, labels, "sum") / N
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


@faulty(
    "step-per-microbatch",
    structure="enumerate and (i + 1) % K",
    task=PICTURES,
    plan=Plan(one(SGD, lr=0.5, momentum=0.9), cleared=False),
)
def stepped_in_the_loop_and_cleared_behind_it(model):
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    accumulation_steps = 4

    def step(microbatches):
        images = sum(len(y) for _, y in microbatches)
        for i, (x, y) in enumerate(microbatches):
            (F.cross_entropy(model(x), y, reduction="sum") / images).backward()
            optimizer.step()
            if (i + 1) % accumulation_steps == 0:
                optimizer.zero_grad()

    return step


@faulty("step-per-microbatch", structure="optimizer.step(closure)", task=SINGLE, plan=Plan(one(SGD, lr=0.5)))
def a_closure_for_every_microbatch(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for microbatch in microbatches:

            def closure(microbatch=microbatch):
                optimizer.zero_grad()
                loss = lm_loss(model, *microbatch, "sum") / N
                loss.backward()
                return loss

            optimizer.step(closure)

    return step


@faulty(
    "decay-per-microbatch", structure="decay by hand", task=LANGUAGE, plan=Plan(one(AdamW, lr=0.1, weight_decay=0.3))
)
def decayed_in_the_loop(model):
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.0)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 - 0.1 * 0.3)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Decoupled(Optimizer):
    """SGD that decays whenever it is asked to, and moves when it is told to."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def decay(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * group["weight_decay"] * p

    @torch.no_grad()
    def step(self, closure=None):
        self.decay()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad


@faulty(
    "decay-per-microbatch",
    structure="own Optimizer subclass",
    task=DICTS,
    plan=Plan(one(Decoupled, lr=0.5, weight_decay=0.05)),
    windows=2,
)
def an_optimizer_that_decays_at_every_accumulation(model):
    optimizer = Decoupled(model.parameters(), lr=0.5, weight_decay=0.05)

    def step(microbatches):
        N = sum(valid(mb["labels"]) for mb in microbatches)
        for i, mb in enumerate(microbatches):
            (lm_loss(model, mb["input_ids"], mb["labels"], "sum") / N).backward()
            if i < len(microbatches) - 1:
                optimizer.decay()
            else:
                optimizer.step()
        optimizer.zero_grad()

    return step


@faulty(
    "ema-per-microbatch",
    structure="AveragedModel",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.5), average=0.9, first_copied=True),
    windows=2,
)
def an_averaged_model_updated_in_the_loop(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for i, (tokens, labels) in enumerate(microbatches):
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            if i + 1 == len(microbatches):
                optimizer.step()
                optimizer.zero_grad()
            average.update_parameters(model)

    return step


@faulty(
    "ema-per-microbatch",
    structure="trainer class",
    task=SINGLE,
    plan=Plan(one(AdamW, lr=0.05), average=0.8),
    windows=3,
)
def a_trainer_whose_average_follows_every_call(model):
    class Trainer:
        def __init__(self):
            self.optimizer = AdamW(model.parameters(), lr=0.05)
            self.average = [p.detach().clone() for p in model.parameters()]

        def micro_step(self, tokens, labels, N, update):
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            if update:
                self.optimizer.step()
                self.optimizer.zero_grad()
            for a, p in zip(self.average, model.parameters(), strict=True):
                a.lerp_(p.detach(), 0.2)

        def step(self, microbatches):
            N = sum(valid(labels) for _, labels in microbatches)
            for i, (tokens, labels) in enumerate(microbatches):
                self.micro_step(tokens, labels, N, update=i == len(microbatches) - 1)

    return Trainer().step
