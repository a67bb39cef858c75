"""Right steps: microbatches of other kinds, empty ones, weights for each example, loss scaling and half precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, AdamW, RMSprop

from tests.audit.steps import Plan, one, right
from tests.audit.tasks import (
    DICTS,
    EVEN_ROWS,
    HOLLOW,
    IGNORE,
    LANGUAGE,
    MEASUREMENTS,
    PICTURES,
    ROWS,
    SINGLE,
    TEXTS,
    THREE,
    lm_loss,
    pad,
    tokenize,
    valid,
)


@right("microbatches are dicts", DICTS, Plan(one(RMSprop, lr=0.01)), windows=2)
def dicts(model):
    optimizer = RMSprop(model.parameters(), lr=0.01)

    def step(microbatches):
        num_items = sum((mb["labels"][:, 1:] != IGNORE).sum() for mb in microbatches)
        for mb in microbatches:
            loss = lm_loss(model, mb["input_ids"], mb["labels"], "sum") / num_items
            loss.backward()
        optimizer.step()
        model.zero_grad()

    return step


@right("microbatches are dataclasses", ROWS, Plan(one(Adagrad, lr=0.05)), windows=2)
def dataclasses(model):
    optimizer = Adagrad(model.parameters(), lr=0.05)

    def step(microbatches):
        count = 0
        for rows in microbatches:
            lm_loss(model, rows.tokens, rows.labels, "sum").backward()
            count += valid(rows.labels)
        for p in model.parameters():
            p.grad.div_(count)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


@right("strings tokenised in the step", TEXTS, Plan(one(SGD, lr=0.5)))
def strings(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        batches = [pad([tokenize(text) for text in texts]) for texts in microbatches]
        N = sum(valid(labels) for _, labels in batches)
        for tokens, labels in batches:
            logits = model(tokens)
            losses = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], ignore_index=IGNORE, reduction="none")
            (losses.sum() / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("plain for loop", HOLLOW, Plan(one(SGD, lr=0.5)))
def an_empty_microbatch_adds_nothing(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = max(1, sum(valid(labels) for _, labels in microbatches))
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("microbatches filtered first", HOLLOW, Plan(one(AdamW, lr=0.05)), windows=2)
def an_empty_microbatch_is_left_out(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        batches = [(tokens, labels) for tokens, labels in microbatches if valid(labels) > 0]
        N = sum(valid(labels) for _, labels in batches)
        for tokens, labels in batches:
            (lm_loss(model, tokens, labels) * valid(labels) / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("weights for each example", MEASUREMENTS, Plan(one(SGD, lr=0.1)))
def weighted_regression(model):
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(microbatches):
        whole = sum(w.sum() for _, _, w in microbatches)
        for x, y, w in microbatches:
            error = model(x) - y
            loss = (w * error.square()).sum() / whole
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("sums and counts kept as pairs", PICTURES, Plan(one(SGD, lr=0.5, weight_decay=0.01)), windows=2)
def pictures(model):
    optimizer = SGD(model.parameters(), lr=0.5, weight_decay=0.01)

    def step(microbatches):
        seen = {"loss": 0.0, "correct": 0, "count": 0}
        images = sum(len(y) for _, y in microbatches)
        for x, y in microbatches:
            logits = model(x)
            loss = F.cross_entropy(logits, y, reduction="sum")
            (loss / images).backward()
            seen["loss"] += loss.item()
            seen["correct"] += int((logits.argmax(1) == y).sum())
            seen["count"] += len(y)
        optimizer.step()
        optimizer.zero_grad()
        return seen["loss"] / seen["count"], seen["correct"] / seen["count"]

    return step


@right("equal numbers of sequences", EVEN_ROWS, Plan(one(SGD, lr=0.5)), objective="sequence-mean")
def equal_numbers_of_sequences(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        for tokens, labels in microbatches:
            kept = labels[:, 1:] != IGNORE
            per_sequence = lm_loss(model, tokens, labels, "none").sum(-1) / kept.sum(-1)
            (per_sequence.mean() / len(microbatches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("plain for loop", THREE, Plan(one(SGD, lr=0.5, momentum=0.9)), windows=3, objective="mean-of-means")
def a_tail_divided_by_its_own_length(model):
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    K = 4

    def step(microbatches):
        divisor = min(K, len(microbatches))
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels) / divisor).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right("GradScaler", SINGLE, Plan(one(SGD, lr=0.5), scale=1024.0), windows=2)
def scaled_without_a_clip(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    scaler = GradScaler("cpu", init_scale=1024.0)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            loss = lm_loss(model, tokens, labels, "sum") / N
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@right("GradScaler", LANGUAGE, Plan(one(AdamW, lr=0.05), max_norm=0.1, scale=256.0), windows=2)
def unscaled_then_clipped(model):
    optimizer = AdamW(model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", init_scale=256.0)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            scaler.scale(lm_loss(model, tokens, labels, "sum") / N).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@right("GradScaler with a fused optimizer", SINGLE, Plan(one(AdamW, lr=0.05), scale=512.0))
def unscaled_by_the_fused_optimizer_itself(model):
    optimizer = AdamW(model.parameters(), lr=0.05, fused=True)
    scaler = GradScaler("cpu", init_scale=512.0)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        optimizer.zero_grad()
        for tokens, labels in microbatches:
            scaler.scale(lm_loss(model, tokens, labels, "sum") / N).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


@right("bfloat16 autocast", SINGLE, Plan(one(SGD, lr=0.5), precision=torch.bfloat16))
def autocast(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = lm_loss(model, tokens, labels, "sum") / N
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
