"""The thread of the cell that made a panel: there all of its drawing happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


class CellThread:
    """The thread and the loop of the cell that makes this.

    >>> CellThread().call(print, "here")
    here
    """

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    def call(self, act: Callable[..., object], *arguments: Any) -> None:
        """Do it there, soon, whatever thread asks (JupyterLab's messages arrive in subshells); at once where we are."""
        if self._loop is None or threading.current_thread() is self._thread:
            act(*arguments)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act, *arguments)
