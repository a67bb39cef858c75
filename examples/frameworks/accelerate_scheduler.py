"""Accelerate with an unprepared schedule: it steps at every microbatch."""

import torch
from accelerate import Accelerator

from tiny import K, Plain, cross_entropy, loss_sum, window

microbatches, windows = window(), 2


def build():
    """A fresh model and its step."""
    torch.manual_seed(0)
    model = Plain()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=K)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.9**step)

    def step(microbatches):
        for batch in microbatches:
            with accelerator.accumulate(prepared):
                accelerator.backward(cross_entropy(prepared(batch["input_ids"]), batch["labels"]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return model, step
