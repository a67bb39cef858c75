"""What a learner sees: one panel for each experiment, by the name of its topic."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable
from typing import Any

from labkit.labs._doctor import Installation as installation
from labkit.labs._lab import Lab
from labkit.labs._panel import check, errors

__all__ = ["Lab", "accumulation", "all", "check", "errors", "installation", "roofline"]

_TOPICS = ("roofline", "accumulation")


def roofline(experiment: str = "", **values: Any) -> Lab:
    """The roofline: a modelled ceiling, this machine measured, and four traps.

    >>> roofline().experiments[0]
    'ceiling'

    With the name of an experiment the panel shows that one alone; values set its controls.
    """
    return _topic("roofline", experiment, values)


def accumulation(experiment: str = "", **values: Any) -> Lab:
    """Mean or token sum: the weight of each token, layers, trainings, and what breaks an equivalence.

    >>> accumulation("by_hand").experiments
    ['by_hand']
    """
    return _topic("accumulation", experiment, values)


def all() -> dict[str, Callable[..., Lab]]:
    """Every lab, by name.

    >>> "roofline" in all()
    True
    """
    return {name: globals()[name] for name in _TOPICS}


def _topic(name: str, experiment: str, values: dict[str, Any]) -> Lab:
    found = importlib.import_module(f"labkit.labs._{name}").EXPERIMENTS
    chosen = [kind for kind in found if kind.name == experiment] if experiment else builtins.list(found)
    return Lab([kind() for kind in chosen or found], experiment, **values)
