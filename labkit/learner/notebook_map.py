"""The map: every notebook, and how much of it is done."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence

from labkit.frame import open_panels
from labkit.learner import notebooks, one_time_messages, record
from labkit.wording import show

HEAD = ("notebook, and what you will know", "time", "predictions", "exercises")
LEFT = "text-align:left;vertical-align:top"


class Overview:
    """All notebooks as a table of HTML, and as text where there is no page."""

    def __init__(self) -> None:
        self.done = record.done()
        self.notebooks = notebooks.notebooks()
        self.told = one_time_messages.take()

    def __repr__(self) -> str:
        rows = [f"{_number(each)} {each.title}: {', '.join(filter(None, self.cells(each)))}" for each in self.notebooks]
        return "\n".join([*rows, self.summary(), *self.told])

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col" style="{LEFT}">{word}</th>' for word in HEAD)
        body = "".join(map(self._row, self.notebooks))
        sentences = "".join(f"<p>{html.escape(words)}</p>" for words in [self.summary(), *self.told])
        size = "font-size:150%;" if open_panels.large() else ""
        table = f'<table style="{size}margin-left:0"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        return f'{sentences}<div style="overflow-x:auto">{table}</div>'

    def summary(self) -> str:
        """All of it in one sentence; what is in two notebooks counts once."""
        every = self.notebooks
        predicted = _count(each.predicted(self.done) for each in every)
        passed = _count(each.passed(self.done) for each in every)
        experiments, exercises = _count(each.experiments for each in every), _count(each.exercises for each in every)
        return f"So far: {predicted} of {experiments} experiments predicted, {passed} of {exercises} exercises passed."

    def cells(self, notebook: notebooks.Notebook) -> tuple[str, str, str, str]:
        """Minutes, predictions, how far off they were, and exercises, in words; of what is not there yet, that."""
        if not notebook.minutes:
            return "not here yet", "", "", ""
        predicted = _share(len(notebook.predicted(self.done)), len(notebook.experiments))
        passed = _share(len(notebook.passed(self.done)), len(notebook.exercises))
        return f"{notebook.minutes} min", predicted, _off(notebook.scores(self.done)), passed

    def _row(self, notebook: notebooks.Notebook) -> str:
        title = f"{_number(notebook)} {html.escape(notebook.title)}"
        if notebook.here:
            title = f'<a href="{html.escape(notebook.file)}">{title}</a>'
        head = f'{title}<br><span style="font-weight:normal">{html.escape(notebook.about)}</span>'
        minutes, predicted, off, passed = map(html.escape, self.cells(notebook))
        cells = (minutes, "<br>".join(filter(None, (predicted, *off.split("; ")))), passed)
        return f'<tr><th scope="row" style="{LEFT}">{head}</th>{"".join(map(_cell, cells))}</tr>'


def overview() -> Overview:
    """The map: every notebook with its minutes, and how much of its predictions and exercises is done.

    >>> overview().notebooks[2].title
    'Roofline'

    Progress is read from the learner's own file, `labkit.learner.record`; a notebook that is there is a link.
    """
    return Overview()


def _number(notebook: notebooks.Notebook) -> str:
    return notebook.file[:2]


def _cell(words: str) -> str:
    return f'<td style="{LEFT};white-space:nowrap">{words}</td>'


def _count(names: Iterable[Sequence[str]]) -> int:
    return len(set(itertools.chain.from_iterable(names)))


def _share(done: int, of: int) -> str:
    """How many; all of them have a tick too."""
    return f"{'✓ ' if done >= of else ''}{done} of {of}" if of else "none"


def _off(scores: tuple[float, float | None] | None) -> str:
    if scores is None:
        return ""
    closest, latest = map(percent, scores)
    return f"closest {closest}" + (f"; latest {latest}" if latest != closest else "")


def percent(score: float | None) -> str:
    """A score in words.

    >>> percent(0.0625), percent(0.0), percent(None)
    ('6.2 % off', 'exact', 'far off')
    """
    if score is None or score > 10:
        return "far off"
    return "exact" if score < 0.0005 else f"{show(float(f'{100 * score:.2g}'))} % off"
