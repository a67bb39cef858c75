"""Every notebook: runs top to bottom without network, is stripped, and has the frame that all share."""

from __future__ import annotations

import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

from tests.lab_in_browser import ROOT, chromium

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NO_NETWORK = """
import socket
def refuse(self, address, *rest):
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "localhost", "::1"):
        raise OSError(f"a notebook reached for the network: {address}")
    return connect(self, address, *rest)
connect, socket.socket.connect = socket.socket.connect, refuse
"""


def watched(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook in a kernel without network, whose last cell raises what a callback of a lab met."""
    notebook.cells.insert(0, nbformat.v4.new_code_cell(NO_NETWORK))
    notebook.cells.append(nbformat.v4.new_code_cell("import labkit\nlabkit.labs.check()"))
    return notebook


def execute(notebook: nbformat.NotebookNode, folder: pathlib.Path) -> nbformat.NotebookNode:
    """Run it as a learner would, and raise what any cell met."""
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


@pytest.mark.skipif(bool(chromium()), reason="they run in test_in_browser.py")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_top_to_bottom(path: pathlib.Path) -> None:
    ran = execute(watched(nbformat.read(path, as_version=4)), path.parent)
    assert not [o for cell in ran.cells for o in cell.get("outputs", ()) if o.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stripped(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert all(len(cell.source.splitlines()) <= 15 for cell in code), "notebooks are thin"


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.stem[:2] != "00"], ids=lambda path: path.stem)
def test_it_has_the_frame(path: pathlib.Path) -> None:
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    for part in ("**Questions**", "minutes", "memory", "**Predict.**", "**Explain.**", "## Key points", "## Sources"):
        assert part in text, part


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.stem[:2] != "00"], ids=lambda path: path.stem)
def test_its_exercises_are_complete(path: pathlib.Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    exercises = re.split(r"^## Exercise", text, flags=re.MULTILINE)[1:]
    assert len(exercises) >= 2
    for exercise in exercises:
        for part in ("*Difficulty: ", "minutes.*", "<summary>Hint", "<summary>Solution"):
            assert part in exercise, (part, exercise)
    assert len({call for cell in cells for call in re.findall(r"labkit\.check\.\w+", cell.source)}) >= 2
    _, _, question = text.partition("**One question more.**")
    assert re.search("[Cc]ommon wrong answers?:", question), "a question of explanation, with common wrong answers"


@pytest.mark.parametrize(
    "when", ["lab.step()", "lab._receive(lab, dict(type='commands', commands=[dict(type='step')]), [])"]
)
def test_a_lab_whose_experiment_raises_makes_the_run_fail(when: str, tmp_path: pathlib.Path) -> None:
    cell = f"from labkit.labs import Lab\nfrom tests.made import Broken\nlab = Lab([Broken()], when=1)\n{when}"
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(watched(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])), ROOT)


def test_exported_html_keeps_picture_and_sentence() -> None:
    cell = "import labkit\nlab = labkit.labs.roofline('ceiling')\nlab.step()\nlab"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    NotebookClient(notebook, timeout=120, store_widget_state=False).execute()
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert '<figure><img alt="At 2 FLOP/byte' in page and "<figcaption>At 2 FLOP/byte" in page
