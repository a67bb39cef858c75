"""Every notebook in real JupyterLab: all its panels come, at the width of a projector and in one dark column."""

from __future__ import annotations

import pathlib
import re
import shutil
from collections.abc import Iterator

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from labkit import labs
from tests.lab_in_browser import jupyter, open_notebook, run_all, settled, theme
from tests.notebooks.test_notebooks import NOTEBOOKS

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("notebooks")
    for path in NOTEBOOKS:
        shutil.copy(path, folder)
    with jupyter(folder) as address:
        yield address


OUTSIDE = """() => [...document.querySelectorAll('.lk')].flatMap(
    panel => [...panel.querySelectorAll('*')].filter(each => {
    const box = each.getBoundingClientRect(), whole = panel.getBoundingClientRect()
    const hidden = !box.width || each.closest('.lk-hidden, .lk-probe, pre, .lk-table')
    return !hidden && (box.right > whole.right + 2 || box.left < whole.left - 2)
}).map(each => `${each.className || each.tagName}: ${each.textContent.slice(0, 40)}`))"""
OVER = """() => [...document.querySelectorAll('.lk-control')].filter(control => [...control.querySelectorAll('*')].some(
    each => each.getBoundingClientRect().right > control.getBoundingClientRect().right + 2)).map(c => c.textContent)"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_panel_comes_and_fits(served: str, chromium: Browser, path: pathlib.Path) -> None:
    code = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    page = open_notebook(chromium, served, path.name, height=1400)
    page.set_default_timeout(20_000)
    run_all(page)
    settled(page)
    for dark, width in ((False, 1024), (True, 560)):
        page.set_viewport_size({"width": width, "height": 1400})
        theme(page, dark)
        page.wait_for_timeout(500)
        assert page.locator(".lk").count() == len(re.findall(rf"labkit\.labs\.({'|'.join(labs.all())})\(", code))
        assert [words for words in page.locator(".lk-error").all_inner_texts() if words] == []
        assert page.evaluate(OUTSIDE) == [] and page.evaluate(OVER) == []
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']").count() == 0
    assert page.said == []  # type: ignore[attr-defined]  # no console error, no request to the outside
    found = Axe().run(page, context=".lk", options={"resultTypes": ["violations"]}).response["violations"]
    assert [rule["id"] for rule in found if rule["impact"] in ("serious", "critical")] == []
    page.context.close()
