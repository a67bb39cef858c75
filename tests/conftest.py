"""Fixtures for all tests, and what to do where there is no browser.

The tests of the GPU, tests/gpu, run where nothing but torch, numpy and pytest is installed, so nothing else is
imported here before a test needs it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("labkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("labkit")  # no test depends on the speed of the machine
torch.set_num_threads(1)  # tiny models: beside a busy program two threads wait for each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without Chromium the browser tests are skipped; in CI they run and fail."""
    driven = [item for item in items if item.get_closest_marker("browser")]
    if not driven or os.environ.get("CI"):
        return
    from tests import lab_in_browser

    if not lab_in_browser.chromium():
        for item in driven:
            item.add_marker(pytest.mark.skip(reason="no Chromium found: install the package chromium"))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """No test leaves an error of a callback unnoticed, or a page behind."""
    _errors_left()
    yield
    left = _errors_left()
    assert not left, left


def _errors_left() -> list[BaseException]:
    """The errors since the last call; there are none where no lab was imported."""
    if "labkit.labs" not in sys.modules:
        return []
    from labkit.frame import cell_panels
    from labkit.labs import errors

    left = list(errors)
    errors.clear()
    cell_panels.page = None
    return left


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from tests import lab_in_browser

    with lab_in_browser.browser() as opened:
        yield opened
