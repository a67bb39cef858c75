"""A lab on what a training step really is: batching, gradient accumulation and throughput."""

import importlib
from typing import Any

from labkit.errors import LabError

__version__ = "0.1.0"
__all__ = ["LabError", "accumulation", "check", "labs", "roofline"]


def __getattr__(name: str) -> Any:
    """Modules are imported on first use, so that `import labkit` costs nothing."""
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return importlib.import_module(f"labkit.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"labkit.{name}":
            raise
        raise AttributeError(f"module 'labkit' has no attribute {name!r}") from None
