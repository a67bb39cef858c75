"""Steps of which these windows cannot tell what they are: any single word would be a guess."""

from __future__ import annotations

import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from tests.audit.right_optimizers import accumulate
from tests.audit.steps import Plan, faulty, one, right
from tests.audit.tasks import LANGUAGE, PICTURES, class_sum, language, lm_loss, pictures, valid

EQUAL = LANGUAGE.but(microbatches=language((9, 4), (5, 8), (6, 7)))  # 11 targets each
TWINS = LANGUAGE.but(microbatches=language((9, 4)) * 3)
ALONE = LANGUAGE.but(microbatches=language((9, 4, 2)))


@right(
    "plain for loop",
    EQUAL,
    Plan(one(SGD, lr=0.5)),
    readings=[(), ("mean-of-means",)],
)
def means_over_k_of_equal_counts(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels) / len(microbatches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@right(
    "one backward on the summed loss",
    PICTURES.but(microbatches=pictures(4, 4, 4)),
    Plan(one(AdamW, lr=0.05)),
    readings=[(), ("mean-of-means",)],
    windows=2,
)
def a_stack_of_means_of_equal_sizes(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        optimizer.zero_grad()
        losses = [class_sum(model, each)[0] / len(each[1]) for each in microbatches]
        torch.stack(losses).mean().backward()
        optimizer.step()

    return step


@right(
    "plain for loop",
    TWINS,
    Plan(one(SGD, lr=0.5)),
    readings=[(), ("mean-of-means",), ("sum-of-means", "last-microbatch-only")],
)
def cleared_in_the_loop_of_identical_microbatches(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        for tokens, labels in microbatches:
            optimizer.zero_grad()
            lm_loss(model, tokens, labels).backward()
        optimizer.step()

    return step


@right(
    "plain for loop",
    ALONE,
    Plan(one(AdamW, lr=0.05)),
    readings=[
        (),
        ("mean-of-means",),
        ("sum-of-means",),
        ("double-division",),
        ("last-microbatch-only",),
        ("step-per-microbatch",),
    ],
)
def a_window_of_one(model):
    optimizer = AdamW(model.parameters(), lr=0.05)

    def step(microbatches):
        for tokens, labels in microbatches:
            optimizer.zero_grad()
            lm_loss(model, tokens, labels).backward()
            optimizer.step()

    return step


@right("plain for loop", LANGUAGE, Plan(one(SGD, lr=0.3)), readings=[(), ("stale-gradient",)])
def nobody_clears_and_one_window_does_not_tell(model):
    optimizer = SGD(model.parameters(), lr=0.3)

    def step(microbatches):
        N = sum(valid(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels, "sum") / N).backward()
        optimizer.step()

    return step


@faulty(
    "schedule-per-microbatch",
    structure="LambdaLR",
    task=LANGUAGE,
    plan=Plan(one(SGD, lr=0.5), schedule=lambda i: 0.9**i, processes=4),
    windows=2,
    readings=[("schedule-per-microbatch",), ("schedule-per-process",)],
)
def four_schedule_steps_for_four_microbatches_or_four_processes(model):
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = LambdaLR(optimizer, lambda i: 0.9**i)

    def step(microbatches):
        accumulate(model, microbatches)
        optimizer.step()
        for _ in range(4):
            scheduler.step()
        optimizer.zero_grad()

    return step


@faulty(
    "mean-of-means",
    structure="a document in each microbatch",
    task=LANGUAGE.but(microbatches=language((9,), (4,), (7,), (2,))),
    plan=Plan(one(SGD, lr=0.5)),
    readings=[("mean-of-means",), ("sequence-means",)],
)
def means_of_one_document_each(model):
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(microbatches):
        for tokens, labels in microbatches:
            (lm_loss(model, tokens, labels) / len(microbatches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
