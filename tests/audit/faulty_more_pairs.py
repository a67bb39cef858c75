"""Faulty steps with two faults or three, and single ones in steps that have more to them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from tests.audit.steps import Plan, faulty, one
from tests.audit.tasks import FIVE, IGNORE, LANGUAGE, ROWS, SINGLE, THREE, lm_loss, valid


@faulty(
    "tail-divided-by-k",
    "schedule-per-process",
    structure="wrapped scheduler",
    task=THREE,
    plan=Plan(one(SGD, lr=0.5), declared=8, schedule=lambda i: 0.7**i, processes=2),
    windows=2,
)
def a_tail_over_k_and_a_schedule_for_two_processes(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = LambdaLR(optimizer, lambda i: 0.7**i)
    accumulation_steps, num_processes = 8, 2

    def step(microbatches):
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels) / accumulation_steps).backward()
        optimizer.step()
        for _ in range(num_processes):
            scheduler.step()
        optimizer.zero_grad()

    return step


@faulty(
    "step-per-microbatch",
    "sequence-means",
    structure="microbatches are dataclasses",
    task=ROWS,
    plan=Plan(one(AdamW, lr=0.02)),
)
def sequence_means_with_a_step_for_each_microbatch(model):
    optimizer = AdamW(model.parameters(), lr=0.02)

    def step(microbatches):
        B = sum(len(rows.labels) for rows in microbatches)
        for rows in microbatches:
            kept = (rows.labels[:, 1:] != IGNORE).sum(1)
            losses = lm_loss(model, rows.tokens, rows.labels, "none").sum(1) / kept
            (losses.sum() / B).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


@faulty(
    "step-per-microbatch",
    "mean-of-means",
    structure="plain for loop",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.5, momentum=0.9)),
)
def means_over_k_and_a_step_for_each(model):
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)

    def step(microbatches):
        for tokens, labels in microbatches:
            optimizer.zero_grad()
            loss = lm_loss(model, tokens, labels) / len(microbatches)
            loss.backward()
            optimizer.step()

    return step


@faulty(
    "token-sum",
    "stale-gradient",
    structure="torch.autograd.grad into own buffers",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.005)),
    windows=2,
)
def sums_in_buffers_that_are_never_emptied(model):
    optimizer = SGD(model.parameters(), lr=0.005)
    buffers = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def step(microbatches):
        for tokens, labels in microbatches:
            names, parameters = zip(*model.named_parameters(), strict=True)
            grads = torch.autograd.grad(lm_loss(model, tokens, labels, "sum"), parameters)
            for name, g in zip(names, grads, strict=True):
                buffers[name] += g
        for name, p in model.named_parameters():
            p.grad = buffers[name]
        optimizer.step()

    return step


@faulty(
    "schedule-per-microbatch",
    "clip-per-microbatch",
    structure="trainer class",
    task=SINGLE,
    plan=Plan(one(AdamW, lr=0.05), max_norm=0.1, schedule=lambda i: min(1.0, (i + 1) / 10)),
    windows=2,
)
def a_trainer_that_clips_and_schedules_in_the_loop(model):
    class Trainer:
        def __init__(self):
            self.optimizer = AdamW(model.parameters(), lr=0.05)
            self.scheduler = LambdaLR(self.optimizer, lambda i: min(1.0, (i + 1) / 10))

        def microbatch(self, tokens, labels, N):
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        def window(self, microbatches):
            N = sum(valid(labels) for _, labels in microbatches)
            for tokens, labels in microbatches:
                self.microbatch(tokens, labels, N)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for _ in range(len(microbatches)):
                self.scheduler.step()

    return Trainer().window


@faulty(
    "clip-per-microbatch",
    "mean-of-means",
    "schedule-per-microbatch",
    structure="plain for loop",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.5), max_norm=0.2, schedule=lambda i: 0.9**i),
    windows=2,
)
def three_faults_of_one_habit(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = LambdaLR(optimizer, lambda i: 0.9**i)

    def step(microbatches):
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels) / len(microbatches)).backward()
            clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        for _ in microbatches:
            scheduler.step()
        optimizer.zero_grad()

    return step


@faulty(
    "mean-of-means",
    "carried-over",
    structure="enumerate and (i + 1) % K",
    task=FIVE,
    plan=Plan(one(SGD, lr=0.3), declared=4),
    windows=2,
)
def means_over_k_and_a_fifth_that_waits(model):
    optimizer = SGD(model.parameters(), lr=0.3)
    K = 4

    def step(microbatches):
        for i, (tokens, labels) in enumerate(microbatches):
            (lm_loss(model, tokens, labels) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

    return step


@faulty(
    "mean-of-means", structure="microbatches shuffled inside", task=SINGLE, plan=Plan(one(AdamW, lr=0.05)), windows=2
)
def means_over_k_in_another_order_with_a_fused_optimizer(model):
    optimizer = AdamW(model.parameters(), lr=0.05, fused=True)
    generator = torch.Generator().manual_seed(2)

    def step(microbatches):
        order = torch.randperm(len(microbatches), generator=generator)
        for at in order.tolist():
            tokens, labels = microbatches[at]
            (lm_loss(model, tokens, labels) / len(order)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def matrices_and_vectors(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() == d], "weight_decay": 0.1 * (d - 1)} for d in (1, 2)]
    return [AdamW(groups, lr=0.05)]


@faulty(
    "double-division",
    structure="frozen parameters in groups",
    task=LANGUAGE,
    plan=Plan(matrices_and_vectors),
)
def divided_twice_with_a_frozen_embedding(model):
    model.embedding.weight.requires_grad = False
    trained = [p for p in model.parameters() if p.requires_grad]
    vectors, matrices = [p for p in trained if p.ndim == 1], [p for p in trained if p.ndim == 2]
    optimizer = AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}], lr=0.05)

    def step(microbatches):
        optimizer.zero_grad(set_to_none=True)
        batch_tokens = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            mean = lm_loss(model, tokens, labels, "sum") / batch_tokens
            (mean / len(microbatches)).backward()
        optimizer.step()

    return step
