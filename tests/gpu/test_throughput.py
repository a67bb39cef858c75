"""Steps timed on the device: events stand in order, the parts are the whole, and every measurement runs there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from labkit import throughput
from labkit.corpus import batch
from labkit.throughput import compared, loader, timing

pytestmark = pytest.mark.gpu


def test_a_step_and_its_parts(device: torch.device) -> None:
    model, optimizer = timing.trainee(0, 32, device)
    microbatches = timing.cut(batch(0, 16, 32, shortest=32), 4, device)
    for _ in range(3):
        times = timing.timed(model, optimizer, microbatches, device)
        assert 0 < times.optimizer < times.step and 0 < times.microbatch < times.step
    assert all(each.device.type == device.type for pair in microbatches for each in pair)


def test_what_comes_later_is_waited_for(card: torch.device) -> None:
    """A clock of the CPU would see the launches alone."""
    x = torch.randn(4096, 4096, device=card)
    watch = timing.Stopwatch(card)
    watch.mark()
    for _ in range(50):
        x = (x @ x).clamp(-1, 1)
    watch.mark()
    (took,) = watch.spans()
    assert took > 50 * 2 * 4096**3 / 2e15, "faster than any GPU multiplies"


@pytest.mark.parametrize("run", [throughput.sweep, throughput.pair, compared.tokens, compared.decision, loader.loader])
def test_every_measurement_runs(device: torch.device, say: list[str], run: Any) -> None:
    *_, found = run(device="cpu" if device.type == "cpu" else "auto")
    assert found.progress == 1
    if run is throughput.sweep:
        say.append(
            f"a = {1e6 * found.launch:.0f} µs, c = {1e6 * found.per_sequence:.0f} µs, residual {found.residual:.2f}"
        )
