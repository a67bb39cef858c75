"""Accelerate made right: each batch brings the N of its window, and the division by K is undone."""

import accelerated
from tiny import K, cross_entropy, loss_sum, valid, window

microbatches, windows = window(), 2
for each in microbatches:
    each["N"] = sum(valid(every["labels"]) for every in microbatches)


def share(model, batch):
    """The sum of a microbatch over the tokens of the whole window."""
    return K * cross_entropy(model(batch["input_ids"]), batch["labels"], "sum") / batch["N"]


def build():
    """A fresh model and its step."""
    return accelerated.build(share, max_norm=0.1)
