"""Fixtures for all tests, and what to do where there is no browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from labkit.labs import _cells, errors
from tests import lab_in_browser

settings.register_profile("labkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("labkit")  # no test depends on the speed of the machine
torch.set_num_threads(1)  # tiny models: beside a busy program two threads wait for each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without Chromium the browser tests are skipped; in CI they run and fail."""
    if lab_in_browser.chromium() or os.environ.get("CI"):
        return
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason="no Chromium found: install the package chromium"))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """No test leaves an error of a callback unnoticed, or a page behind."""
    errors.clear()
    _cells.page = None
    yield
    left = list(errors)
    errors.clear()
    assert not left, left


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with lab_in_browser.browser() as opened:
        yield opened
