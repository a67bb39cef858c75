"""The tests of this folder that take minutes wait to be asked for: pytest -m slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit import workers
from labkit.workers import Pool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: asked for by -m slow"))


@pytest.fixture(scope="module", params=["forkserver", "spawn"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Two ranks by each start method, kept for the tests of a module."""
    workers.close()
    with Pool(2, request.param) as opened:
        yield opened


@pytest.fixture
def forked() -> Iterator[Pool]:
    """Two ranks that start in no time."""
    with Pool(2, "forkserver") as opened:
        yield opened


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this process makes its temporary folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path
