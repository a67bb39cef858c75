"""The widget: what the page is told, what it says, and the one thread on which all of it happens."""

from __future__ import annotations

import asyncio
import base64
import html
import io
import pathlib
import threading
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anywidget
import traitlets

from labkit.errors import LabError
from labkit.frame import cell_panels, open_panels
from labkit.frame.canvas import Canvas, Patch
from labkit.frame.style import DARK, LIGHT, Page

PAPER = Page(ratio=2.0)
HERE = pathlib.Path(__file__).parent

errors: list[BaseException] = []


def check() -> None:
    """Raise the first error that a lab's callback met and that was no `LabError`; a notebook's test ends with this.

    >>> check()
    """
    if errors:
        raise errors[0]


class Panel(anywidget.AnyWidget):
    """One widget model: `spec` and `page` are its words, `frame` is its picture.

    The page speaks in messages. They may arrive in any thread (JupyterLab uses subshells), so each is brought to the
    thread of the cell that made the panel, and whatever goes wrong there stands in the page's alert line.
    """

    _esm = HERE / "panel.js"
    _css = HERE / "panel.css"
    uid = traitlets.Unicode().tag(sync=True)
    spec = traitlets.Dict().tag(sync=True)
    page = traitlets.Dict().tag(sync=True)
    frame = traitlets.Dict().tag(sync=True)
    large = traitlets.Bool().tag(sync=True)
    _closed = True  # until __init__ has run

    def __init__(self) -> None:
        super().__init__(uid=uuid.uuid4().hex)
        self._thread = threading.current_thread()
        self._loop = _running_loop()
        self._canvas = Canvas(cell_panels.page or LIGHT)
        self._ack: dict[str, int] = {}
        self._seq = 0
        self._closed = False
        open_panels.note(self)
        self.on_msg(self._receive)
        cell_panels.adopt(self)

    # for the lab to say --------------------------------------------------------------------------------------------

    def _words(self) -> dict[str, Any]:
        """What `page` shall hold."""
        raise NotImplementedError

    def _paint(self) -> None:
        """Bring the figure up to date."""
        raise NotImplementedError

    def _command(self, type: str, **given: Any) -> None:
        """Do what a control asks for."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Stop what runs; called in any thread."""
        raise NotImplementedError

    def _refuse(self, sentence: str) -> None:
        """Note what went wrong."""
        raise NotImplementedError

    # from the page -------------------------------------------------------------------------------------------------

    def _receive(self, _: object, content: dict[str, Any], buffers: object) -> None:
        """A message arrives, in whatever thread; Stop acts at once, even while a cell runs."""
        if any(command["type"] == "stop" for command in content.get("commands", ())):
            self._stop()
        self._on_main(lambda: self._handle(content))

    def _on_main(self, act: Callable[[], None]) -> None:
        """Do it on the thread of the cell that made this panel: one thread draws."""
        if self._loop is None or threading.current_thread() is self._thread:
            self._guarded(act)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._guarded, act)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Whatever goes wrong stands in the page; what is no LabError is also kept for `check`."""
        if self._closed:
            return
        try:
            act()
        except BaseException as error:
            self._fail(error)
        try:
            self._show()
        except BaseException as error:
            self._fail(error)
            self.page = {**self.page, "error": _sentence(error), "ack": self._ack}

    def _fail(self, error: BaseException) -> None:
        self._refuse(_sentence(error))
        if not isinstance(error, LabError):
            errors.append(error)
            traceback.print_exception(error)

    def _handle(self, content: dict[str, Any]) -> None:
        if "client" in content:
            self._ack = {**self._ack, str(content["client"]): int(content["seq"])}
        if content["type"] == "page":
            self._restyle(Page(**content["page"]))
        elif content["type"] == "whole":
            self._push(whole=True)
        for command in content.get("commands", ()):
            self._command(**command)

    def _restyle(self, heard: Page) -> None:
        known, cell_panels.page = cell_panels.page, heard
        if heard != self._canvas.page or known is None:
            self._canvas.restyle(heard)

    # to the page ---------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        """Draw the state, and tell the page, in one message."""
        self._paint()
        with self.hold_sync():
            self.page = self._words() | {"ack": self._ack}
            self._push()

    def _push(self, whole: bool = False) -> None:
        """Send what changed of the picture; in both themes, as long as no page has told its own."""
        canvas, themes = self._canvas, {}
        if cell_panels.page is None:
            canvas.restyle(DARK)
            themes["dark"] = _sendable(canvas.patches())
            canvas.restyle(LIGHT)
        if whole:
            canvas.forget()
        patches = canvas.patches()
        if not patches:
            return
        self._seq += 1
        size = [round(canvas.figure.bbox.width), round(canvas.figure.bbox.height)]
        self.frame = {
            "seq": self._seq,
            "base": None if [patches[0].width, patches[0].height] == size else self._seq - 1,
            "size": size,
            "css": [canvas.page.width, canvas.height],
            "patches": _sendable(patches),
            "themes": themes,
        }

    def picture(self) -> bytes:
        """The picture as PNG, for paper: light, and fine enough to print."""
        canvas, page = self._canvas, self._canvas.page
        canvas.restyle(PAPER)
        self._paint()
        out = io.BytesIO()
        canvas.figure.savefig(out, format="png", dpi=canvas.figure.dpi)
        canvas.restyle(page)
        self._paint()
        return out.getvalue()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The live panel, and for pages without a kernel the picture and its sentence."""
        bundle = super()._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        if not data or self._closed:
            return bundle
        out = io.BytesIO()
        self._canvas.figure.savefig(out, format="png")
        png, words = base64.b64encode(out.getvalue()).decode(), str(self.page["sentence"])
        alt = html.escape(words, quote=True)
        figure = f'<figure><img alt="{alt}" src="data:image/png;base64,{png}"><figcaption>{alt}</figcaption></figure>'
        return {**data, "text/plain": words, "text/html": figure, "image/png": png}, metadata

    def close(self) -> None:
        """Let go of figure and page."""
        self._closed = True
        layout = self.layout
        super().close()
        layout.close()
        self._canvas.clear()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, LabError) else f"a fault in labkit itself: {type(error).__name__}: {error}"


def _sendable(patches: Sequence[Patch]) -> list[Mapping[str, Any]]:
    return [vars(patch) for patch in patches]
