"""`make bench`: how fast the labs answer, beside the naive form; a table, and the same in .bench/results.json."""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
import psutil

from tests import lab_in_browser
from tests.bench import browser
from tests.bench.pss import megabytes

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "numpy", "matplotlib", "jupyterlab", "ipywidgets", "anywidget", "ipykernel", "playwright")
Rows = Iterator[tuple[str, dict[str, Any]]]  # each a table's title and a row of it
PANEL = re.compile(r"labkit\.labs\.(?!installation|shown|map)\w+\(.*\)$")  # a cell's last line
failures: list[str] = []
stopped: list[int] = []


def attempt(name: str, work: Callable[..., Any], *given: Any) -> Any:
    """What the work returns; where it fails that is noted, None comes back, and the rest goes on."""
    if stopped:
        sys.exit(f"stopped before {name}")
    print(time.strftime("%H:%M:%S"), name, file=sys.stderr, flush=True)
    try:
        return work(*given)
    except Exception as error:
        failures.append(f"{name}: {type(error).__name__}: {str(error)[-400:]}")


def spread(values: Sequence[float | None], scale: float = 1.0) -> dict[str, float]:
    """Quartiles and 95th percentile of the values that are there, and how many those are."""
    there = [scale * value for value in values if value is not None]
    if not there:
        raise RuntimeError("nothing was measured")
    cuts = statistics.quantiles(there, n=20, method="inclusive") if len(there) > 1 else there * 19
    names = {"p25": 4, "p50": 9, "p75": 14, "p95": 18}
    return {name: round(cuts[at], 3) for name, at in names.items()} | {"count": len(there)}


def python(code: str) -> Any:
    """What a Python process of its own prints as JSON; this one loads no torch, which would blur times and memory."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def said(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": said("git", "describe", "--always", "--dirty"),
        **python("from tests.bench import kernel; kernel.about()"),
        "cores": os.cpu_count(),
        "load average before": os.getloadavg(),
        "python": platform.python_version(),
        "chromium": said(lab_in_browser.chromium() or "true", "--version"),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def labs(options: argparse.Namespace) -> Rows:
    """Every numeric control of every quick experiment of every lab, at both pixel ratios."""
    with tempfile.TemporaryDirectory() as folder, lab_in_browser.jupyter(Path(folder)) as address:
        for name in options.experiments:
            for ratio in (1, 2) if name.startswith(options.only) else ():
                given = (f"{name} @{ratio}", experiment, address, folder, name, ratio, options.presses)
                yield from attempt(*given) or ()


def experiment(address: str, folder: str, name: str, ratio: int, presses: int) -> list[tuple[str, dict[str, Any]]]:
    rows: list[tuple[str, dict[str, Any]]] = []
    with browser.both(address, folder, name, ratio) as page:
        for at, control in enumerate(browser.taken(page)["shown"]["controls"]):
            full = f"{name}.{control['name']} @{ratio}"
            rows += attempt(full, figures, full, page, control, presses) or ()
            if at == 0 and (found := attempt(f"{full}: 100 moves", browser.storm, page, control)):
                rows.append(("100 moves in 2 s: pictures shown, last move to last state", {"control": full, **found}))
    return rows


def figures(name: str, page: Any, control: dict[str, Any], presses: int) -> list[tuple[str, dict[str, Any]]]:
    """The figures of one control, from samples in ms (page) and s (kernel)."""
    found = browser.keys(page, control, presses)
    ours, naive = (found[form] for form in browser.FORMS)
    waited = {f"{form} ms": spread(found["waited"][form]) for form in browser.FORMS}
    whole = [each["p50"] for each in waited.values()]
    compute = [spread([row["compute"] for row in rows], 1e3)["p50"] for rows in (ours, naive)]
    net = round((whole[0] - compute[0]) / (whole[1] - compute[1]), 3)
    ratios = {"ratio": round(whole[0] / whole[1], 3), "net of compute": net}
    limits = "move" if len({row["limits"] for row in ours}) > 1 else "fixed"
    lost = sum(found["waited"][form].count(None) for form in browser.FORMS)
    split = {f"{part} ms": spread([row[part] for row in ours], 1e3) for part in browser.PARTS}
    split["naive total ms"] = spread([row["total"] for row in naive], 1e3)
    size = {"kB": spread([row["bytes"] for row in ours], 1e-3), "naive kB": round(found["naive bytes"] / 1e3, 1)}
    return [
        ("slider key to pixels", {"control": name, "limits": limits, **waited, **ratios, "lost": lost}),
        ("one move in the kernel", {"control": name, **split, **size}),
    ]


def imports(options: argparse.Namespace) -> Rows:
    code = "import time; t = time.perf_counter(); import {}; print(1e3 * (time.perf_counter() - t))"
    for name in ("labkit", "torch", "labkit.labs"):
        yield "import", {"module": name, "ms": spread([python(code.format(name)) for _ in range(5)])}


def pictures(options: argparse.Namespace) -> Rows:
    """From run-all to the first picture, for each notebook with a lab; of copies, since JupyterLab saves."""
    with tempfile.TemporaryDirectory() as name:
        folder = shutil.copytree(options.notebooks, Path(name, "notebooks"))
        with lab_in_browser.jupyter(folder) as address:
            for path in sorted(folder.glob("*.ipynb")):
                cells = json.loads(path.read_text())["cells"]
                code = "\n".join(line for cell in cells if cell["cell_type"] == "code" for line in cell["source"])
                if re.search(r"\blabs\.\w+\(", code):
                    given = (f"first picture of {path.name}", browser.first_picture, address, path.name)
                    if any(times := [attempt(*given) for _ in range(options.rounds)]):
                        yield "run-all to first picture", {"notebook": path.name, "seconds": spread(times)}


def memory(options: argparse.Namespace) -> Rows:
    for path in sorted(options.notebooks.glob("*.ipynb")):
        runs = [attempt(f"execute {path.name}", execute, path) for _ in range(options.rounds)]
        if runs := list(filter(None, runs)):
            found = {what: spread([run[what] for run in runs]) for what in ("peak MB", "seconds")}
            yield (
                "notebook from top to bottom, every Step pressed: PSS of all its processes, time",
                {"notebook": path.name, **found},
            )


def execute(path: Path, every: float = 0.2) -> dict[str, float]:
    """Run a notebook with nbclient, Step pressed in every panel; sample the PSS of its kernel and of its children."""
    book = nbformat.read(path, as_version=4)
    for cell in book.cells:
        if cell.cell_type == "code" and PANEL.match(last(cell.source)):
            cell.source = cell.source.removesuffix(last(cell.source)) + f"lab = {last(cell.source)}\nlab.step()\nlab"
    with tempfile.NamedTemporaryFile("w", suffix=".ipynb") as file:
        nbformat.write(book, file.name)
        return sampled([sys.executable, "-m", "jupyter", "execute", "--timeout=600", file.name], every)


def last(source: str) -> str:
    return source.rstrip().rpartition("\n")[2]


def sampled(command: list[str], every: float) -> dict[str, float]:
    """Seconds of a command, and the largest PSS of all that it started."""
    done = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    peak, start = 0.0, 0.0
    while done.poll() is None:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            family = psutil.Process(done.pid).children(recursive=True)
            start = start or (time.perf_counter() if family else 0.0)
            peak = max(peak, megabytes(family))
        time.sleep(every)
    if done.returncode:
        raise RuntimeError(done.communicate()[1])
    return {"peak MB": peak, "seconds": time.perf_counter() - start}


def roofline(options: argparse.Namespace) -> Rows:
    for name, value in python("from tests.bench import roofline as r; print(r.json.dumps(r.ratios()))").items():
        yield "roofline measured, to references of the same minute", {"figure": name, "value": value}


def audit(options: argparse.Namespace) -> Rows:
    for row in python("from tests.bench import audit; print(audit.rows())"):
        yield "audit of a step of four microbatches, against the step itself", row


def ranks(options: argparse.Namespace) -> Rows:
    for start, count in (("forkserver", 2), ("forkserver", 4), ("spawn", 2)):
        code = f"import json; from tests.bench import ranks; print(json.dumps(ranks.measured({start!r}, {count})))"
        yield "a pool of ranks, each in a process of its own", python(code)
    for name in python("import json; from tests.bench import ranks; print(json.dumps(ranks.panels()))"):
        code = f"from tests.bench import ranks; print(ranks.moved({name!r}))"
        if name.startswith(options.only) and (row := attempt(name, python, code)):
            yield "a panel on two ranks, with its kernel", row | {"move ms": spread(row["move ms"], 1e3)}


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table; a spread stands as median / 95th percentile (count)."""

    def cell(value: Any) -> str:
        if not isinstance(value, dict):
            return f"{value:.3g}" if isinstance(value, float) else str(value)
        p50, p95 = (f"{value[name]:.{int(value[name] < 100)}f}" for name in ("p50", "p95"))
        return f"{p50} / {p95} ({value['count']})"

    lines = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for first, *rest in lines:
        words = [word.rjust(width) for word, width in zip(rest, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *words]))


