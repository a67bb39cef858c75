"""The notebooks in their order, and what a learner has done in each: read from the notebooks themselves."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

from labkit.declare import quantity
from labkit.learner.record import Done

HERE = pathlib.Path(__file__).parents[2] / "notebooks"  # where labkit runs from its repository


@dataclasses.dataclass(frozen=True)
class Notebook:
    """One notebook, with its experiments and exercises."""

    file: str = quantity("its name")
    title: str = quantity("what it is called")
    about: str = quantity("what one knows after it")
    here: bool = quantity("whether it can be opened from where the kernel runs")
    minutes: int | None = quantity("a learner's; None where the notebook is not there to say", "min")
    experiments: tuple[str, ...] = quantity("'topic.name' of each, in order")
    exercises: tuple[str, ...] = quantity("the checker of each, in order")

    def predicted(self, done: Done) -> list[str]:
        """Its experiments for which a prediction was made.

        >>> notebooks()[2].predicted(Done({}, {}))
        []
        """
        return [name for name in self.experiments if name in done.predictions]

    def passed(self, done: Done) -> list[str]:
        """Its exercises that were passed.

        >>> notebooks()[0].passed(Done({}, {"token_mean": "2026-01-01T00:00:00Z"}))
        ['token_mean']
        """
        return [name for name in self.exercises if name in done.exercises]

    def scores(self, done: Done) -> tuple[float, float | None] | None:
        """The closest prediction's score and the latest one's, None where that is far off; None before the first."""
        latest = [each for name in self.predicted(done) if (each := done.last(name))]
        closest = [score for name in self.predicted(done) if (score := done.best(name)) is not None]
        return (min(closest), max(latest, key=lambda each: each.at).score) if closest else None


def notebooks(folder: pathlib.Path | None = None) -> list[Notebook]:
    """All notebooks, in order: those whose metadata say, under `labkit`, what they are about.

    >>> [each.title for each in notebooks()][:3]
    ['Start here', 'Batch quantities', 'Roofline']

    folder: where the kernel runs, by default the current one; what is not there is read where labkit lies.
    """
    folder = folder or pathlib.Path.cwd()
    files = {path.name: path for place in (HERE, folder) for path in place.glob("[0-9][0-9]_*.ipynb")}
    return [each for _, path in sorted(files.items()) if (each := _notebook(path, path.parent == folder))]


def _notebook(path: pathlib.Path, here: bool) -> Notebook | None:
    about, prose, code = _read(path)
    about = about or _read(HERE / path.name)[0]  # a copy may be older than the one of labkit
    if not about:
        return None
    heading = re.search(r"^# (?:\d+ · )?([^:\n]+)", prose, re.MULTILINE)
    title = heading[1].strip() if heading else path.stem[3:].replace("_", " ").capitalize()
    minutes = re.search(r"[Aa]bout (\d+) minutes", prose)
    return Notebook(
        path.name,
        title,
        about,
        here,
        int(minutes[1]) if minutes else None,
        tuple(dict.fromkeys(".".join(found) for found in re.findall(r"labkit\.labs\.(\w+)\(\s*[\"'](\w+)[\"']", code))),
        tuple(dict.fromkeys(name for name in re.findall(r"\bcheck\.(\w+)\(", code) if _is_exercise(name))),
    )


def _read(path: pathlib.Path) -> tuple[str, str, str]:
    """What a notebook is about, its prose and its code; nothing where it cannot be read."""
    try:
        book: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kinds = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
        about = str(book["metadata"].get("labkit", {}).get("about", ""))
    except (OSError, ValueError, KeyError, TypeError):
        return "", "", ""
    prose, code = ("\n".join(text for kind, text in kinds if kind == cell_type) for cell_type in ("markdown", "code"))
    return about, prose, code


def _is_exercise(name: str) -> bool:
    from labkit import check

    return name in check.all()
