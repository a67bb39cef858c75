"""JupyterLab in a headless Chromium, for the browser tests and the bench."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import nbformat
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

Opened = Callable[..., Page]
ROOT = pathlib.Path(__file__).parent.parent
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync"]


def chromium() -> str | None:
    """The installed browser."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextlib.contextmanager
def jupyter(folder: pathlib.Path) -> Iterator[str]:
    """A JupyterLab that serves `folder`; its address, with {} where the token goes in."""
    token = secrets.token_hex(16)
    with socket.socket() as probe, tempfile.TemporaryDirectory() as home:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.root_dir={folder}"]
        command += [
            "--ip=127.0.0.1",
            f"--port={port}",
            f"--IdentityProvider.token={token}",
            "--ServerApp.port_retries=0",
        ]
        command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.news_url=None"]
        command += ["--LabApp.expose_app_in_browser=True"]
        homes = {"JUPYTER_CONFIG_DIR": home, "JUPYTER_DATA_DIR": home + "/data", "IPYTHONDIR": home + "/ipython"}
        server = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), **homes},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _wait_for(f"http://127.0.0.1:{port}/api?token={token}", server)
            yield f"http://127.0.0.1:{port}/lab/tree/{{}}?reset&token={token}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)  # its kernels are in the same group
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError("JupyterLab did not start")
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("JupyterLab did not answer within a minute")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium(), args=QUIET)
        yield opened
        opened.close()


def notebook(path: pathlib.Path, *cells: str) -> pathlib.Path:
    """Write a notebook of code cells."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, path)
    return path


def new_page(browser: Browser, *, width: int = 1024, height: int = 900, ratio: float = 1) -> Page:
    """An empty page with storage of its own; `page.said` collects console errors and outside requests."""
    context = browser.new_context(viewport={"width": width, "height": height}, device_scale_factor=ratio)
    page = context.new_page()
    said: list[str] = []
    page.said = said  # type: ignore[attr-defined]
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request",
        lambda r: None if re.match(r"(https?|wss?)://127\.0\.0\.1|data:|blob:", r.url) else said.append(r.url),
    )
    return page


def open_notebook(
    browser: Browser, address: str, name: str, *, dark: bool = False, width: int = 1024, ratio: float = 1
) -> Page:
    """A page of its own with the notebook open and its kernel idle."""
    page = new_page(browser, width=width, ratio=ratio)
    page.goto(address.format(name))
    ready(page)
    theme(page, dark)
    return page


def ready(page: Page) -> None:
    """Wait until a notebook is shown and its kernel answers."""
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
    page.evaluate(
        """async () => {
        const session = () => window.jupyterapp.shell.currentWidget?.sessionContext
        while (!session()?.session?.kernel) await new Promise(r => setTimeout(r, 50))
        const sessionContext = session()
        await sessionContext.ready
        await sessionContext.session.kernel.info
        await sessionContext.session.kernel.requestKernelInfo() }"""
    )


class Notebooks:
    """One JupyterLab whose page stays: a notebook opens in it with a kernel of its own, and is closed with it."""

    def __init__(self, browser: Browser, address: str, folder: pathlib.Path) -> None:
        self.browser, self.address, self.folder = browser, address, folder
        self.lasting: Page | None = None
        self.pages: list[Page] = []  # of the test that runs

    def run(
        self, path: pathlib.Path, *, dark: bool = False, fresh: bool = False, ratio: float = 1, **size: int
    ) -> Page:
        """Open a notebook and run it; `fresh` or another pixel ratio loads JupyterLab anew, in a page of its own."""
        name = path.relative_to(self.folder).as_posix()
        if fresh or ratio != 1:
            page = new_page(self.browser, ratio=ratio)
            page.goto(self.address.format(name))
        else:
            page = self._launcher()
            command(page, "docmanager:open", path=name)
        self.pages.append(page)
        page.set_default_timeout(20_000)
        page.set_viewport_size({"width": 1024, "height": 900, **size})  # type: ignore[typeddict-item]
        ready(page)
        theme(page, dark)
        run_all(page)
        settled(page)
        return page

    def _launcher(self) -> Page:
        """The page that lasts."""
        if self.lasting is None:
            self.lasting = new_page(self.browser)
        page = self.lasting
        if not page.evaluate("() => 'jupyterapp' in window"):
            page.goto(self.address.replace("/tree/{}", ""))
            page.wait_for_selector(".jp-Launcher", timeout=90_000)
        if page not in self.pages:
            page.said.clear()  # type: ignore[attr-defined]
        return page

    def close(self, failed: bool) -> None:
        """End all kernels and pages; the one that lasts shows the launcher again, unless a test failed in it."""
        for page in {*self.pages, *([self.lasting] if failed and self.lasting else [])}:
            if page is self.lasting and not failed:
                page.evaluate(CLOSE)
                page.wait_for_selector(".jp-Launcher")
            else:
                page.context.close()
        self.pages, self.lasting = [], None if failed else self.lasting
        for session in json.loads(self._ask("GET", "")):
            self._ask("DELETE", session["id"])

    def _ask(self, method: str, session: str) -> bytes:
        address = re.sub("lab/tree.*token=", f"api/sessions/{session}?token=", self.address)
        with urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=60) as reply:
            return bytes(reply.read())


CLOSE = (
    "() => [...jupyterapp.shell.widgets('main')].filter(each => each.sessionContext).forEach(each => each.dispose())"
)


def command(page: Page, name: str, **arguments: Any) -> None:
    """Run one of JupyterLab's own commands."""
    page.evaluate("async ([name, args]) => { await jupyterapp.commands.execute(name, args) }", [name, arguments])


