"""Voilà: the notebooks as pages without code, in which a lab works and which ask nothing of the outside."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from playwright.sync_api import Browser

ROOT = pathlib.Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_pinned_version_is_one_that_labkit_allows() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["voila"]
    pinned = re.search(r"voila==([\d.]+)", MAKEFILE)
    assert pinned and pinned[1] in Requirement(extra[0]).specifier and "-m voila notebooks" in MAKEFILE


def test_the_browser_is_told_to_load_no_style_from_outside_and_the_server_stays_on_this_machine() -> None:
    config = json.loads((ROOT / "voila.json").read_text())["Voila"]
    policy = config["tornado_settings"]["headers"]["Content-Security-Policy"]
    assert config["ip"] == "127.0.0.1" and "style-src 'self' 'unsafe-inline'" in policy and "frame-ancestors" in policy


@pytest.fixture(scope="module")
def voila(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if importlib.util.find_spec("voila") is None:
        pytest.skip("Voilà is not installed: make .venv/voila")
    folder = tmp_path_factory.mktemp("voila")
    shutil.copy(ROOT / "notebooks" / "00_start_here.ipynb", folder)
    shutil.copy(ROOT / "voila.json", folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "voila", ".", "--no-browser", f"--port={port}"]
    server = subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


@pytest.mark.parametrize("dark", [False, True])
def test_a_lab_works_on_a_page_without_code(voila: str, chromium: Browser, dark: bool) -> None:
    page = chromium.new_context(viewport={"width": 1024, "height": 900}).new_page()
    left, answered = [], []
    page.on(
        "request",
        lambda request: None if request.url.startswith((voila, "data:", "blob:", "ws:")) else left.append(request),
    )
    page.on("response", lambda response: answered.append(response.url))
    page.goto(f"{voila}/voila/render/00_start_here.ipynb" + "?theme=dark" * dark)
    page.wait_for_selector(".lk-canvas[data-seq]", timeout=90_000)
    page.get_by_label("The heaviest token: how many times its right weight?").fill("4.375")
    page.get_by_role("button", name="Step", exact=True).click()
    page.wait_for_function("document.querySelector('.lk-score').textContent.includes('exactly')", timeout=30_000)
    corner = "[...document.querySelector('.lk-canvas').getContext('2d').getImageData(1, 1, 1, 1).data]"
    page.wait_for_function(
        f"({corner}.slice(0, 3).reduce((a, b) => a + b) < 200) === {str(dark).lower()}", timeout=20_000
    )
    assert "labkit.labs.accumulation" not in page.inner_text("body") and "02 Roofline" in page.inner_text("body")
    assert not {request.url for request in left} & set(answered)
    assert {request.resource_type for request in left} <= {"stylesheet"}
    assert all("csp" in (request.failure or "") for request in left)
    page.context.close()
