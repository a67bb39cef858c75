"""Faulty steps: layers that depend on the batch, random numbers, and faults that have no word."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint

from tests.audit.steps import Plan, faulty, one
from tests.audit.tasks import (
    BATCHNORM,
    DROPOUT,
    LANGUAGE,
    MEASUREMENTS,
    PICTURES,
    SINGLE,
    class_sum,
    classifier,
    lm_loss,
    pictures,
    valid,
)


@faulty("batch-dependent-layer", structure="plain for loop", task=BATCHNORM, plan=Plan(one(SGD, lr=0.5)))
def batch_norm_in_every_microbatch(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        images = sum(len(y) for _, y in microbatches)
        for x, y in microbatches:
            (F.cross_entropy(model(x), y, reduction="sum") / images).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Standardised(nn.Module):
    """Subtracts the batch's own mean: no BatchNorm by name, one by nature."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


CENTRED = PICTURES.but(make=lambda: classifier(Standardised()), coupled=True)


@faulty("batch-dependent-layer", structure="trainer class", task=CENTRED, plan=Plan(one(AdamW, lr=0.05)), windows=2)
def a_trainer_of_a_net_that_centres_its_batch(model):
    class Trainer:
        def __init__(self):
            self.optimizer = AdamW(model.parameters(), lr=0.05)
            self.criterion = nn.CrossEntropyLoss(reduction="none")

        def step(self, microbatches):
            self.optimizer.zero_grad()
            images = sum(len(y) for _, y in microbatches)
            for x, y in microbatches:
                self.criterion(model(x), y).sum().div(images).backward()
            self.optimizer.step()

    return Trainer().step


NORMALISED_TWICE = PICTURES.but(
    make=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5)),
    microbatches=pictures(3, 4, 5, seed=5),
    coupled=True,
)


@faulty("batch-dependent-layer", structure="several passes", task=NORMALISED_TWICE, plan=Plan(one(Adam, lr=0.05)))
def normalised_inputs_and_one_backward(model):
    optimizer = Adam(model.parameters(), lr=0.05)

    def step(microbatches):
        sums = [class_sum(model, microbatch) for microbatch in microbatches]
        loss = sum(total for total, _ in sums) / sum(count for _, count in sums)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@faulty("nondeterministic", structure="dropout", task=DROPOUT, plan=Plan(one(SGD, lr=0.5)))
def dropout_is_on(model):
    model.train()
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("nondeterministic", structure="augmentation in the step", task=PICTURES, plan=Plan(one(AdamW, lr=0.05)))
def noise_is_added_to_the_images(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        images = sum(len(y) for _, y in microbatches)
        for x, y in microbatches:
            noisy = x + 0.3 * torch.randn_like(x)
            (F.cross_entropy(model(noisy), y, reduction="sum") / images).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("nondeterministic", structure="gradient checkpointing", task=DROPOUT, plan=Plan(one(SGD, lr=0.5)))
def other_masks_in_the_recomputation(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def loss(tokens, labels):
        return lm_loss(model, tokens, labels, "sum")

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for microbatch in microbatches:
            part = checkpoint(loss, *microbatch, use_reentrant=False, preserve_rng_state=False)
            (part / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("unknown", structure="plain for loop", task=LANGUAGE, plan=Plan(one(SGD, lr=0.5)))
def the_second_microbatch_has_the_wrong_sign(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for i, (tokens, labels) in enumerate(microbatches):
            loss = lm_loss(model, tokens, labels, "sum") / N
            (-loss if i == 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("unknown", structure="weights by a random vector", task=SINGLE, plan=Plan(one(AdamW, lr=0.05)))
def weights_drawn_once(model):
    optimizer = AdamW(model.parameters(), lr=0.05)
    weights = torch.rand(4, generator=torch.Generator().manual_seed(5)).tolist()

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for weight, (tokens, labels) in zip(weights, microbatches, strict=True):
            (weight * lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("unknown", structure="gradient hooks", task=LANGUAGE, plan=Plan(one(SGD, lr=0.5)))
def a_layer_whose_gradient_is_halved(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    model.up.weight.register_hook(lambda g: g / 2)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("unknown", structure="weights for each example", task=MEASUREMENTS, plan=Plan(one(SGD, lr=0.1)))
def absolute_errors_where_squares_are_meant(model):
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(microbatches):
        whole = sum(w.sum() for _, _, w in microbatches)
        for x, y, w in microbatches:
            ((w * (model(x) - y).abs()).sum() / whole).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
