"""Right steps: a loop in a function."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW

from tests.audit.steps import Plan, one, right
from tests.audit.tasks import IGNORE, LANGUAGE, SINGLE, THREE, lm_loss, valid


@right("plain for loop", LANGUAGE, Plan(one(SGD, lr=0.5)))
def sums_over_the_tokens_of_the_window(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        tokens_of_window = sum(valid(labels) for _, labels in microbatches)
        optimizer.zero_grad()
        for tokens, labels in microbatches:
            loss = lm_loss(model, tokens, labels, "sum") / tokens_of_window
            loss.backward()
        optimizer.step()

    return step


@right("divide .grad at the end", LANGUAGE, Plan(one(SGD, lr=0.5, momentum=0.9)), windows=2)
def sums_divided_once_at_the_end(model):
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)

    def step(microbatches):
        count = 0
        for tokens, labels in microbatches:
            lm_loss(model, tokens, labels, "sum").backward()
            count += valid(labels)
        for p in model.parameters():
            p.grad /= count
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("plain for loop", LANGUAGE, Plan(one(AdamW, lr=0.05, weight_decay=0.1)), windows=2)
def means_weighted_by_their_share(model):
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.1)

    def step(microbatches):
        counts = torch.tensor([valid(labels) for _, labels in microbatches])
        shares = counts / counts.sum(dtype=torch.float64)
        losses = []
        for share, (tokens, labels) in zip(shares, microbatches, strict=True):
            loss = share * lm_loss(model, tokens, labels)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(losses)

    return step


@right("enumerate and (i + 1) % K", LANGUAGE, Plan(one(AdamW, lr=0.05, foreach=True)), windows=2)
def stepped_when_the_counter_says_so(model):
    optimizer = AdamW(model.parameters(), lr=0.05, foreach=True)
    accumulation_steps = 4

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for i, (tokens, labels) in enumerate(microbatches):
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    return step


@right("enumerate and (i + 1) % K", THREE, Plan(one(Adam, lr=0.05)), windows=2)
def stepped_on_the_tail_too(model):
    optimizer = Adam(model.parameters(), lr=0.05)
    accumulation_steps = 4

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for i, (tokens, labels) in enumerate(microbatches):
            (lm_loss(model, tokens, labels, "sum") / N).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(microbatches):
                optimizer.step()
                optimizer.zero_grad()

    return step


@right("while over an iterator", SINGLE, Plan(one(Adam, lr=0.05)))
def fused_adam_over_an_iterator(model):
    optimizer = Adam(model.parameters(), lr=0.05, fused=True)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        batches = iter(microbatches)
        while (batch := next(batches, None)) is not None:
            tokens, labels = batch
            loss = lm_loss(model, tokens, labels, "sum") / N
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("optimizer.step(closure)", LANGUAGE, Plan(one(SGD, lr=0.3, momentum=0.9, nesterov=True)), windows=2)
def accumulated_in_a_closure(model):
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)

        def closure():
            optimizer.zero_grad()
            total = 0.0
            for tokens, labels in microbatches:
                loss = lm_loss(model, tokens, labels, "sum") / N
                loss.backward()
                total += loss.item()
            return total

        return optimizer.step(closure)

    return step


@right("plain for loop", LANGUAGE, Plan(one(SGD, lr=0.5), max_norm=0.1))
def clipped_once_and_it_bites(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("plain for loop", SINGLE, Plan(one(AdamW, lr=0.01), max_norm=100.0), windows=2)
def clipped_once_and_it_does_not_bite(model):
    optimizer = AdamW(model.parameters(), lr=0.01)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=100.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"grad_norm": norm.item()}

    return step


@right("clip written by hand", LANGUAGE, Plan(one(SGD, lr=0.5, momentum=0.9), max_norm=0.2), windows=2)
def clipped_by_hand(model):
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)

    def step(microbatches):
        optimizer.zero_grad()
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        if norm > 0.2:
            for p in model.parameters():
                p.grad.mul_(0.2 / (norm + 1e-6))
        optimizer.step()

    return step


@right("plain for loop", LANGUAGE, Plan(one(SGD, lr=0.5), max_value=0.01))
def values_clipped_once(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("one backward on the summed loss", LANGUAGE, Plan(one(SGD, lr=0.5)))
def one_backward_for_all(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        total = sum(lm_loss(model, tokens, labels, "sum") for tokens, labels in microbatches)
        count = sum(valid(labels) for _, labels in microbatches)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()

    return step


@right("sequence mean", LANGUAGE, Plan(one(SGD, lr=0.5)), objective="sequence-mean")
def every_sequence_counts_alike(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        sequences = sum(len(tokens) for tokens, _ in microbatches)
        for tokens, labels in microbatches:
            losses = lm_loss(model, tokens, labels, "none").sum(1)
            lengths = (labels[:, 1:] != IGNORE).sum(1).clamp(min=1)
            ((losses / lengths).sum() / sequences).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("plain for loop", SINGLE, Plan(one(AdamW, lr=0.05)), objective="mean-of-means")
def every_microbatch_counts_alike_and_shall(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        optimizer.zero_grad()
        for tokens, labels in microbatches:
            logits = model(tokens)[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORE)
            (loss / len(microbatches)).backward()
        optimizer.step()

    return step


@right("microbatches shuffled inside", LANGUAGE, Plan(one(SGD, lr=0.5)), windows=2)
def taken_in_another_order(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for at in torch.randperm(len(microbatches), generator=generator).tolist():
            tokens, labels = microbatches[at]
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
