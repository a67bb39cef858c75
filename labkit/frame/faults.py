"""What goes wrong in a callback: a sentence for the page, and a list from which a notebook's test raises."""

from __future__ import annotations

import traceback

from labkit.errors import LabError

errors: list[BaseException] = []


def check() -> None:
    """Raise the first error that a lab's callback met and that was no `LabError`; a notebook's test ends with this.

    >>> check()
    """
    if errors:
        raise errors[0]


def keep(error: BaseException) -> str:
    """The sentence for the page; what is no LabError is also kept for `check`, and printed.

    >>> keep(LabError("rows = 0: try 1"))
    'rows = 0: try 1'
    """
    if isinstance(error, LabError):
        return str(error)
    errors.append(error)
    traceback.print_exception(error)
    return f"a fault in labkit itself: {type(error).__name__}: {error}"
