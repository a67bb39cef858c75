"""Every notebook in real JupyterLab: it runs, all its panels come, at a projector's width and in one dark column."""

from __future__ import annotations

import pathlib
import re
import shutil

import nbformat
import pytest

from labkit import labs
from tests.lab_in_browser import OUTSIDE, OVER, Notebooks, Opened, serious, still, theme, until
from tests.notebooks.test_notebooks import NOTEBOOKS, watched

# What came of each code cell: nothing before it has run, else the errors among its outputs.
RAN = """() => jupyterapp.shell.currentWidget.context.model.toJSON().cells.filter(
    each => each.cell_type === 'code').map(each => each.execution_count && each.outputs.filter(
    output => output.output_type === 'error').map(error => `${error.ename}: ${error.evalue}`))"""


@pytest.fixture
def copy(notebooks: Notebooks, path: pathlib.Path) -> pathlib.Path:
    """The notebook among copies of all, since JupyterLab saves, with what watches it."""
    folder = pathlib.Path(shutil.copytree(path.parent, notebooks.folder / "notebooks", dirs_exist_ok=True))
    nbformat.write(watched(nbformat.read(path, as_version=4)), folder / path.name)
    return folder / path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_every_panel_comes_and_fits(opened_notebook: Opened, copy: pathlib.Path) -> None:
    cells = [cell.source for cell in nbformat.read(copy, as_version=4).cells if cell.cell_type == "code"]
    page = opened_notebook(copy, height=1400)
    until(lambda: page.evaluate(RAN) == [[] for _ in cells])
    panels = len(re.findall(rf"labkit\.labs\.({'|'.join(labs.all())})\(", "\n".join(cells)))
    for dark, width in ((False, 1024), (True, 560)):
        page.set_viewport_size({"width": width, "height": 1400})
        theme(page, dark)
        still(page)
        assert page.locator(".lk").count() == panels
        assert [words for words in page.locator(".lk-error").all_inner_texts() if words] == []
        assert page.evaluate(OUTSIDE) == [] and page.evaluate(OVER) == []
    assert serious(page) == []
