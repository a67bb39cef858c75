"""Faulty steps: the schedule advances K times, or W times, for one update."""

from __future__ import annotations

from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR

from tests.audit.right_optimizers import accumulate, one_cycle
from tests.audit.steps import Plan, faulty, one
from tests.audit.tasks import LANGUAGE, SINGLE, THREE, lm_loss, valid


def warmup(index):
    return min(1.0, (index + 1) / 20)


@faulty(
    "schedule-per-microbatch",
    structure="LambdaLR",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.5), schedule=warmup),
    windows=2,
)
def a_warmup_that_counts_microbatches(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = LambdaLR(optimizer, lambda index: min(1.0, (index + 1) / 20))
    accumulation_steps = 4

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for i, (tokens, labels) in enumerate(microbatches):
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        for _ in range(accumulation_steps):
            scheduler.step()

    return step


@faulty(
    "schedule-per-microbatch",
    structure="own schedule that sets lr",
    task=SINGLE,
    plan=Plan(one(AdamW, lr=0.1), schedule=lambda index: 0.9**index),
    windows=3,
)
def an_own_schedule_of_the_microbatches_seen(model):
    optimizer = AdamW(model.parameters(), lr=0.1)
    global_step = 0

    def step(microbatches):
        nonlocal global_step
        N = sum(valid(labels) for _, labels in microbatches)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**global_step
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            global_step += 1
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**global_step

    return step


@faulty(
    "schedule-per-microbatch",
    structure="OneCycleLR",
    task=THREE,
    plan=Plan(one(Adam, lr=0.1), schedule=one_cycle),
    windows=2,
)
def one_cycle_that_ends_three_times_too_early(model):
    optimizer = Adam(model.parameters(), lr=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)

    def step(microbatches):
        accumulate(model, microbatches)
        optimizer.step()
        optimizer.zero_grad()
        for _ in microbatches:
            scheduler.step()

    return step


@faulty(
    "schedule-per-process",
    structure="wrapped scheduler",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.5), schedule=lambda index: 0.8**index, processes=2),
    windows=2,
)
def a_wrapper_that_steps_for_every_process(model):
    class Prepared:
        def __init__(self, scheduler, num_processes):
            self.scheduler, self.num_processes = scheduler, num_processes

        def step(self):
            for _ in range(self.num_processes):
                self.scheduler.step()

    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = Prepared(LambdaLR(optimizer, lambda index: 0.8**index), num_processes=2)

    def step(microbatches):
        accumulate(model, microbatches)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return step


@faulty(
    "schedule-per-process",
    structure="LinearLR",
    task=SINGLE,
    plan=Plan(one(AdamW, lr=0.05), schedule=lambda index: min(1.0, 0.1 + 0.9 * index / 50), processes=8),
    windows=3,
)
def a_linear_warmup_in_samples_of_eight_replicas(model):
    optimizer = AdamW(model.parameters(), lr=0.05)
    scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=50)
    replicas = 8

    def step(microbatches):
        optimizer.zero_grad()
        accumulate(model, microbatches)
        optimizer.step()
        [scheduler.step() for _ in range(replicas)]

    return step
