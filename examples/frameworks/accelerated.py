"""What the accelerate adapters share: the loop of its documentation."""

import torch
from accelerate import Accelerator

from tiny import K, Plain, cross_entropy


def mean(model, batch):
    """The mean over a microbatch."""
    return cross_entropy(model(batch["input_ids"]), batch["labels"])


def build(loss=mean, max_norm=None, steps=K, **options):
    """A model, and a step in accelerate's own accumulate() with model, optimizer, schedule and data prepared."""
    torch.manual_seed(0)
    model = Plain()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    prepared, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step(microbatches):
        data = torch.utils.data.DataLoader(microbatches, batch_size=None)
        for batch in data if accelerator.num_processes > 1 else accelerator.prepare(data):
            with accelerator.accumulate(prepared):
                accelerator.backward(loss(prepared, batch))
                if max_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return model, step
