"""A report that a learner hands in: one page of HTML with everything inside, and nothing in it that runs."""

from __future__ import annotations

import base64
import contextlib
import datetime
import html
import inspect
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import labkit
from labkit import check
from labkit.errors import LabError
from labkit.frame import open_panels
from labkit.frame.lab import Lab
from labkit.learner.notebook_map import Overview, percent
from labkit.learner.record import Prediction
from labkit.wording import show

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light; }
body { font: 11pt/1.45 system-ui, sans-serif; color: #212121; background: #fff;
  max-width: 50em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; width: 100%; margin: .5em 0 1.5em; }
caption { text-align: left; font-weight: 600; padding: .3em 0; }
th, td { text-align: left; vertical-align: top; padding: .25em .8em .25em 0; border-bottom: 1px solid #bbb;
  overflow-wrap: break-word; }
td:not(:first-child), th:not(:first-child) { width: 4.8em; }
td:last-child { white-space: nowrap; }
thead th { border-bottom: 2px solid #666; }
small { color: #555; font-size: .9em; }
figure { margin: 1.5em 0; break-inside: avoid; }
figcaption { margin-top: .3em; }
img { max-width: 100%; width: 640px; height: auto; }
tr { break-inside: avoid; }
h2, caption { break-after: avoid; }
@media print { body { margin: 0; max-width: none; font-size: 10pt; } }
@page { margin: 18mm; }
"""


def report(path: str | os.PathLike[str] = "labkit-report.html", name: str = "") -> pathlib.Path:
    """Write what was predicted and passed so far, and the pictures of all open panels, as one page; returns its path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report(f"{folder}/mine.html", name="Ada").read_text(encoding="utf-8")[:15]
    '<!doctype html>'

    path: the file; one that is there is replaced. name: whose work it is, in the heading; it is kept nowhere else.
    The page holds its pictures, needs no network, runs no script and prints on paper. LabError where it cannot be
    written.
    """
    place = pathlib.Path(path).expanduser()
    text = page(name, Overview(), open_panels.panels())
    try:
        _replace(place, text.encode(errors="replace"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise LabError(
            f"path = {str(place)!r} cannot be written ({reason}): try report('~/labkit-report.html')"
        ) from None
    return place


def page(name: str, overview: Overview, panels: Iterable[Any]) -> str:
    """The whole page.

    >>> page("<b>Ada</b>", Overview(), []).count("<b>")
    0
    """
    writer = html.escape(name.strip())
    title = f"labkit: what {writer} predicted and passed" if writer else "labkit: what was predicted and passed"
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    parts = [_predictions(overview), _exercises(overview), _pictures(panels)]
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style>'
    )
    first = f"<h1>{title}</h1><p>{html.escape(overview.summary())}</p><p><small>{now}, labkit {labkit.__version__}. "
    note = "Times are in UTC. A score is the relative error of a prediction.</small></p>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{first}{note}{"".join(parts)}</body></html>\n'


# The parts.


def _predictions(overview: Overview) -> str:
    left = dict(overview.done.predictions)
    tables = []
    for notebook in overview.notebooks:
        mine = {key: left.pop(key) for key in notebook.experiments if key in left}
        tables.append(_series(f"{notebook.file[:2]} {notebook.title}", mine))
    tables.append(_series("Elsewhere", left))
    return "<h2>Predictions</h2>" + ("".join(tables) or "<p>None yet.</p>")


def _series(caption: str, series: Mapping[str, tuple[Prediction, ...]]) -> str:
    if not series:
        return ""
    rows = "".join(_row(key, each) for key, predictions in series.items() for each in predictions)
    return _table(caption, ("question", "predicted", "answer", "score", "when"), rows)


def _row(key: str, prediction: Prediction) -> str:
    question, unit = _question(key)
    number = [
        f"{show(value)} {unit}".strip() if value is not None else "none"
        for value in (prediction.predicted, prediction.answer)
    ]
    setting = ", ".join(f"{name.replace('_', ' ')} {_setting(value)}" for name, value in prediction.values.items())
    first = f"{html.escape(question)}<br><small>{html.escape(setting)}</small>"
    return _cells(first, *map(html.escape, (*number, percent(prediction.score), _when(prediction.at))))


def _exercises(overview: Overview) -> str:
    of = {name: f"{each.file[:2]} {each.title}" for each in reversed(overview.notebooks) for name in each.exercises}
    rows = "".join(
        _cells(html.escape(_task(name)), html.escape(of.get(name, "")), html.escape(_when(at)))
        for name, at in overview.done.exercises.items()
    )
    table = _table("Passed", ("exercise", "notebook", "when"), rows)
    return "<h2>Exercises</h2>" + (table if rows else "<p>None yet.</p>")


def _pictures(panels: Iterable[Any]) -> str:
    figures = [_figure(panel) for panel in panels if isinstance(panel, Lab) and panel.result is not None]
    return "<h2>Pictures</h2>" + "".join(figures) if figures else ""


def _figure(lab: Lab) -> str:
    png, words = base64.b64encode(lab.png()).decode(), html.escape(lab.text)
    head, score = html.escape(str(lab.page["headline"])), html.escape(str(lab.page["score"]))
    caption = "<br>".join(filter(None, (f"<strong>{head}</strong>", words, score)))
    return f'<figure><img alt="{words}" src="data:image/png;base64,{png}"><figcaption>{caption}</figcaption></figure>'


# Words.


def _question(key: str) -> tuple[str, str]:
    """An experiment's question and unit; its key where this labkit has no such experiment."""
    from labkit import labs

    topic, _, name = key.partition(".")
    if topic in labs.all():
        for kind in labs.experiments(topic):
            if kind.name == name:
                return f"{kind.title}: {kind.question}", kind.unit
    return key, ""


def _task(name: str) -> str:
    """What an exercise asks: the first line of its checker."""
    return (inspect.getdoc(check.all().get(name)) or name).splitlines()[0].removeprefix("Judge ").replace("`", "")


def _setting(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else show(value)


def _when(at: str) -> str:
    return at.replace("T", " ").removesuffix("Z")[:16]


def _table(caption: str, heads: Iterable[str], rows: str) -> str:
    head = "".join(f'<th scope="col">{word}</th>' for word in heads)
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _cells(*cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _replace(place: pathlib.Path, content: bytes) -> None:
    """Replace the report; a full disk leaves the old one."""
    if place.is_dir():
        raise IsADirectoryError(0, "it is a folder")
    new = place.with_name(place.name + ".new")
    try:
        new.write_bytes(content)
        os.replace(new, place)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
