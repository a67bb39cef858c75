"""What an audit costs against the step that it judges, at three sizes of a model."""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from labkit.audit import audit, probe
from labkit.nets import Transformer, next_token_loss, valid_tokens

SIZES = ((64, 2), (192, 3), (384, 6))  # width and blocks of about 0.1, 1 and 10 M parameters


def loss_sum(model: Transformer, microbatch: Any) -> tuple[torch.Tensor, int]:
    return next_token_loss(model, *microbatch, "sum"), valid_tokens(microbatch[1])


def built(width: int, blocks: int) -> tuple[Transformer, Callable[[list[Any]], None]]:
    model = Transformer(width=width, blocks=blocks, heads=4)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(microbatches: list[Any]) -> None:
        N = sum(valid_tokens(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            (next_token_loss(model, tokens, labels, "sum") / N).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def seconds(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def row(width: int, blocks: int) -> dict[str, Any]:
    microbatches = probe(100)
    model, step = built(width, blocks)
    step(microbatches)
    plain, before = seconds(lambda: step(microbatches), 5), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cost = seconds(lambda: audit(lambda: built(width, blocks), microbatches, loss_sum), 3)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": parameters,
        "step ms": 1e3 * plain,
        "audit ms": 1e3 * cost,
        "audit / step": cost / plain,
        "more MB": more,
        "parameters MB": 4e-6 * parameters,
    }


def rows() -> str:
    torch.set_num_threads(1)
    return json.dumps([row(*size) for size in SIZES])
