"""Right steps: tied, frozen and unused parameters, and layers that would be at fault elsewhere."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW

from tests.audit.steps import Plan, one, right
from tests.audit.tasks import BATCHNORM, DOMAINS, DROPOUT, GROUPNORM, LANGUAGE, TIED, lm_loss, valid


@right("tied weights", TIED, Plan(one(AdamW, lr=0.05)), windows=2)
def head_and_embedding_are_one(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("frozen parameters", LANGUAGE, Plan(one(AdamW, lr=0.05)), windows=2)
def frozen_embedding(model):
    model.embedding.requires_grad_(False)
    optimizer = AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=0.05)

    def step(microbatches):
        optimizer.zero_grad()
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()

    return step


@right("a head is unused in some microbatch", DOMAINS, Plan(one(AdamW, lr=0.05, weight_decay=0.1)), windows=2)
def a_head_for_each_domain(model):
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.1)

    def step(microbatches):
        examples = sum(len(y) for _, _, y in microbatches)
        for domain, x, y in microbatches:
            (F.cross_entropy(model(domain, x), y, reduction="sum") / examples).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@right("a head is unused in some microbatch", DOMAINS, Plan(one(SGD, lr=0.5, momentum=0.9)), windows=2)
def zeros_where_nothing_came(model):
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)

    def step(microbatches):
        optimizer.zero_grad(set_to_none=False)
        examples = sum(len(y) for _, _, y in microbatches)
        for domain, x, y in microbatches:
            loss = F.cross_entropy(model(domain, x), y) * len(y) / examples
            loss.backward()
        optimizer.step()

    return step


@right("dropout in eval mode", DROPOUT, Plan(one(SGD, lr=0.5)))
def dropout_is_off(model):
    model.eval()
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("GroupNorm", GROUPNORM, Plan(one(AdamW, lr=0.05)), windows=2)
def group_norm(model):
    optimizer = AdamW(model.parameters(), lr=0.05)
    criterion = nn.CrossEntropyLoss(reduction="sum")

    def step(microbatches):
        images = sum(x.shape[0] for x, _ in microbatches)
        for x, y in microbatches:
            (criterion(model(x), y) / images).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("frozen BatchNorm", BATCHNORM.but(coupled=False), Plan(one(SGD, lr=0.5)))
def batch_norm_with_frozen_statistics(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()

    def step(microbatches):
        images = sum(len(y) for _, y in microbatches)
        for x, y in microbatches:
            (F.cross_entropy(model(x), y, reduction="sum") / images).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
