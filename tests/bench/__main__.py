"""`make bench`: how fast the labs answer, beside the naive form; a table, and the same in .bench/results.json."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
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

from tests import lab_in_browser
from tests.bench import browser, notebooks

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "numpy", "matplotlib", "jupyterlab", "ipywidgets", "anywidget", "ipykernel", "playwright")
Rows = Iterator[tuple[str, dict[str, Any]]]  # each a table's title and a row of it
failures: list[str] = []


def attempt(name: str, work: Callable[..., Any], *given: Any) -> Any:
    """What the work returns; where it fails that is noted, None comes back, and the rest goes on."""
    print(time.strftime("%H:%M:%S"), name, file=sys.stderr, flush=True)
    try:
        return work(*given)
    except Exception as error:
        failures.append(f"{name}: {type(error).__name__}: {str(error)[:500]}")


def spread(values: Sequence[float | None], scale: float = 1.0) -> dict[str, float]:
    """Quartiles and 95th percentile of the values that are there, and how many those are."""
    there = [scale * value for value in values if value is not None]
    cuts = statistics.quantiles(there, n=20, method="inclusive") if len(there) > 1 else there * 19
    names = {"p25": 4, "p50": 9, "p75": 14, "p95": 18}
    return {name: round(cuts[at], 3) for name, at in names.items()} | {"count": len(there)}


def python(code: str) -> Any:
    """What a Python process of its own prints as JSON; this one loads no torch, which would blur times and memory."""
    command, where = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(" / ".join(done.stderr.strip().splitlines()[-3:]))
    return json.loads(done.stdout)


def machine() -> dict[str, Any]:
    """What it is measured on."""
    said = [["git", "describe", "--always", "--dirty"], [lab_in_browser.chromium() or "true", "--version"]]
    commit, chromium = (subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stdout.strip() for line in said)
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    about = python("from tests.bench import kernel; kernel.about()")
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    system = {"python": platform.python_version(), "chromium": chromium, "system": platform.platform()}
    return {"date": date, "commit": commit, **about, "cores": os.cpu_count(), **system, **versions}


def labs(options: argparse.Namespace) -> Rows:
    """Every numeric control of every quick experiment of every lab, at both pixel ratios."""
    with tempfile.TemporaryDirectory() as folder, lab_in_browser.jupyter(Path(folder)) as address:
        for topic in python("from tests.bench import kernel; kernel.about()")["labs"]:
            cases = attempt(topic, python, f"from tests.bench import kernel; kernel.cases({topic!r})") or {}
            for name, controls in cases.items():
                for ratio in (1, 2) if controls and name.startswith(options.only) else ():
                    given = (address, Path(folder), name, controls, ratio, options.presses)
                    found = attempt(f"{name} @{ratio}", browser.measure, *given)
                    yield from figures(f"{name}.{{}} @{ratio}", *found) if found else ()


def figures(name: str, keys: list[dict[str, Any]], storm: dict[str, Any]) -> Rows:
    """The figures of one experiment, from samples in ms (page) and s (kernel)."""
    for found in keys:
        control, ours, naive = name.format(found["control"]["name"]), found["ours"], found["naive"]
        waited = {f"{form} ms": spread(found["waited"][form]) for form in browser.FORMS}
        compute = [spread([row["run"] for row in rows], 1e3)["p50"] for rows in (ours, naive)]
        whole = [each["p50"] for each in waited.values()]
        ratios = {
            "ratio": round(whole[0] / whole[1], 3),
            "net of compute": round((whole[0] - compute[0]) / (whole[1] - compute[1]), 3),
        }
        limits = "move" if len({row["limits"] for row in ours}) > 1 else "fixed"
        lost = sum(found["waited"][form].count(None) for form in browser.FORMS)
        yield "slider key to pixels", {"control": control, "limits": limits, **waited, **ratios, "lost": lost}
        parts = {"compute": "run", "draw": "draw", "encode": "encode", "other": "other", "total": "total"}
        split = {f"{word} ms": spread([row[part] for row in ours], 1e3) for word, part in parts.items()}
        split |= {"naive total ms": spread([row["total"] for row in naive], 1e3)}
        size = {"kB": spread([row["bytes"] for row in ours], 1e-3), "naive kB": round(found["naive bytes"] / 1e3, 1)}
        yield "one move in the kernel", {"control": control, **split, **size}
    after = {f"{form} {what}": round(storm[form][what]) for what in ("pictures", "late ms") for form in browser.FORMS}
    title = "100 moves in 2 s: pictures shown, last move to last state"
    yield title, {"control": name.format(storm["control"]["name"]), **after}


def imports(options: argparse.Namespace) -> Rows:
    """Each in five processes of its own."""
    code = "import time; t = time.perf_counter(); import {}; print(1e3 * (time.perf_counter() - t))"
    for name in ("labkit", "torch", "labkit.labs"):
        yield "import", {"module": name, "ms": spread([python(code.format(name)) for _ in range(5)])}


def pictures(options: argparse.Namespace) -> Rows:
    """From run-all to the first picture, for each notebook with a lab; of copies, since JupyterLab saves."""
    with tempfile.TemporaryDirectory() as name:
        folder = shutil.copytree(options.notebooks, Path(name, "notebooks"))
        with lab_in_browser.jupyter(folder) as address:
            for path in filter(notebooks.holds_lab, sorted(folder.glob("*.ipynb"))):
                given = (f"first picture of {path.name}", browser.first_picture, address, path.name)
                if times := list(filter(None, [attempt(*given) for _ in range(options.rounds)])):
                    yield "run-all to first picture", {"notebook": path.name, "ms": spread(times)}


def memory(options: argparse.Namespace) -> Rows:
    """Peak memory and time of every notebook."""
    for path in sorted(options.notebooks.glob("*.ipynb")):
        runs = [attempt(f"execute {path.name}", notebooks.run, path) for _ in range(options.rounds)]
        if runs := list(filter(None, runs)):
            found = {what: spread([run[what] for run in runs]) for what in ("peak MB", "seconds")}
            yield "notebook from top to bottom: PSS of all its processes, time", {"notebook": path.name, **found}


def roofline(options: argparse.Namespace) -> Rows:
    """How near the measured roofs come to a compiled triad and to the best matmul."""
    for name, value in python("from tests.bench import roofline as r; print(r.json.dumps(r.ratios()))").items():
        yield "roofline measured, to references of the same minute", {"figure": name, "value": value}


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
    for line in lines:
        print(
            "  ".join(
                cell.rjust(width) if at else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        )


PARTS = {part.__name__: part for part in (labs, imports, pictures, memory, roofline)}


def main() -> int:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--presses", type=int, default=30, help="keys counted for each control and form")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each notebook")
    parser.add_argument("--parts", default=",".join(PARTS), help="those to run (default: %(default)s)")
    parser.add_argument("--only", default="", help="only experiments whose name (lab.experiment) starts so")
    parser.add_argument("--notebooks", type=Path, default=ROOT / "notebooks")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench/results.json")
    parser.add_argument("--profile", metavar="LAB.EXPERIMENT.CONTROL", help="only print where a move's time goes")
    options = parser.parse_args()
    if options.profile:
        code = f"from tests.bench import kernel; kernel.profile({options.profile!r})"
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server and its kernels end too
    tables: dict[str, list[dict[str, Any]]] = {}
    found = {"machine": attempt("machine", machine), "load before": os.getloadavg(), "tables": tables}

    def collect(part: str) -> None:
        for title, row in PARTS[part](options):
            tables.setdefault(title, []).append(row)

    for part in options.parts.split(","):
        attempt(part, collect, part)
    found |= {"load after": os.getloadavg(), "failures": failures}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))
    print("\n".join(f"{name}: {value}" for name, value in (found["machine"] or {}).items()))
    for title, rows in tables.items():
        show(title, rows)
    print("\n" + "\n".join(f"FAILED {failure}" for failure in failures or ["nothing"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
