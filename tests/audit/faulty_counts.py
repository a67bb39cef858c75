"""Faulty steps: what is counted, and what is averaged."""

from __future__ import annotations

import torch.nn.functional as F
from torch.optim import SGD, AdamW

from tests.audit.steps import Plan, faulty, one
from tests.audit.tasks import (
    DICTS,
    EVEN_ROWS,
    IGNORE,
    LANGUAGE,
    ROWS,
    SINGLE,
    TEXTS,
    THREE,
    TIED,
    lm_loss,
    pad,
    tokenize,
    valid,
)


@faulty("padded-count", structure="plain for loop", task=LANGUAGE, plan=Plan(one(SGD, lr=0.5)))
def the_size_of_the_tensor(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        targets = sum(labels[:, 1:].numel() for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("padded-count", structure="mask multiplied in", task=EVEN_ROWS, plan=Plan(one(AdamW, lr=0.05)))
def masked_and_then_the_plain_mean(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        optimizer.zero_grad()
        for tokens, labels in microbatches:
            target = labels[:, 1:]
            mask = (target != IGNORE).double()
            losses = F.cross_entropy(model(tokens)[:, :-1].mT, target.clamp(min=0), reduction="none")
            ((losses * mask).mean() / len(microbatches)).backward()
        optimizer.step()

    return step


@faulty("padded-count", structure="strings tokenised in the step", task=TEXTS, plan=Plan(one(SGD, lr=0.5)))
def padded_strings_counted(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        batches = [pad([tokenize(text) for text in texts]) for texts in microbatches]
        count = sum(len(tokens) * (tokens.shape[1] - 1) for tokens, _ in batches)
        for tokens, labels in batches:
            (lm_loss(model, tokens, labels, "sum") / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("unshifted-count", structure="microbatches are dicts", task=DICTS, plan=Plan(one(SGD, lr=0.5)))
def labels_counted_before_the_shift(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        num_items = sum((mb["labels"] != IGNORE).sum() for mb in microbatches)
        for mb in microbatches:
            loss = lm_loss(model, mb["input_ids"], mb["labels"], "sum") / num_items
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("unshifted-count", structure="strings tokenised in the step", task=TEXTS, plan=Plan(one(SGD, lr=0.5)))
def letters_counted(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        letters = sum(len(text) for texts in microbatches for text in texts)
        for texts in microbatches:
            tokens, labels = pad([tokenize(text) for text in texts])
            (lm_loss(model, tokens, labels, "sum") / letters).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("unshifted-count", structure="tied weights", task=TIED, plan=Plan(one(SGD, lr=0.5)))
def attention_masks_counted(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        masks = [labels.ne(IGNORE) for _, labels in microbatches]
        total = sum(mask.sum() for mask in masks)
        for tokens, labels in microbatches:
            lm_loss(model, tokens, labels, "sum").div(total).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("sequence-means", structure="plain for loop", task=LANGUAGE, plan=Plan(one(SGD, lr=0.5)))
def every_sequence_its_own_mean(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        sequences = sum(len(tokens) for tokens, _ in microbatches)
        for tokens, labels in microbatches:
            kept = labels[:, 1:] != IGNORE
            losses = lm_loss(model, tokens, labels, "none")
            means = (losses * kept).sum(1) / kept.sum(1)
            (means.sum() / sequences).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("sequence-means", structure="microbatches are dataclasses", task=ROWS, plan=Plan(one(AdamW, lr=0.05)))
def one_sequence_after_the_other(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        B = sum(len(rows.tokens) for rows in microbatches)
        for rows in microbatches:
            for tokens, labels in zip(rows.tokens.split(1), rows.labels.split(1), strict=True):
                (lm_loss(model, tokens, labels) / B).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty("sequence-means", structure="averages of averages", task=EVEN_ROWS, plan=Plan(one(SGD, lr=0.5)))
def mean_over_tokens_then_over_sequences(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        for tokens, labels in microbatches:
            mask = (labels[:, 1:] != IGNORE).to(next(model.parameters()).dtype)
            token_losses = lm_loss(model, tokens, labels, "none")
            sequence_losses = (token_losses * mask).sum(-1) / mask.sum(-1)
            (sequence_losses.mean() / len(microbatches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty(
    "token-mean",
    structure="plain for loop",
    task=SINGLE,
    plan=Plan(one(SGD, lr=0.5)),
    objective="sequence-mean",
)
def tokens_count_alike_where_sequences_should(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@faulty(
    "sum-of-means",
    structure="plain for loop",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.1)),
    objective="mean-of-means",
)
def undivided_where_the_mean_of_means_is_meant(model):
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(microbatches):
        optimizer.zero_grad()
        for tokens, labels in microbatches:
            lm_loss(model, tokens, labels).backward()
        optimizer.step()

    return step


@faulty("tail-divided-by-k", structure="enumerate and (i + 1) % K", task=THREE, plan=Plan(one(SGD, lr=0.5), declared=4))
def a_tail_of_three_divided_by_four(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    accumulation_steps = 4

    def step(microbatches):
        for i, (tokens, labels) in enumerate(microbatches):
            (lm_loss(model, tokens, labels) / accumulation_steps).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(microbatches):
                optimizer.step()
                optimizer.zero_grad()

    return step


@faulty(
    "tail-divided-by-k",
    structure="trainer class",
    task=THREE,
    plan=Plan(one(AdamW, lr=0.05), declared=4, shared_tail=True),
    windows=2,
)
def a_tail_whose_tokens_share_three_quarters(model):
    class Loop:
        accumulate_grad_batches = 4

        def __init__(self):
            self.optimizer = AdamW(model.parameters(), lr=0.05)

        def backward(self, loss):
            (loss / self.accumulate_grad_batches).backward()

        def run(self, microbatches):
            average = sum(valid(labels) for _, labels in microbatches) / len(microbatches)
            for tokens, labels in microbatches:
                self.backward(lm_loss(model, tokens, labels, "sum") / average)
            self.optimizer.step()
            self.optimizer.zero_grad()

    return Loop().run
