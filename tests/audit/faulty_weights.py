"""Faulty steps: the weights of the microbatches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad
from torch.optim import SGD, Adam, AdamW

from tests.audit.steps import Plan, faulty, one
from tests.audit.tasks import (
    DICTS,
    DOMAINS,
    HOLLOW,
    IGNORE,
    LANGUAGE,
    MEASUREMENTS,
    PICTURES,
    SINGLE,
    lm_loss,
    valid,
)


@faulty("mean-of-means", structure="plain for loop", task=LANGUAGE, plan=Plan(one(SGD, lr=0.5)))
def the_usual_tutorial(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        optimizer.zero_grad()
        for tokens, labels in microbatches:
            loss = lm_loss(model, tokens, labels)
            loss = loss / len(microbatches)
            loss.backward()
        optimizer.step()

    return step


class Trainer:
    def __init__(self, model):
        self.model, self.step_count = model, 0
        self.optimizer = Adam(model.parameters(), lr=0.05)

    def compute_loss(self, batch):
        return lm_loss(self.model, batch["input_ids"], batch["labels"])

    def training_step(self, batch, accumulation):
        loss = self.compute_loss(batch) / accumulation
        loss.backward()
        return loss.item()

    def fit_window(self, window):
        losses = [self.training_step(batch, len(window)) for batch in window]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_count += 1
        return sum(losses)


@faulty("mean-of-means", structure="trainer class", task=DICTS, plan=Plan(one(Adam, lr=0.05)), windows=2)
def a_trainer_that_divides_by_the_accumulation_steps(model):
    return Trainer(model).fit_window


@faulty("mean-of-means", structure="torch.autograd.grad into own buffers", task=HOLLOW, plan=Plan(one(SGD, lr=0.5)))
def a_running_mean_of_gradients_with_an_empty_microbatch(model):
    parameters = list(model.parameters())
    optimizer = SGD(parameters, lr=0.5)

    def step(microbatches):
        mean = [torch.zeros_like(p) for p in parameters]
        for n, (tokens, labels) in enumerate(microbatches, 1):
            loss = lm_loss(model, tokens, labels, "sum") / max(1, valid(labels))
            for m, g in zip(mean, torch.autograd.grad(loss, parameters), strict=True):
                m += (g - m) / n
        for p, m in zip(parameters, mean, strict=True):
            p.grad = m
        optimizer.step()

    return step


@faulty("mean-of-means", structure="weights for each example", task=MEASUREMENTS, plan=Plan(one(SGD, lr=0.1)))
def weighted_means_averaged(model):
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(microbatches):
        for x, y, w in microbatches:
            loss = (w * (model(x) - y).pow(2)).sum() / w.sum()
            (loss / len(microbatches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("mean-of-means", structure="one backward on the summed loss", task=PICTURES, plan=Plan(one(SGD, lr=0.5)))
def the_mean_of_a_stack_of_means(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        optimizer.zero_grad()
        losses = [F.cross_entropy(model(x), y) for x, y in microbatches]
        torch.stack(losses).mean().backward()
        optimizer.step()

    return step


@faulty("sum-of-means", structure="while over an iterator", task=LANGUAGE, plan=Plan(one(SGD, lr=0.1)))
def nobody_divides(model):
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(microbatches):
        stream = iter(microbatches)
        while True:
            try:
                tokens, labels = next(stream)
            except StopIteration:
                break
            lm_loss(model, tokens, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("sum-of-means", structure="one backward on the summed loss", task=SINGLE, plan=Plan(one(AdamW, lr=0.05)))
def the_sum_of_all_losses_hidden_by_adam(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        optimizer.zero_grad()
        loss = sum(lm_loss(model, *microbatch) for microbatch in microbatches)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


@faulty("token-sum", structure="generator of losses", task=LANGUAGE, plan=Plan(one(SGD, lr=0.01)))
def sums_from_a_generator(model):
    optimizer = SGD(model.parameters(), lr=0.01)

    def losses(microbatches):
        for tokens, labels in microbatches:
            yield lm_loss(model, tokens, labels, "sum")

    def step(microbatches):
        optimizer.zero_grad()
        for loss in losses(microbatches):
            loss.backward()
        optimizer.step()

    return step


@faulty("token-sum", structure="plain for loop", task=SINGLE, plan=Plan(one(Adam, lr=0.05)), windows=2)
def a_sum_hidden_by_adam(model):
    optimizer = Adam(model.parameters(), lr=0.05, foreach=True)
    loss_function = torch.nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")

    def step(microbatches):
        for tokens, labels in microbatches:
            logits = model(tokens)
            loss_function(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("token-sum", structure="a head is unused in some microbatch", task=DOMAINS, plan=Plan(one(SGD, lr=0.05)))
def sums_over_examples_of_every_domain(model):
    optimizer = SGD(model.parameters(), lr=0.05)

    def step(microbatches):
        for domain, x, y in microbatches:
            F.cross_entropy(model(domain, x), y, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("double-division", structure="plain for loop", task=LANGUAGE, plan=Plan(one(SGD, lr=0.5)))
def divided_by_the_tokens_and_by_k(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    accumulation_steps = 4

    def step(microbatches):
        num_items_in_batch = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            loss = lm_loss(model, tokens, labels, "sum") / num_items_in_batch
            loss = loss / accumulation_steps
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("double-division", structure="torch.func.grad and functional_call", task=PICTURES, plan=Plan(one(SGD, lr=0.5)))
def the_engine_divides_again(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        images = sum(len(y) for _, y in microbatches)

        def loss(parameters, x, y):
            return F.cross_entropy(functional_call(model, parameters, x), y, reduction="sum") / images

        parameters = {name: p.detach() for name, p in model.named_parameters()}
        grads = [grad(loss)(parameters, x, y) for x, y in microbatches]
        for name, p in model.named_parameters():
            p.grad = torch.stack([each[name] for each in grads]).mean(0)
        optimizer.step()

    return step


@faulty("last-microbatch-only", structure="plain for loop", task=LANGUAGE, plan=Plan(one(SGD, lr=0.5)))
def cleared_in_the_loop(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            optimizer.zero_grad()
            loss = lm_loss(model, tokens, labels, "sum") / N
            loss.backward()
        optimizer.step()

    return step


@faulty(
    "last-microbatch-only", structure="torch.autograd.grad into own buffers", task=SINGLE, plan=Plan(one(Adam, lr=0.05))
)
def a_buffer_that_is_overwritten(model):
    parameters = list(model.parameters())
    optimizer = Adam(parameters, lr=0.05)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            grads = torch.autograd.grad(lm_loss(model, tokens, labels, "sum") / N, parameters)
            for p, g in zip(parameters, grads, strict=True):
                p.grad = g
        optimizer.step()

    return step


@faulty("last-microbatch-only", structure="one backward on the summed loss", task=PICTURES, plan=Plan(one(SGD, lr=0.5)))
def the_loss_is_assigned_and_not_added(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        optimizer.zero_grad()
        count = sum(len(y) for _, y in microbatches)
        loss = 0.0
        for x, y in microbatches:
            loss = F.cross_entropy(model(x), y, reduction="sum") / count
        loss.backward()
        optimizer.step()

    return step
