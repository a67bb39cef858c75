"""One panel for each cell: running a cell again replaces the panel that it made before."""

from __future__ import annotations

from typing import Any, Protocol

from labkit.frame.style import Page


class Closable(Protocol):
    """What a cell can hold."""

    def close(self) -> None:
        """Let go of everything."""


page: Page | None = None  # the last page that a browser told of: where the next panel will most likely stand
_open: dict[str, tuple[int, list[Closable]]] = {}


def adopt(panel: Closable) -> None:
    """Note that the running cell made a panel, and close those of its earlier runs."""
    cell = running()
    if cell is None:
        return
    name, count = cell
    earlier, panels = _open.get(name, (count, []))
    if earlier != count:
        for old in panels:
            old.close()
        panels = []
    _open[name] = count, [*panels, panel]


def running() -> tuple[str, int] | None:
    """The running cell's id and execution count; None outside a notebook."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return None
    shell: Any = get_ipython()
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return None
    cell = kernel.get_parent().get("metadata", {}).get("cellId")
    return (cell, shell.execution_count) if cell else None
