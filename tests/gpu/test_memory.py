"""What autograd keeps on the device, and what a card's own allocator says of it."""

from __future__ import annotations

import pytest
import torch

from labkit import memory, rules
from labkit.corpus import batch
from labkit.fit import distance, flat, gradient
from labkit.memory import allocated, cut
from labkit.memory.graphs import summed_loss
from labkit.memory.saved_tensors import Net, rounding, watch

pytestmark = pytest.mark.gpu


def test_kept_bytes_are_linear_in_b_and_independent_of_k(device: torch.device) -> None:
    model = Net(0, 32, dtype=torch.float32).to(device)
    tokens, labels = (each.to(device) for each in batch(0, 16))
    peaks = {b: watch(model, cut((tokens, labels), b), rules.token_mean).peak for b in (1, 2, 4, 8, 16)}
    for b, peak in peaks.items():
        assert peak == pytest.approx(b * peaks[16] / 16, rel=0.02)
        assert watch(model, cut((tokens, labels), b)[:1], rules.token_mean).peak == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_microbatches_leave_the_full_batchs_gradient(device: torch.device, checkpointing: bool) -> None:
    pair, model = batch(0, 8), Net(0, 32, checkpointing).to(device)
    tokens, labels = (each.to(device) for each in pair)
    watch(model, [(tokens, labels)], rules.token_mean)
    right = flat(gradient(model))
    watch(model, cut((tokens, labels), 2), rules.token_mean)
    assert distance(flat(gradient(model)), right).relative_error <= rounding(0, 32, cut(pair, 2)).value


def test_the_allocators_peak_holds_what_is_kept_and_falls_less(card: torch.device, say: list[str]) -> None:
    found = memory.peak(sequences=32, microbatch=4)
    assert found.allocator
    assert all(given >= kept for given, kept in zip(found.allocated, found.kept, strict=True))
    assert found.kept[1] / found.kept[0] < found.allocated[1] / found.allocated[0] < 1
    say.append(f"peak of 32 sequences, and in microbatches of 4: {found.allocated} B, kept {found.kept} B")


def test_the_summed_loss_costs_the_allocator_what_it_keeps(card: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(0, 32, dtype=torch.float32).to(card)
    tokens, labels = (each.to(card) for each in batch(0, 32))
    microbatches = cut((tokens, labels), 4)
    one, lean = watch(model, microbatches, rules.token_mean).peak, allocated(model, microbatches, card)
    monkeypatch.setattr(rules, "token_mean", summed_loss)
    added = allocated(model, microbatches, card) - lean
    assert 0.8 * 7 * one < added < 1.3 * 7 * one  # blocks are rounded up
