"""The browser's side: sliders moved in real JupyterLab in headless Chromium, and pictures awaited."""

import ast
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from tests import lab_in_browser

SCRIPT = Path(__file__).with_name("page.js").read_text()
FORMS, PARTS = ("ours", "naive"), ("compute", "draw", "encode", "other", "total")
BLOCK, WARM = 10, 2  # presses of one form before the other has its turn; presses that do not count
# The naive form has inline's own defaults; at ratio 2 it is made as sharp as ours.
INLINE = {1: "", 2: '%config InlineBackend.figure_formats = ["retina"]\n'}
TAKEN = """async () => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel
    const reply = await kernel.requestExecute({ code: '', user_expressions: { it: 'kernel.taken()' } }).done
    return reply.content.user_expressions.it.data['text/plain'] }"""


@contextlib.contextmanager
def opened(address: str, name: str, ratio: float = 1) -> Iterator[Page]:
    """A notebook in a browser of its own, with the bench's script; its kernel ends with it."""
    with lab_in_browser.browser() as browser:
        # without "reset" JupyterLab would open the earlier notebooks too
        page = lab_in_browser.open_notebook(browser, address + "&reset", name, width=1280, ratio=ratio)
        page.evaluate(SCRIPT)
        try:
            yield page
        finally:
            page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")


@contextlib.contextmanager
def both(address: str, folder: str, name: str, ratio: int) -> Iterator[Page]:
    """One experiment, ours and below it the naive form."""
    ours = f"from tests.bench import kernel\nlab = kernel.lab({name!r})\nlab"
    path = lab_in_browser.notebook(Path(folder, f"{name}-{ratio}.ipynb"), ours, INLINE[ratio] + "kernel.naive(lab)")
    with opened(address, path.name, ratio) as page:
        lab_in_browser.run_all(page)
        lab_in_browser.settled(page)
        page.wait_for_selector(".widget-interact img", state="attached", timeout=60_000)
        page.wait_for_timeout(1500)  # the page tells its width and colours
        page.evaluate("() => bench.begin()")
        yield page


def first_picture(address: str, name: str) -> float:
    """Seconds from run-all, in a fresh kernel, to the first picture of a lab."""
    with opened(address, name) as page:
        start = time.perf_counter()
        lab_in_browser.run_all(page)
        page.wait_for_selector(".lk-canvas[data-seq]", state="attached", timeout=180_000)
        return time.perf_counter() - start


def taken(page: Page) -> Any:
    """The kernel's rows since the last call, and what it shows."""
    return json.loads(ast.literal_eval(page.evaluate(TAKEN)))


def steps(control: dict[str, Any], count: int) -> list[int]:
    """So many steps to and fro between the control's ends."""
    path, at, step, (below, above) = [], 0, 1, control["ends"]
    for _ in range(count):
        step = step if -below <= at + step <= above else -step
        at += step
        path.append(step)
    return path


def press(page: Page, form: str, control: dict[str, Any], path: list[int]) -> list[float | None]:
    """Milliseconds from each key to its picture; None where none came."""
    waited: list[float | None] = []
    page.evaluate("form => bench.look(form)", form)
    for step in path:
        time.sleep(0.08)
        page.evaluate("given => bench.arm(...given)", [form, control])
        page.keyboard.press("ArrowRight" if step > 0 else "ArrowLeft")
        waited.append(page.evaluate("() => window.waited"))
    return waited


def keys(page: Page, control: dict[str, Any], presses: int) -> dict[str, Any]:
    """Both forms in turn, so that noise hits them alike, and the kernel's rows of the same moves."""
    half = steps(control, (WARM + presses + 1) // 2)
    path = half + [-step for step in reversed(half)]  # ends where it began
    for form in FORMS:
        press(page, form, control, path[:WARM])
    taken(page)
    waited: dict[str, list[float | None]] = {form: [] for form in FORMS}
    for start in range(WARM, len(path), BLOCK):
        for form in FORMS:
            waited[form] += press(page, form, control, path[start : start + BLOCK])
    if alert := page.inner_text(".lk-error"):
        raise RuntimeError(f"the lab says: {alert}")
    return {"waited": waited, "naive bytes": page.evaluate("() => bench.bytes()"), **taken(page)}


def storm(page: Page, control: dict[str, Any], moves: int = 100, seconds: float = 2) -> dict[str, Any]:
    """So many moves in so many seconds: pictures shown, and how late the last one came."""
    found: dict[str, Any] = {}
    for form in FORMS:
        page.evaluate("form => bench.look(form)", form)
        given = [form, control, steps(control, moves), 1000 * seconds / moves]
        found[form] = page.evaluate("given => bench.storm(...given)", given)
    shown = taken(page)["shown"]
    if found["ours"]["text"] != shown["text"] or shown["ours"] != shown["naive"]:
        raise RuntimeError(f"after {moves} moves of {control['name']} the last state is not shown: {shown}")
    return {f"{form} {what}": round(found[form][what]) for what in ("pictures", "late ms") for form in FORMS}
