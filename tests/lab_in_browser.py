"""JupyterLab in a headless Chromium, for the browser tests and the bench."""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
from typing import Any

import nbformat
from playwright.sync_api import Browser, Page, sync_playwright

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


def open_notebook(
    browser: Browser,
    address: str,
    name: str,
    *,
    width: int = 1024,
    height: int = 900,
    ratio: float = 1,
    dark: bool = False,
) -> Page:
    """A page with the notebook open and its kernel idle; `page.said` collects console errors and outside requests."""
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
    page.goto(address.format(name))
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
    theme(page, dark)
    return page


def command(page: Page, name: str, **arguments: Any) -> None:
    """Run one of JupyterLab's own commands."""
    page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments])


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
