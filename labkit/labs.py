"""What a learner sees: one panel for each experiment, by the name of its topic.

Every folder of labkit that holds `panels` is a lab: `labkit.labs.roofline()` shows all experiments of the roofline,
`labkit.labs.roofline("ceiling", bandwidth=80)` one of them, with its controls set.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from labkit.folders import topics
from labkit.frame.experiment import Experiment
from labkit.frame.faults import check, errors
from labkit.frame.lab import Lab
from labkit.frame.open_panels import projector
from labkit.learner.class_board import class_board
from labkit.learner.installation import Installation as installation
from labkit.learner.notebook_map import overview as map
from labkit.learner.report import report

__all__ = ["Lab", "all", "check", "class_board", "errors", "installation", "map", "projector", "report", "shown"]


def all() -> dict[str, Callable[..., Lab]]:
    """Every lab, by name.

    >>> "roofline" in all()
    True
    """
    return {topic: _door(topic) for topic in topics("panels")}


def experiments(topic: str) -> tuple[type[Experiment[Any]], ...]:
    """The experiments of a lab, in the order of its tabs.

    >>> [each.name for each in experiments("roofline")][:2]
    ['ceiling', 'machine']
    """
    kinds: tuple[type[Experiment[Any]], ...] = importlib.import_module(f"labkit.{topic}.panels").EXPERIMENTS
    return kinds


def shown(judged: Any) -> Any:
    """The Report of an audit as a picture, or the findings of `inspect` as a table.

    >>> from labkit.audit.bug_hunt.suspects import loops
    >>> repr(shown(loops(loop="B"))).splitlines()[0]
    'schedule-per-microbatch'
    """
    return importlib.import_module("labkit.audit.panels.report").picture(judged)


@functools.cache
def _door(topic: str) -> Callable[..., Lab]:
    """The function that opens a lab; its help is what the topic's panels say of themselves."""
    panels = importlib.import_module(f"labkit.{topic}.panels")

    def lab(experiment: str = "", **values: Any) -> Lab:
        kinds = experiments(topic)
        if prepare := getattr(panels, "prepare", None):
            prepare()
        chosen = [kind for kind in kinds if kind.name == experiment] or kinds
        return Lab([kind() for kind in chosen], experiment, topic=topic, **values)

    lab.__name__ = lab.__qualname__ = topic
    lab.__doc__ = inspect.getdoc(panels)
    return lab


def __getattr__(name: str) -> Callable[..., Lab]:
    if name in topics("panels"):
        return _door(name)
    raise AttributeError(f"there is no lab {name!r}: try {', '.join(topics('panels'))}")


def __dir__() -> list[str]:
    return [*__all__, *topics("panels")]
