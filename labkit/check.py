"""Exercises: a function that a learner wrote goes in, a sentence on what it really does, with its number, comes out.

Every folder of labkit may hold `exercises`; each function there that is marked with `@exercise` is found by its name:
`labkit.check.token_mean(mine)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from labkit.folders import topics


def all() -> dict[str, Callable[..., Any]]:
    """Every exercise, by name.

    >>> "token_mean" in all()
    True
    """
    modules = [importlib.import_module(f"labkit.{topic}.exercises") for topic in topics("exercises")]
    marked = {
        name: each for module in modules for name, each in vars(module).items() if getattr(each, "exercise", 0) is True
    }
    return dict(sorted(marked.items()))


def __getattr__(name: str) -> Callable[..., Any]:
    if name in (exercises := all()):
        return exercises[name]
    raise AttributeError(f"there is no exercise {name!r}: try {', '.join(all())}")


def __dir__() -> list[str]:
    return list(all())
