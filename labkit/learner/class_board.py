"""The board of a class: all predictions, live, before and after a discussion; the answer on request."""

from __future__ import annotations

import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import anywidget
import traitlets

from labkit.errors import LabError
from labkit.frame import cell_panels, faults, lab, open_panels
from labkit.frame.page_state import settings
from labkit.frame.trial import Trial
from labkit.learner import class_predictions
from labkit.learner.prediction_histogram import Tally, close, tally
from labkit.wording import show

HERE = pathlib.Path(__file__).parent
OF_LATE = 300.0  # seconds; earlier predictions with other settings were for another question


class Board(anywidget.AnyWidget):
    """A histogram that the page asks for once a second; all that it shows is in `view`, as plain words and numbers.

    `look`, `discuss` and `reveal` do what the page and its buttons do. `tally` is what was counted, `text` says it.
    """

    _esm = HERE / "board.js"
    _css = lab.HERE / "panel.css"
    view = traitlets.Dict().tag(sync=True)
    large = traitlets.Bool().tag(sync=True)

    def __init__(self, key: str, trial: Trial, folder: pathlib.Path, hours: float) -> None:
        super().__init__()
        self.key, self.folder = key, folder
        self.since = time.time() - 3600 * hours
        self.tally = Tally((), (), 0, {})
        self._trial = trial
        self._discussed: dict[str, int] | None = None
        self._answer: float | None = None
        self._error = ""
        self._lock = threading.RLock()  # the page's messages may arrive in any thread
        open_panels.note(self)
        self.on_msg(self._receive)
        self.look()
        cell_panels.adopt(self)

    def look(self) -> None:
        """Read the folder, and show what is there now."""
        with self._lock:
            entries = [entry for entry in class_predictions.entries(self.folder) if entry.at >= self.since]
            self.tally = tally(entries, self.key, self._trial.values, self._discussed, time.time() - OF_LATE)
            self._show()

    def discuss(self) -> None:
        """The first round ends: what is predicted from now on is the second."""
        with self._lock:
            self.look()
            self._discussed = dict(self.tally.counts)
            self.look()

    def reveal(self) -> None:
        """Compute the answer and show it."""
        with self._lock:
            *_, result = self._trial.outcomes()
            self._answer = self._trial.experiment.answer(result)
            self.look()

    @property
    def text(self) -> str:
        """What the board says, in words.

        >>> import tempfile
        >>> class_board("roofline", "ceiling", folder=tempfile.gettempdir()).text
        'No prediction yet.'
        """
        return str(self.view["said"])

    def _receive(self, _: object, content: dict[str, Any], buffers: object) -> None:
        acts: dict[str, Callable[..., None]] = {
            "look": self.look,
            "discuss": self.discuss,
            "reveal": self.reveal,
            "projector": open_panels.projector,
        }
        try:
            acts[content["type"]](*([content["on"]] if "on" in content else []))
            self._error = ""
        except Exception as error:
            self._error = str(error)
            faults.keep(error)
            self._show()
        self.send({"done": content["type"]})

    def _show(self) -> None:
        experiment = self._trial.experiment
        self.view = {
            "title": experiment.title,
            "question": experiment.question,
            "unit": experiment.unit,
            "settings": settings(self._trial),
            "rows": [vars(row) for row in self.tally.rows(self._answer)],
            "said": self._said(),
            "second": self._discussed is not None,
            "revealed": self._answer is not None,
            "error": self._error or ("" if self.folder.is_dir() else f"The folder {self.folder} is not there."),
        }

    def _said(self) -> str:
        first, second = self.tally.before, self.tally.after
        rounds = [("Before", first), ("After", second)] if self._discussed is not None else [("", first)]
        sentences = [self._round(name, numbers) for name, numbers in rounds]
        if self.tally.elsewhere:
            sentences.append(f"{self.tally.elsewhere} predicted with other settings only, in the last five minutes.")
        if self._answer is not None:
            sentences.insert(0, f"It is {self._number(self._answer)}.")
        return " ".join(sentences)

    def _round(self, name: str, numbers: Sequence[float]) -> str:
        if not numbers:
            return f"{name}: no prediction yet." if name else "No prediction yet."
        count = f"{len(numbers)} prediction{'s' * (len(numbers) > 1)}"
        right = f", {close(numbers, self._answer)} within 10 % of it" if self._answer is not None else ""
        return f"{name}{': ' * bool(name)}{count}, median {self._number(statistics.median(numbers))}{right}."

    def _number(self, value: float) -> str:
        return f"{show(value)} {self._trial.experiment.unit}".strip()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle = super()._repr_mimebundle_(**options)
        return (bundle[0] | {"text/plain": self.text}, bundle[1]) if isinstance(bundle, tuple) else bundle


def class_board(
    topic: str, experiment: str, /, *, folder: str | pathlib.Path = "", hours: float = 12.0, **values: Any
) -> Board:
    """What the class predicts in one experiment, live: `class_board("roofline", "ceiling", bandwidth=80)`.

    >>> import tempfile
    >>> board = class_board("roofline", "ceiling", folder=tempfile.gettempdir(), intensity=2, bandwidth=80)
    >>> board.reveal()
    >>> board.text
    'It is 160 GFLOP/s. No prediction yet.'

    Predictions count that were made with these values, by kernels in which LABKIT_CLASS names the same folder, in the
    last `hours`. `folder` is by default what LABKIT_CLASS says. LabError where there is no such folder or experiment.
    """
    from labkit import labs

    place = pathlib.Path(folder) if folder else class_predictions.folder()
    if place is None:
        raise LabError("LABKIT_CLASS is not set: try class_board(…, folder='a folder that the class can write')")
    if not place.is_dir():
        raise LabError(f"folder = {str(place)!r} is not there: try to make it first, so that the class can write in it")
    if topic not in labs.all():
        raise LabError(f"topic = {topic!r} is no lab: try {', '.join(labs.all())}")
    kinds = {kind.name: kind for kind in labs.experiments(topic)}
    if experiment not in kinds:
        raise LabError(f"there is no experiment {experiment!r} here: try {', '.join(kinds)}")
    trial = Trial(kinds[experiment]())
    trial.set(values)
    return Board(f"{topic}.{experiment}", trial, place, hours)
