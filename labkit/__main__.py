"""The command line: python -m labkit audit package.module:build, python -m labkit accept file.py."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from labkit.acceptance import Record, accept
from labkit.acceptance.record import ADOPT, REJECT
from labkit.audit import audit, ranks
from labkit.audit.report import Report
from labkit.errors import LabError
from labkit.wording import three

RIGHT, FAULTS, NO_VERDICT = 0, 1, 2
ABOUT = """\
The module also has `microbatches` (a list) and `loss_sum(model, microbatch)`; if it likes, `concat`, `windows` and
`objective`. Exit status: 0 the step is right, 1 it has faults, 2 it could not be judged."""
ABOUT_ACCEPT = """\
The module has `base` and `candidate` (each gives a model and its step), `microbatches`, or `base_microbatches` and
`candidate_microbatches`, `loss_sum(model, microbatch)` and `invariant` ("systems" or "large-batch"); if it likes,
`concat`, `objective`, `windows`, `runs` and `margin`. Exit status: 0 adopt, 1 reject, 2 cannot tell or no verdict."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; its exit status.

    >>> main(["audit", "no_such_module:build"])
    no verdict: there is no module 'no_such_module': try a path, file.py:build
    2
    """
    parser = argparse.ArgumentParser(prog="python -m labkit", description="labkit on the command line")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("audit", help="judge a training step", epilog=ABOUT)
    command.add_argument("target", help="package.module:build, or path/to/file.py:build")
    command.add_argument("--json", action="store_true", help="the report as JSON")
    command.add_argument("--windows", type=int, help="how often the step is called")
    command.add_argument("--objective", help="token-mean, sequence-mean or mean-of-means")
    command.add_argument("--ranks", type=int, help="run it on so many data-parallel ranks")
    command.set_defaults(run=_audit)
    command = commands.add_parser("accept", help="may a changed step be adopted?", epilog=ABOUT_ACCEPT)
    command.add_argument("target", help="package.module, or path/to/file.py")
    command.add_argument("--json", action="store_true", help="the record as JSON")
    command.add_argument("--out", help="a file for the record as JSON")
    command.add_argument("--windows", type=int, help="updates of the trace")
    command.add_argument("--runs", type=int, help="timed runs of each side")
    command.add_argument("--margin", type=float, help="gain below which a change does not count: 0.03 is 3 %%")
    command.set_defaults(run=_accept)
    options = parser.parse_args(arguments)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the step prints is no part of the report
            status, said = options.run(options)
    except LabError as error:
        print(f"no verdict: {error}")
        return NO_VERDICT
    print(said)
    return int(status)


def _audit(options: argparse.Namespace) -> tuple[int, str]:
    where, _, name = options.target.partition(":")
    module = _module(where)
    build, microbatches, loss_sum = (_of(module, each) for each in (name or "build", "microbatches", "loss_sum"))
    if options.ranks:
        windows = options.windows or getattr(module, "windows", 1)
        report = ranks(f"{module.__name__}:{name or 'build'}", options.ranks, windows=windows)
        return _said(options, report)
    report = audit(
        build,
        _given(microbatches),
        loss_sum,
        concat=getattr(module, "concat", None),
        windows=options.windows or getattr(module, "windows", 1),
        objective=options.objective or getattr(module, "objective", "token-mean"),
    )
    return _said(options, report)


def _said(options: argparse.Namespace, report: Report) -> tuple[int, str]:
    return RIGHT if report.right else FAULTS, report.to_json() if options.json else _table(report)


def _accept(options: argparse.Namespace) -> tuple[int, str]:
    module = _module(options.target)
    base, candidate, loss_sum, invariant = (
        _of(module, each) for each in ("base", "candidate", "loss_sum", "invariant")
    )
    names = [
        next((n for n in (f"{side}_microbatches", "microbatches") if hasattr(module, n)), "microbatches")
        for side in ("base", "candidate")
    ]
    before, after = (_given(_of(module, name)) for name in names)
    asked = {name: getattr(options, name) for name in ("windows", "runs", "margin")}
    known = {name: getattr(module, name) for name in (*asked, "concat", "objective") if hasattr(module, name)}
    known |= {name: value for name, value in asked.items() if value is not None}
    record = accept(base, candidate, before, loss_sum, invariant=invariant, candidate_microbatches=after, **known)
    _write(options.out, record)
    status = {ADOPT: RIGHT, REJECT: FAULTS}.get(record.verdict, NO_VERDICT)
    return status, record.to_json() if options.json else record.explain()


def _write(out: str | None, record: Record) -> None:
    if out is None:
        return
    try:
        Path(out).write_text(record.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise LabError(f"{out!r} cannot be written, {error.strerror}: try another --out") from error


def _given(microbatches: Any) -> Any:
    """A list, or what makes one."""
    return microbatches() if callable(microbatches) else microbatches


def _module(where: str) -> Any:
    path = Path(where)
    try:
        return _file(path) if path.suffix == ".py" else _package(where)
    except LabError:
        raise
    except (Exception, SystemExit) as error:
        raise LabError(f"{where!r} raises {type(error).__name__}: {error}: try to import it by itself") from error


def _file(path: Path) -> Any:
    if not path.is_file():
        raise LabError(f"there is no file {str(path)!r}: try the path of a Python file")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _package(where: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name != where:
            raise
        raise LabError(f"there is no module {where!r}: try a path, file.py:build") from None


def _of(module: Any, name: str) -> Any:
    if not hasattr(module, name):
        raise LabError(f"{module.__name__} has no {name!r}: try to define it beside the others")
    return getattr(module, name)


def _table(report: Report) -> str:
    rows = ["microbatch  valid tokens  weight × N"]
    rows += [
        f"{at:>10}  {count:>12}  {three(weight):>10}"
        for at, (count, weight) in enumerate(zip(report.counts, report.token_weights, strict=True))
    ]
    return "\n".join([f"verdict: {report.verdict}", *rows, report.explain()])


if __name__ == "__main__":
    sys.exit(main())
