"""Fixtures for all tests, and what to do where there is no browser.

The tests of the GPU, tests/gpu, run where nothing but torch, numpy and pytest is installed, so nothing else is
imported here before a test needs it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("labkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("labkit")  # no test depends on the speed of the machine
torch.set_num_threads(1)  # tiny models: beside a busy program two threads wait for each other


# What makes a test slow is told by the words of its file.
WORDS = {
    "notebook": r"\b(nbclient|jupyter_client|tests\.workers\.kernels)\b",
    "processes": r"\b(subprocess|multiprocessing|workers|data_parallel|pipeline|on_ranks|casebook)\b",
    "panels": r"\b(labkit\.labs|labkit\.frame|Lab|panels)\b",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what each test needs, and begin with the longest."""
    for item in items:
        for name in sorted(_needs(item)):
            item.add_marker(name)
        if item.get_closest_marker("browser") or "tests/workers" in item.path.as_posix():
            item.add_marker(pytest.mark.flaky(reruns=1))  # a real browser, real processes that are killed
    items.sort(key=lambda item: next((at for at, name in enumerate(LONG) if item.get_closest_marker(name)), len(LONG)))
    _skip_without_chromium(items)


LONG = ("browser", "notebook", "processes")


def _needs(item: pytest.Item) -> set[str]:
    """Of the markers, those that hold for a test."""
    if "chromium" in getattr(item, "fixturenames", ()):
        return {"browser"}
    return _needs_of_file(item.path)


@functools.cache
def _needs_of_file(path: pathlib.Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    return {name for name, words in WORDS.items() if re.search(words, text)}


def _skip_without_chromium(items: list[pytest.Item]) -> None:
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


@pytest.fixture(autouse=True)
def _no_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tests with processes are left out, no other test starts ranks."""
    if "not processes" in request.config.option.markexpr:
        monkeypatch.setattr("labkit.workers._crew.Crew.start", _refuse)


def _refuse(_: Any) -> None:
    raise AssertionError("this test starts ranks, so WORDS in tests/conftest.py must find its file")


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


@pytest.fixture(scope="session")
def notebooks(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one JupyterLab of all browser tests, and its page."""
    from tests import lab_in_browser

    folder = tmp_path_factory.mktemp("served")
    with lab_in_browser.jupyter(folder) as address:
        yield lab_in_browser.Notebooks(chromium, address, folder)


@pytest.fixture
def opened_notebook(notebooks: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Open a notebook and run all its cells."""
    failures = request.session.testsfailed
    try:
        yield notebooks.run
        for page in notebooks.pages:
            assert page.said == []  # no console error, no request to the outside
            assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']").count() == 0
    finally:
        notebooks.close(failed=request.session.testsfailed > failures)


@pytest.fixture
def opened(opened_notebook: Any, notebooks: Any, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Open a notebook with these cells and run it."""
    from tests import lab_in_browser

    def open_cells(*cells: str, **options: Any) -> Any:
        name = re.sub(r"\W", "-", request.node.nodeid.removeprefix("tests/"))
        return opened_notebook(lab_in_browser.notebook(notebooks.folder / f"{name}.ipynb", *cells), **options)

    return open_cells
