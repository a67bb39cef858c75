"""No test reads or writes what a learner has done on this machine, and none is in a class."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest

_data = tempfile.mkdtemp(prefix="labkit-tests-")
os.environ["LABKIT_DATA"] = _data  # the kernels of notebooks and browsers inherit it
for name in ("LABKIT_CLASS", "LABKIT_PROJECTOR"):
    os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _no_panel_stays_open() -> Iterator[None]:
    """Every test begins without open panels: hundreds of them hold gigabytes, and a report paints each."""
    yield
    if "labkit.frame.open_panels" in sys.modules:
        for panel in sys.modules["labkit.frame.open_panels"].panels():
            panel.close()


def pytest_unconfigure() -> None:
    """Leave nothing behind."""
    shutil.rmtree(_data, ignore_errors=True)