def theme(page: Page, dark: bool) -> None:
    """Switch between JupyterLab's light and dark theme."""
    command(page, "apputils:change-theme", theme=f"JupyterLab {'Dark' if dark else 'Light'}")
    page.wait_for_selector(f'body[data-jp-theme-light="{str(not dark).lower()}"]', state="attached")


def run_all(page: Page) -> None:
    """Run every cell; returns at once."""
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")


def settled(page: Page, seconds: float = 90) -> None:
    """Wait until the kernel is idle and every panel has painted."""
    page.wait_for_function(
        """() => { const all = [...document.querySelectorAll('.lk-canvas')];
        return all.length && all.every(c => c.dataset.seq) }""",
        timeout=seconds * 1000,
    )
    idle = '.jp-Notebook-ExecutionIndicator[data-status="idle"]'
    page.wait_for_selector(idle, timeout=seconds * 1000, state="attached")


PATIENCE = 60  # seconds after which a test gives up: no measure of speed
STILL = """() => new Promise(done => {
    const shape = () => JSON.stringify([...document.querySelectorAll('.lk, .lk *')].map(each => {
        const box = each.getBoundingClientRect()
        return [box.width, box.height, box.left, each.dataset.seq] }))
    let last = '', same = 0
    const look = () => { const now = shape(); same = now === last ? same + 1 : 0; last = now
        same < 5 ? setTimeout(() => requestAnimationFrame(look), 60) : done() }
    look() })"""


def until(true: Callable[[], Any]) -> None:
    """Wait until something is true."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def still(page: Page) -> None:
    """Wait until the panels' layout and pictures have stopped changing: what a page tells its kernel waits 120 ms."""
    page.evaluate(STILL)


def pixels(page: Page) -> str:
    """The first panel's picture."""
    return str(page.evaluate("document.querySelector('.lk-canvas').toDataURL()"))


def words(page: Page, name: str) -> str:
    """The text of one part of the first panel."""
    return page.locator(f".lk-{name}").first.inner_text()


def step(page: Page) -> None:
    """Press Step."""
    page.get_by_role("button", name="Step", exact=True).click()


def corner(page: Page) -> list[int]:
    """The first picture's own background."""
    return list(
        page.evaluate("[...document.querySelector('.lk-canvas').getContext('2d').getImageData(1, 1, 1, 1).data]")
    )


def serious(page: Page, context: str = ".lk") -> list[str]:
    """What axe finds serious, and where."""
    violations = Axe().run(page, context=context, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in violations if v["impact"] in ("serious", "critical")]


def accessible(page: Page) -> None:
    """In both themes the picture has the theme's background, and axe finds nothing serious; it ends in light."""
    for dark in (True, False):
        theme(page, dark)
        until(lambda dark=dark: sum(corner(page)[:3]) < 150 if dark else sum(corner(page)[:3]) > 600)
        still(page)
        assert serious(page) == []


# What sticks out of a panel, and what of a control.
OUTSIDE = """() => [...document.querySelectorAll('.lk')].flatMap(
    panel => [...panel.querySelectorAll('*')].filter(each => {
    const box = each.getBoundingClientRect(), whole = panel.getBoundingClientRect()
    const hidden = !box.width || each.closest('.lk-hidden, .lk-probe, pre, .lk-table')
    return !hidden && (box.right > whole.right + 2 || box.left < whole.left - 2)
}).map(each => `${each.className || each.tagName}: ${each.textContent.slice(0, 40)}`))"""
OVER = """() => [...document.querySelectorAll('.lk-control')].filter(control => [...control.querySelectorAll('*')].some(
    each => each.getBoundingClientRect().right > control.getBoundingClientRect().right + 2)).map(c => c.textContent)"""
