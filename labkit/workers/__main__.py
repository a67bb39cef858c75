"""The command line, as in torchrun --nproc-per-node 2 -m labkit.workers package.module:function name=value."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from labkit import workers
from labkit.errors import LabError
from labkit.workers import _names, _torchrun

ABOUT = """\
A function of (rank, world, ...) runs on every rank, and the list of what they return is printed; any other function is
an experiment, which asks for ranks itself, and its result is printed. Once, as JSON, what is not finite as null.
Without torchrun the ranks are those of this machine's pool. Exit status: 0, or 1 with one sentence on stderr."""


def main(arguments: list[str] | None = None) -> int:
    """Run a function and print its result; the exit status.

    >>> main(["labkit.workers:total", "value=3", "ranks=2"])
    [6.0, 6.0]
    0
    """
    parser = argparse.ArgumentParser(prog="labkit.workers", description="Run a function on ranks.", epilog=ABOUT)
    parser.add_argument("function", help="package.module:function")
    parser.add_argument("values", nargs="*", metavar="name=value", help="its arguments, as JSON where that can be read")
    options = parser.parse_args(arguments)
    rank = os.environ.get("RANK", "0") if _torchrun.launched() else "0"
    try:
        result = run(options.function, dict(map(_pair, options.values)))
    except LabError as error:
        if not _torchrun.launched() or _blames(str(error)) == rank:
            print(error, file=sys.stderr, flush=True)
        return 1
    if rank == "0":
        print(json.dumps(plain(result)), flush=True)
    return 0


def _blames(sentence: str) -> str:
    """The rank that a sentence names, else 0: one rank prints what all of them know."""
    match = re.match(r"rank (\d+)", sentence)
    return match[1] if match else "0"


def run(name: str, values: dict[str, Any]) -> Any:
    """The answers of all ranks, or the result of an experiment, the last one that it yields."""
    sys.path.insert(0, "")
    function = _names.load(_names.name_of(name))
    parameters = list(inspect.signature(function).parameters)
    if _torchrun.launched() and (parameters[:2] == ["rank", "world"] or "ranks" in parameters):
        values = {"ranks": int(os.environ["WORLD_SIZE"]), **values}
    if parameters[:2] == ["rank", "world"]:
        return workers.run(name, **values)
    try:
        inspect.signature(function).bind(**values)
    except TypeError as error:
        raise LabError(f"{name}: {error}: try those of its parameters: {', '.join(parameters)}") from None
    result = function(**values)
    if isinstance(result, Iterator):
        *_, result = result
    return result


def plain(value: Any) -> Any:
    """Lists, numbers and text for JSON.

    >>> plain({"loss": float("nan"), "sizes": (1, 2)})
    {'loss': None, 'sizes': [1, 2]}
    """
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise LabError(f"{text!r} is no argument: try name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())
