"""What a learner is told once and in passing: one sentence each, shown where the next thing is shown."""

from __future__ import annotations

_told: set[str] = set()
_waiting: list[str] = []


def tell(topic: str, sentence: str) -> None:
    """Let a sentence be shown; only the first on a topic in this process is.

    >>> tell("disk", "The disk is full.")
    >>> tell("disk", "The disk is still full.")
    >>> take()
    ['The disk is full.']
    """
    if topic not in _told:
        _told.add(topic)
        _waiting.append(sentence)


def take() -> list[str]:
    """The sentences that nobody has shown yet; whoever takes them shows them.

    >>> take()
    []
    """
    sentences = list(_waiting)
    _waiting.clear()
    return sentences


def forget() -> None:
    """Begin anew, as in a new process.

    >>> forget()
    """
    _told.clear()
    _waiting.clear()
