"""Right steps: trainers, generators, functional calls, buffers of one's own, checkpointing."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

from tests.audit.steps import Plan, one, right
from tests.audit.tasks import CHECKPOINTED, DICTS, IGNORE, LANGUAGE, PICTURES, SINGLE, THREE, lm_loss, valid


class Trainer:
    def __init__(self, model, lr=0.05, max_norm=1.0):
        self.model, self.max_norm = model, max_norm
        self.optimizer = AdamW(model.parameters(), lr=lr)

    def count(self, window):
        return sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in window)

    def forward_backward(self, batch, count):
        loss = lm_loss(self.model, batch["input_ids"], batch["labels"], "sum") / count
        loss.backward()
        return loss.detach()

    def train_step(self, window):
        self.optimizer.zero_grad()
        count = self.count(window)
        losses = [self.forward_backward(batch, count) for batch in window]
        clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        return torch.stack(losses).sum()


@right("trainer class", DICTS, Plan(one(AdamW, lr=0.05), max_norm=1.0), windows=2)
def trainer(model):
    return Trainer(model).train_step


@right("trainer built inside the step", DICTS, Plan(one(AdamW, lr=0.1), max_norm=0.1))
def trainer_made_for_the_step(model):
    def step(microbatches):
        Trainer(model, lr=0.1, max_norm=0.1).train_step(microbatches)

    return step


@right("generator of losses", LANGUAGE, Plan(one(SGD, lr=0.5)))
def losses_from_a_generator(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def losses(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            yield lm_loss(model, tokens, labels, "sum") / N

    def step(microbatches):
        optimizer.zero_grad()
        for loss in losses(microbatches):
            loss.backward()
        optimizer.step()

    return step


@right("torch.func.grad and functional_call", PICTURES, Plan(one(SGD, lr=0.5, momentum=0.9)), windows=2)
def functional(model):
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)

    def loss(parameters, x, y, count):
        return F.cross_entropy(functional_call(model, parameters, (x,)), y, reduction="sum") / count

    def step(microbatches):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        count = sum(len(y) for _, y in microbatches)
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for x, y in microbatches:
            for name, g in grad(loss)(parameters, x, y, count).items():
                total[name] += g
        for name, p in model.named_parameters():
            p.grad = total[name]
        optimizer.step()

    return step


@right("torch.autograd.grad into own buffers", LANGUAGE, Plan(one(Adam, lr=0.05)), windows=2)
def own_buffers(model):
    parameters = list(model.parameters())
    optimizer = Adam(parameters, lr=0.05)

    def step(microbatches):
        buffers = [torch.zeros_like(p) for p in parameters]
        seen = 0
        for tokens, labels in microbatches:
            loss = lm_loss(model, tokens, labels, "sum")
            torch._foreach_add_(buffers, torch.autograd.grad(loss, parameters))
            seen += valid(labels)
        for p, buffer in zip(parameters, buffers, strict=True):
            p.grad = buffer / seen
        optimizer.step()

    return step


@right(".grad moved to main gradients", SINGLE, Plan(one(AdamW, lr=0.05), max_norm=0.2))
def main_gradients_in_double_precision(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        main = defaultdict(float)
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            lm_loss(model, tokens, labels, "sum").backward()
            for p in model.parameters():
                main[p] = main[p] + p.grad.double()
                p.grad = None
        for p, g in main.items():
            p.grad = (g / N).to(p.dtype)
        clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("gradient checkpointing", CHECKPOINTED, Plan(one(AdamW, lr=0.05)))
def checkpointed_layer(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("gradient checkpointing", THREE, Plan(one(SGD, lr=0.5)))
def checkpointed_microbatches_and_one_backward(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def loss(tokens, labels):
        return lm_loss(model, tokens, labels, "sum")

    def step(microbatches):
        parts = [checkpoint(loss, *microbatch, use_reentrant=False) for microbatch in microbatches]
        N = sum(valid(labels) for _, labels in microbatches)
        optimizer.zero_grad()
        torch.stack(parts).sum().div(N).backward()
        optimizer.step()

    return step


@right("hook on the loss's gradient", LANGUAGE, Plan(one(SGD, lr=0.5)))
def divided_by_a_hook(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    state = {"count": 1}
    for p in model.parameters():
        p.register_hook(lambda g: g / state["count"])

    def step(microbatches):
        state["count"] = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            lm_loss(model, tokens, labels, "sum").backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("recursion", LANGUAGE, Plan(one(SGD, lr=0.5)))
def one_after_the_other(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def accumulate(rest, N):
        if rest:
            (tokens, labels), *others = rest
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            accumulate(others, N)

    def step(microbatches):
        accumulate(microbatches, sum(valid(labels) for _, labels in microbatches))
        optimizer.step()
        optimizer.zero_grad()

    return step