PARTS = {part.__name__: part for part in (labs, imports, pictures, memory, roofline, audit, ranks)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--presses", type=int, default=30, help="keys counted for each control and form")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each notebook")
    parser.add_argument("--parts", default=",".join(PARTS), help="those to run (default: %(default)s)")
    parser.add_argument("--only", default="", help="only experiments whose name (lab.experiment) starts so")
    parser.add_argument("--notebooks", type=Path, default=ROOT / "notebooks")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench/results.json")
    parser.add_argument("--profile", metavar="LAB.EXPERIMENT.CONTROL[@2]", help="only print where a move's time goes")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)  # for every kernel and process
    os.environ["LABKIT_DATA"] = tempfile.mkdtemp(prefix="labkit-bench-")  # nobody's progress
    if options.profile:
        code = f"from tests.bench import kernel; kernel.profile(*{options.profile!r}.split('@'))"
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))  # the server and its kernels end too
    tables: dict[str, list[dict[str, Any]]] = {}
    found = {"machine": attempt("machine", machine) or {}, "tables": tables, "failures": failures}
    options.experiments = found["machine"].pop("experiments", ())

    def collect(part: str) -> None:
        for title, row in PARTS[part](options):
            tables.setdefault(title, []).append(row)

    for part in options.parts.split(","):
        attempt(part, collect, part)
    found["machine"]["load average after"] = os.getloadavg()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))
    print("\n".join(f"{name}: {value}" for name, value in found["machine"].items()))
    for title, rows in tables.items():
        show(title, rows)
    print("\n" + "\n".join(f"FAILED {failure}" for failure in failures or ["nothing"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
