"""Faulty steps with two faults: wrong weights, and something else."""

from __future__ import annotations

import torch.nn.functional as F
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.audit.steps import Plan, faulty, one
from tests.audit.tasks import DICTS, LANGUAGE, PICTURES, SINGLE, lm_loss, valid


@faulty(
    "mean-of-means",
    "clip-per-microbatch",
    structure="plain for loop",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.5), max_norm=0.3),
)
def means_over_k_clipped_in_the_loop(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        for tokens, labels in microbatches:
            loss = lm_loss(model, tokens, labels) / len(microbatches)
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty(
    "token-sum",
    "clip-per-microbatch",
    structure="trainer class",
    task=SINGLE,
    plan=Plan(one(Adam, lr=0.05), max_norm=10.0),
    windows=2,
)
def sums_clipped_in_the_loop_and_hidden_by_adam(model):
    class Trainer:
        def __init__(self):
            self.optimizer, self.max_norm = Adam(model.parameters(), lr=0.05), 10.0

        def backward(self, tokens, labels):
            lm_loss(model, tokens, labels, "sum").backward()
            clip_grad_norm_(model.parameters(), self.max_norm)

        def step(self, microbatches):
            self.optimizer.zero_grad()
            for tokens, labels in microbatches:
                self.backward(tokens, labels)
            self.optimizer.step()

    return Trainer().step


@faulty(
    "step-per-microbatch",
    "schedule-per-microbatch",
    structure="LambdaLR",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.5), schedule=lambda i: 0.9**i),
    windows=2,
)
def everything_stands_in_the_loop(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = LambdaLR(optimizer, lambda i: 0.9**i)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return step


@faulty(
    "step-per-microbatch",
    "ema-per-microbatch",
    structure="own average of the weights",
    task=LANGUAGE,
    plan=Plan(one(AdamW, lr=0.02), average=0.9),
    windows=2,
)
def step_and_average_in_the_loop(model):
    optimizer = AdamW(model.parameters(), lr=0.02)
    average = [p.detach().clone() for p in model.parameters()]

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            optimizer.zero_grad()
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            optimizer.step()
            for a, p in zip(average, model.parameters(), strict=True):
                a.mul_(0.9).add_(p.detach(), alpha=0.1)

    return step


@faulty(
    "last-microbatch-only",
    "schedule-per-microbatch",
    structure="LambdaLR",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.5), schedule=lambda i: 1 / (1 + i)),
    windows=2,
)
def cleared_and_scheduled_in_the_loop(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = LambdaLR(optimizer, lambda i: 1 / (1 + i))

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for i, (tokens, labels) in enumerate(microbatches):
            optimizer.zero_grad()
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            if i == len(microbatches) - 1:
                optimizer.step()
        for _ in microbatches:
            scheduler.step()

    return step


@faulty(
    "stale-gradient",
    "mean-of-means",
    structure="microbatches are dicts",
    task=DICTS,
    plan=Plan(one(SGD, lr=0.3, momentum=0.5)),
    windows=2,
)
def means_over_k_and_nobody_clears(model):
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.5)

    def step(microbatches):
        for mb in microbatches:
            loss = lm_loss(model, mb["input_ids"], mb["labels"])
            (loss / len(microbatches)).backward()
        optimizer.step()

    return step


@faulty(
    "mean-of-means",
    "schedule-per-microbatch",
    structure="own schedule that sets lr",
    task=SINGLE,
    plan=Plan(one(AdamW, lr=0.1), schedule=lambda i: 0.95**i),
    windows=2,
)
def means_over_k_and_a_schedule_of_microbatches(model):
    optimizer = AdamW(model.parameters(), lr=0.1)
    seen = 0

    def step(microbatches):
        nonlocal seen
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels) / len(microbatches)).backward()
            seen += 1
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 * 0.95**seen

    return step


@faulty(
    "clip-scaled",
    "mean-of-means",
    structure="GradScaler",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=5.0), max_norm=1.0, scale=256.0),
)
def means_over_k_clipped_while_scaled(model):
    optimizer = SGD(model.parameters(), lr=5.0)
    scaler = GradScaler("cpu", init_scale=256.0)

    def step(microbatches):
        for tokens, labels in microbatches:
            loss = lm_loss(model, tokens, labels)
            scaler.scale(loss / len(microbatches)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@faulty(
    "unscale-early",
    "mean-of-means",
    structure="GradScaler",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.01), scale=8.0),
)
def means_over_k_unscaled_after_the_first(model):
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=8.0)

    def step(microbatches):
        optimizer.zero_grad()
        first = True
        for tokens, labels in microbatches:
            scaler.scale(lm_loss(model, tokens, labels) / len(microbatches)).backward()
            if first:
                scaler.unscale_(optimizer)
                first = False
        scaler.step(optimizer)
        scaler.update()

    return step


@faulty(
    "sum-of-means",
    "ema-per-microbatch",
    structure="AveragedModel",
    task=PICTURES,
    plan=Plan(one(SGD, lr=0.1), average=0.5, first_copied=True),
    windows=2,
)
def undivided_and_averaged_in_the_loop(model):
    optimizer = SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def step(microbatches):
        for at, (x, y) in enumerate(microbatches, 1):
            F.cross_entropy(model(x), y).backward()
            if at == len(microbatches):
                optimizer.step()
                optimizer.zero_grad()
            average.update_parameters(model)

    return step


@faulty(
    "padded-count",
    "decay-per-microbatch",
    structure="decay by hand",
    task=LANGUAGE,
    plan=Plan(one(AdamW, lr=0.1, weight_decay=0.2)),
)
def padding_counted_and_decayed_in_the_loop(model):
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.2)

    def step(microbatches):
        count = sum((labels[:, 1:] == labels[:, 1:]).sum() for _, labels in microbatches)
        for at, (tokens, labels) in enumerate(microbatches):
            (lm_loss(model, tokens, labels, "sum") / count).backward()
            if at + 1 < len(microbatches):
                for p in model.parameters():
                    p.data.mul_(1 - 0.1 * 0.2)
        optimizer.step()
        optimizer.zero_grad()

    return step
