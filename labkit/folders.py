"""A topic is a folder: its mathematics, and beside it `panels`, `exercises` and `rules` where it has them."""

from __future__ import annotations

import pathlib

import labkit


def topics(part: str) -> list[str]:
    """The topics whose folder holds a module or a package of that name, in alphabetical order.

    >>> topics("rules")
    ['cadence', 'clipping', 'data_parallel', 'normalization']

    They are found by looking into every folder of `labkit.__path__`: there is no list to keep.
    """
    places = (f"*/{part}.py", f"*/{part}/__init__.py")
    found = ((root, path) for root in labkit.__path__ for place in places for path in pathlib.Path(root).glob(place))
    return sorted({path.relative_to(root).parts[0] for root, path in found})
