"""The panels that are open in this kernel: one switch makes all of them large, a report takes their pictures."""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any

_large = os.environ.get("LABKIT_PROJECTOR", "") not in ("", "0")
_numbers = itertools.count()
_open: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note(panel: Any) -> None:
    """A widget with a trait `large` is made: it follows the switch from now on."""
    _open[next(_numbers)] = panel
    panel.large = _large


def panels() -> list[Any]:
    """All that were made and not closed, in the order of making.

    >>> import labkit
    >>> lab = labkit.labs.roofline("ceiling")
    >>> panels()[-1] is lab
    True
    """
    return [panel for _, panel in sorted(_open.items()) if panel.comm is not None]


def large() -> bool:
    """Whether type and lines are large.

    >>> large()
    False
    """
    return _large


def projector(on: bool = True) -> None:
    """Make type and lines of all labs half as large again, for a projector; `projector(False)` takes it back.

    >>> projector()
    >>> large()
    True
    >>> projector(False)

    The button at the foot of every panel does the same; with LABKIT_PROJECTOR=1 a kernel begins so.
    """
    global _large
    _large = bool(on)
    for panel in panels():
        panel.large = _large
