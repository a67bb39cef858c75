"""Functions by name, since a rank shares no memory with the notebook."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from labkit.errors import LabError

_changed: dict[str, float] = {}  # when the file of a module was last written, as of its import


def name_of(function: str | Callable[..., Any]) -> str:
    """The name under which a rank can import a function.

    >>> name_of(name_of)
    'labkit.workers._names:name_of'
    """
    if isinstance(function, str):
        module, _, name = function.partition(":")
    else:
        module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or not name:
        raise LabError(f"function = {function!r} cannot be imported by a rank: try 'package.module:function'")
    if module == "__main__" or "<" in name:
        raise LabError(
            f"{name} was typed in a cell or script, and a rank cannot import it: try to put it into a .py file"
        )
    return f"{module}:{name}"


def pack(function: str | Callable[..., Any], values: dict[str, Any]) -> bytes:
    """A call as bytes, with what a rank needs to understand it: the notebook's sys.path of this moment."""
    path = [each or _here() for each in sys.path]
    try:
        return pickle.dumps((name_of(function), path, pickle.dumps(values)))
    except LabError:
        raise
    except Exception as error:
        raise LabError(
            f"an argument cannot be sent to a rank ({type(error).__name__}: {error}): try numbers, text, lists"
        ) from error


def unpack(call: bytes) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function and its arguments, in a rank; LabError when the function cannot be called with them."""
    name, path, rest = pickle.loads(call)
    sys.path[:] = path
    function = load(name)
    try:
        values: dict[str, Any] = pickle.loads(rest)
    except Exception as error:
        raise LabError(f"an argument cannot be read ({type(error).__name__}: {error}): try plain values") from error
    try:
        inspect.signature(function).bind(0, 1, **values)
    except TypeError as error:
        raise LabError(f"{name} does not take these arguments: {error}: try those it is written for") from None
    except ValueError:
        pass  # written in C: it has no signature to look at
    return function, values


def load(name: str) -> Callable[..., Any]:
    """The function of that name; a module whose file has changed since is loaded again.

    >>> load("labkit.workers:total").__name__
    'total'
    """
    where, _, attribute = name.partition(":")
    try:
        module = _module(where)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{where}.".startswith(f"{error.name}."):
            raise LabError(f"there is no module {where!r}: try the name of a .py file beside the notebook") from None
        raise LabError(f"{where!r} raises {type(error).__name__}: {error}: try to import it by itself") from error
    try:
        function: Any = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise LabError(f"{where!r} has no {attribute!r}: try a function that it defines") from None
    if not callable(function):
        raise LabError(f"{name} is no function: try one")
    return function  # type: ignore[no-any-return]


def _module(where: str) -> ModuleType:
    importlib.invalidate_caches()  # the notebook may have written the file a moment ago
    module = importlib.import_module(where)
    file = module.__file__ or ""
    written = os.path.getmtime(file) if os.path.isfile(file) else 0.0
    if _changed.get(where, written) != written:
        module = importlib.reload(module)
    _changed[where] = written
    return module


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""  # the folder has been removed
