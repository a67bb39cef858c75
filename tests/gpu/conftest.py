"""The mathematics on a GPU: `make gpu`, or `python -m pytest tests/gpu` where torch, numpy and pytest are installed.

Skipped where there is none. LABKIT_TEST_DEVICE=cpu puts the CPU in the place of the GPU: that shows that the tests
run and can fail, and nothing of any card; those that only a GPU can answer stay skipped.
"""

from __future__ import annotations

import os

import pytest
import torch

from labkit import device as devices

NO_GPU = "no GPU: torch.cuda.is_available() is False"
said: list[str] = []


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tests run."""
    name = os.environ.get("LABKIT_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        said.append(NO_GPU)
        pytest.skip(NO_GPU)
    found = devices.pick(name)
    said.append(f"device: {devices.name(found)}")
    return found


@pytest.fixture
def card(device: torch.device) -> torch.device:
    """The same, for what only a GPU has: events, a memory of its own."""
    if device.type != "cuda":
        pytest.skip("only a GPU can answer this")
    return device


@pytest.fixture
def say(device: torch.device) -> list[str]:
    """Lines to print after the tests."""
    return said


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say once which device it was, what was measured there, or why nothing was."""
    if said:
        terminalreporter.section("GPU")
        terminalreporter.write_line("\n".join(said))
