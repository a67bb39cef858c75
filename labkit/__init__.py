"""A lab on what a training step really is: batching, gradient accumulation and throughput.

`labkit.labs.roofline()` opens a panel, `labkit.check.token_mean(mine)` judges a function, and the mathematics of every
topic is a module of its own: `labkit.roofline.attainable(2, 80)`.
"""

import importlib
from typing import Any

from labkit.errors import LabError

__version__ = "0.1.0"
__all__ = ["LabError", "check", "labs"]


def __dir__() -> list[str]:
    import pkgutil

    modules = (each.name for each in pkgutil.iter_modules(__path__))
    return sorted({*globals(), *(name for name in modules if not name.startswith("_"))})


def __getattr__(name: str) -> Any:
    """Modules are imported on first use, so that `import labkit` costs nothing."""
    if name not in __dir__():
        raise AttributeError(f"module 'labkit' has no attribute {name!r}", name=name)
    return importlib.import_module(f"labkit.{name}")
