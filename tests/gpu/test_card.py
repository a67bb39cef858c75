"""The card itself: its name, its clock, its roofline and its memory."""

from __future__ import annotations

import math
import statistics
import time

import pytest
import torch

from labkit import device as devices
from labkit import roofline, rules
from labkit.corpus import Batch, batch, split
from labkit.device import DTYPES
from labkit.errors import LabError
from labkit.nets import Transformer
from labkit.wording import three

pytestmark = pytest.mark.gpu

ABOVE = 1.5  # a loop that only reads may beat the triad, which also writes, by 4/3


def test_the_card_is_what_auto_picks(card: torch.device) -> None:
    assert devices.pick() == devices.pick("cuda") == card
    assert devices.name(card) == torch.cuda.get_device_name()
    with pytest.raises(LabError, match="is none of auto, cpu, cuda, cuda:0"):
        devices.pick(f"cuda:{torch.cuda.device_count()}")


def test_events_and_a_wall_clock_agree(card: torch.device) -> None:
    a = torch.ones(2048, 2048, device=card)
    by_events = statistics.median(devices.timings(lambda: torch.mm(a, a), card))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        torch.mm(a, a)
    torch.cuda.synchronize()
    by_clock = (time.perf_counter() - start) / 200
    assert abs(math.log10(by_events / by_clock)) < 0.5


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_no_matmul_is_above_the_measured_roof(card: torch.device, say: list[str], dtype: str) -> None:
    roofs, itemsize = roofline.measure(card, dtype), DTYPES[dtype].itemsize
    cold = devices.weights(2048, DTYPES[dtype], card, cold=True)
    rows = [roofline.place(b, 2048, itemsize, roofs, devices.matmul(b, cold, card)) for b in (1, 8, 64, 512, 4096)]
    shares = [row.rates.highest / row.attainable for row in rows]
    say.append(
        f"{roofs.device}, {dtype}: {three(roofs.bandwidth)} GB/s, {three(roofs.ceiling)} GFLOP/s, "
        f"ridge at {three(roofs.ridge)} FLOP/byte; matmuls reach {', '.join(map(three, shares))} of it"
    )
    assert 0.3 < max(shares) < ABOVE


@pytest.mark.parametrize("K", [2, 8])
def test_a_microbatch_needs_less_memory_than_the_batch(card: torch.device, K: int) -> None:
    """All but weights and gradients falls by K: activations live for one microbatch at a time."""
    model = Transformer(length=128, width=128, blocks=4).to(card)
    whole = tuple(each.to(card) for each in batch(0, 32, 128, text="made"))
    rules.rule("token-mean").run(model, [whole])  # gradients and workspaces exist from here on
    full, part = peak(model, [whole]), peak(model, split(*whole, K))
    assert part < 1.5 / K * full


def peak(model: Transformer, microbatches: list[Batch]) -> int:
    """Bytes that a window allocates beyond what is there before it."""
    model.zero_grad(set_to_none=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rules.token_mean(model, microbatches)
    return torch.cuda.max_memory_allocated() - before
