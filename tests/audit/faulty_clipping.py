"""Faulty steps: clipping and loss scaling in the wrong place."""

from __future__ import annotations

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW

from tests.audit.steps import Plan, faulty, one
from tests.audit.tasks import LANGUAGE, SINGLE, lm_loss, valid


@faulty("clip-per-microbatch", structure="plain for loop", task=LANGUAGE, plan=Plan(one(SGD, lr=0.5), max_norm=0.05))
def clipped_after_every_backward(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty(
    "clip-per-microbatch",
    structure="torch.autograd.grad into own buffers",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.5), max_norm=0.3, clips="mean"),
)
def every_mean_gradient_clipped_and_then_added(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        total = [torch.zeros_like(p) for p in model.parameters()]
        for tokens, labels in microbatches:
            lm_loss(model, tokens, labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.3)
            for buffer, p in zip(total, model.parameters(), strict=True):
                buffer += p.grad * valid(labels) / N
                p.grad = None
        for buffer, p in zip(total, model.parameters(), strict=True):
            p.grad = buffer
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty(
    "clip-per-microbatch",
    structure="clip written by hand",
    task=LANGUAGE,
    plan=Plan(one(AdamW, lr=0.05), max_norm=0.06, clips="part"),
    windows=2,
)
def every_part_clipped_by_hand(model):
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=0.05)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        optimizer.zero_grad()
        for tokens, labels in microbatches:
            grads = torch.autograd.grad(lm_loss(model, tokens, labels, "sum") / N, parameters)
            norm = torch.stack([g.norm() for g in grads]).norm()
            factor = min(1.0, 0.06 / (norm.item() + 1e-6))
            for p, g in zip(parameters, grads, strict=True):
                p.grad = g * factor if p.grad is None else p.grad + g * factor
        optimizer.step()

    return step


@faulty("clip-per-microbatch", structure="value clip", task=SINGLE, plan=Plan(one(SGD, lr=0.5), max_value=0.003))
def values_clipped_in_the_loop(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            clip_grad_value_(model.parameters(), clip_value=0.003)
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("unscale-early", structure="GradScaler", task=LANGUAGE, plan=Plan(one(SGD, lr=0.001), scale=16.0))
def unscaled_after_the_first_backward(model):
    optimizer = SGD(model.parameters(), lr=0.001)
    scaler = GradScaler("cpu", init_scale=16.0)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for i, (tokens, labels) in enumerate(microbatches):
            scaler.scale(lm_loss(model, tokens, labels, "sum") / N).backward()
            if i == 0:
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@faulty(
    "unscale-early", structure="trainer class", task=SINGLE, plan=Plan(one(AdamW, lr=0.05), max_norm=0.2, scale=64.0)
)
def a_trainer_that_unscales_and_then_goes_on(model):
    class Trainer:
        def __init__(self):
            self.optimizer = AdamW(model.parameters(), lr=0.05)
            self.scaler = GradScaler("cpu", init_scale=64.0)
            self.unscaled = False

        def backward(self, loss):
            self.scaler.scale(loss).backward()
            if not self.unscaled:
                self.scaler.unscale_(self.optimizer)
                self.unscaled = True

        def step(self, microbatches):
            N = sum(valid(labels) for _, labels in microbatches)
            for tokens, labels in microbatches:
                self.backward(lm_loss(model, tokens, labels, "sum") / N)
            clip_grad_norm_(model.parameters(), 0.2)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.unscaled = False

    return Trainer().step


@faulty("clip-scaled", structure="GradScaler", task=LANGUAGE, plan=Plan(one(SGD, lr=0.5), max_norm=1.0, scale=1024.0))
def clipped_before_scaler_step_unscales(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    scaler = GradScaler("cpu", init_scale=1024.0)

    def step(microbatches):
        optimizer.zero_grad()
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            scaler.scale(lm_loss(model, tokens, labels, "sum") / N).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


@faulty(
    "clip-scaled",
    structure="bfloat16 autocast",
    task=SINGLE,
    plan=Plan(one(SGD, lr=5.0, momentum=0.9), max_norm=0.5, scale=128.0, precision=torch.bfloat16),
    windows=2,
)
def clipped_while_scaled_under_autocast(model):
    optimizer = SGD(model.parameters(), lr=5.0, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=128.0)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = lm_loss(model, tokens, labels, "sum")
            scaler.scale(loss / N).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@faulty(
    "clip-scaled",
    structure="loss scaled by hand",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=20.0), max_norm=0.5, scale=100.0),
)
def scaled_clipped_and_unscaled_by_hand(model):
    optimizer = SGD(model.parameters(), lr=20.0)
    scale = 100.0

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (scale * lm_loss(model, tokens, labels, "sum") / N).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        for p in model.parameters():
            p.grad /= scale
        optimizer.step()
        optimizer.zero_grad()

    return step
