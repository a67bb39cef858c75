"""A canvas on its way to the page: what changed of it since the last message."""

from __future__ import annotations

import io
from typing import Any

from labkit.frame import cell_panels
from labkit.frame.canvas import Canvas
from labkit.frame.style import DARK, LIGHT, Page


class Picture:
    """Numbers the messages, so that a page that lost one can ask for the whole."""

    def __init__(self) -> None:
        self.canvas = Canvas(cell_panels.page or LIGHT)
        self._seq = 0

    def restyle(self, page: Page) -> None:
        """A page tells how it looks: the next panel will most likely stand there too."""
        first, cell_panels.page = cell_panels.page is None, page
        if first or page != self.canvas.page:
            self.canvas.restyle(page)

    def changes(self, whole: bool = False) -> dict[str, Any] | None:
        """What changed, for the trait `frame`; in both themes, as long as no page has told its own."""
        canvas, themes = self.canvas, {}
        if cell_panels.page is None:
            canvas.restyle(DARK)
            themes["dark"] = [vars(patch) for patch in canvas.patches()]
            canvas.restyle(LIGHT)
        if whole:
            canvas.forget()
        patches = canvas.patches()
        if not patches:
            return None
        self._seq += 1
        size = [round(canvas.figure.bbox.width), round(canvas.figure.bbox.height)]
        return {
            "seq": self._seq,
            "base": None if [patches[0].width, patches[0].height] == size else self._seq - 1,
            "size": size,
            "css": [canvas.page.width, canvas.height],
            "patches": [vars(patch) for patch in patches],
            "themes": themes,
        }

    def png(self) -> bytes:
        """The figure as a file, as fine as the page that it stands on."""
        out = io.BytesIO()
        self.canvas.figure.savefig(out, format="png", dpi=self.canvas.figure.dpi)
        return out.getvalue()
