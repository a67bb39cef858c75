"""No test reads or writes what a learner has done on this machine, and none is in a class."""

from __future__ import annotations

import os
import shutil
import tempfile

_data = tempfile.mkdtemp(prefix="labkit-tests-")
os.environ["LABKIT_DATA"] = _data  # the kernels of notebooks and browsers inherit it
for name in ("LABKIT_CLASS", "LABKIT_PROJECTOR"):
    os.environ.pop(name, None)


def pytest_unconfigure() -> None:
    """Leave nothing behind."""
    shutil.rmtree(_data, ignore_errors=True)
