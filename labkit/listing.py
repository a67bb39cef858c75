"""The code that a learner sees: the very source of what runs, without the examples of its docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

# An example runs from its prompt to the next empty line or to the end of the docstring.
EXAMPLES = re.compile(r'^[ \t]*>>> .*\n(?:(?![ \t]*(?:"""|$)).*\n)*(?:[ \t]*\n)?', re.MULTILINE)


def sources(*functions: Any) -> str:
    """The source of functions and classes, one below the other.

    >>> sources(sources).splitlines()[0], ">>>" in sources(sources)
    ('def sources(*functions: Any) -> str:', False)
    """
    texts = (inspect.getsource(inspect.unwrap(each)).rstrip() for each in functions)
    return "\n\n".join(EXAMPLES.sub("", text) for text in texts)
