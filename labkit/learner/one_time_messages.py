"""Messages that a learner gets once, in passing: one sentence each, shown with the next output."""

from __future__ import annotations

_told: set[str] = set()
_waiting: list[str] = []


def tell(topic: str, sentence: str) -> None:
    """Queue a sentence; only the first on a topic in this process is shown.

    >>> tell("disk", "The disk is full.")
    >>> tell("disk", "The disk is still full.")
    >>> take()
    ['The disk is full.']
    """
    if topic not in _told:
        _told.add(topic)
        _waiting.append(sentence)


def take() -> list[str]:
    """The sentences not shown yet; the caller shows them.

    >>> take()
    []
    """
    sentences = list(_waiting)
    _waiting.clear()
    return sentences


def forget() -> None:
    """Start over, as in a new process.

    >>> forget()
    """
    _told.clear()
    _waiting.clear()
