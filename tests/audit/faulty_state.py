"""Faulty steps: gradients of an earlier window, steps that do not take place, numbers that are none."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW

from tests.audit.steps import Plan, faulty, one
from tests.audit.tasks import DICTS, FIVE, HOLLOW, IGNORE, LANGUAGE, PICTURES, SINGLE, lm_loss, valid


@faulty("stale-gradient", structure="plain for loop", task=LANGUAGE, plan=Plan(one(SGD, lr=0.3)), windows=2)
def nobody_clears(model):
    optimizer = SGD(model.parameters(), lr=0.3)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()

    return step


@faulty(
    "stale-gradient",
    structure="torch.autograd.grad into own buffers",
    task=SINGLE,
    plan=Plan(one(AdamW, lr=0.05)),
    windows=3,
)
def buffers_that_are_made_once(model):
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=0.05)
    buffers = [torch.zeros_like(p) for p in parameters]

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            grads = torch.autograd.grad(lm_loss(model, tokens, labels, "sum") / N, parameters)
            for buffer, g in zip(buffers, grads, strict=True):
                buffer.add_(g)
        for p, buffer in zip(parameters, buffers, strict=True):
            p.grad = buffer.clone()
        optimizer.step()

    return step


@faulty(
    "stale-gradient",
    structure="step before the backward",
    task=PICTURES,
    plan=Plan(one(SGD, lr=0.5), delayed=True),
    windows=3,
)
def the_step_takes_the_gradient_of_the_window_before(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        optimizer.step()
        optimizer.zero_grad()
        count = sum(len(y) for _, y in microbatches)
        for x, y in microbatches:
            (F.cross_entropy(model(x), y, reduction="sum") / count).backward()

    return step


def embedding_apart(model):
    rest = [p for name, p in model.named_parameters() if name != "embedding.weight"]
    return [SGD([model.embedding.weight], lr=0.3), AdamW(rest, lr=0.05)]


@faulty(
    "stale-gradient",
    structure="several optimizers",
    task=LANGUAGE,
    plan=Plan(embedding_apart, kept=lambda name: name == "embedding.weight"),
    windows=2,
)
def one_of_two_optimizers_is_cleared(model):
    sparse = SGD(model.embedding.parameters(), lr=0.3)
    dense = AdamW([p for name, p in model.named_parameters() if "embedding" not in name], lr=0.05)

    def step(microbatches):
        dense.zero_grad()
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        sparse.step()
        dense.step()

    return step


@faulty(
    "carried-over",
    structure="enumerate and (i + 1) % K",
    task=FIVE,
    plan=Plan(one(SGD, lr=0.3), declared=4),
    windows=2,
)
def the_fifth_microbatch_waits_for_the_next_window(model):
    optimizer = SGD(model.parameters(), lr=0.3)
    accumulation_steps = 4

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches[:accumulation_steps])
        for i, (tokens, labels) in enumerate(microbatches):
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    return step


@faulty(
    "carried-over",
    structure="trainer class",
    task=FIVE.but(dtype=torch.float32),
    plan=Plan(one(Adam, lr=0.05), declared=3),
    windows=2,
)
def a_trainer_whose_count_starts_anew_and_its_gradient_does_not(model):
    class Trainer:
        K = 3

        def __init__(self):
            self.optimizer = Adam(model.parameters(), lr=0.05)

        def update(self, count):
            for p in model.parameters():
                p.grad.div_(count)
            self.optimizer.step()
            self.optimizer.zero_grad()

        def epoch(self, microbatches):
            count = 0
            for number, (tokens, labels) in enumerate(microbatches, 1):
                lm_loss(model, tokens, labels, "sum").backward()
                count += valid(labels)
                if number % self.K == 0:
                    self.update(count)
                    count = 0

    return Trainer().epoch


@faulty("no-step", structure="enumerate and (i + 1) % K", task=LANGUAGE, plan=Plan(one(SGD, lr=0.5)))
def a_counter_that_never_gets_there(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    accumulation_steps = 8

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for i, (tokens, labels) in enumerate(microbatches):
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    return step


@faulty("no-step", structure="optimizer of a copy", task=DICTS, plan=Plan(one(AdamW, lr=0.05)), windows=2)
def the_optimizer_belongs_to_a_copy(model):
    backup = copy.deepcopy(model)
    optimizer = AdamW(backup.parameters(), lr=0.05)

    def step(microbatches):
        optimizer.zero_grad()
        N = sum((mb["labels"][:, 1:] != IGNORE).sum() for mb in microbatches)
        for mb in microbatches:
            (lm_loss(model, mb["input_ids"], mb["labels"], "sum") / N).backward()
        optimizer.step()
        model.zero_grad()

    return step


@faulty("no-step", structure="GradScaler", task=SINGLE, plan=Plan(one(SGD, lr=0.5)))
def a_scale_that_always_overflows(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        scaler = GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            scaler.scale(lm_loss(model, tokens, labels, "sum") / N * 64).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@faulty("non-finite", structure="mask multiplied in", task=HOLLOW, plan=Plan(one(SGD, lr=0.5)))
def a_mean_over_nothing(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            target = labels[:, 1:]
            mask = (target != IGNORE).double()
            losses = F.cross_entropy(model(tokens)[:, :-1].mT, target.clamp(min=0), reduction="none")
            loss = (losses * mask).sum() / mask.sum()
            (loss * mask.sum() / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("non-finite", structure="loss scaled by hand", task=SINGLE, plan=Plan(one(SGD, lr=0.5)))
def scaled_beyond_the_largest_number(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    scale = 2.0**127

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (scale * lm_loss(model, tokens, labels, "sum")).backward()
        for p in model.parameters():
            p.grad.div_(scale * N)
        optimizer.step()
        optimizer.zero_grad()

    return step
