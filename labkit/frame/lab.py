"""One panel with its experiments; all that a mouse can do, code can do."""

from __future__ import annotations

import base64
import contextlib
import functools
import html
import pathlib
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import anywidget
import traitlets
from matplotlib.figure import Figure

from labkit.errors import LabError
from labkit.frame import cell_panels, faults, open_panels, page_state
from labkit.frame.cell_thread import CellThread
from labkit.frame.experiment import Experiment
from labkit.frame.picture import Picture
from labkit.frame.pictures import Own, pictures
from labkit.frame.run import Run
from labkit.frame.style import Page
from labkit.frame.trial import Trial
from labkit.learner import class_predictions, one_time_messages, record

HERE = pathlib.Path(__file__).parent
PAPER = Page(ratio=2.0)


class Lab(anywidget.AnyWidget):
    """A panel with one or more experiments of a topic.

    >>> import labkit
    >>> lab = labkit.labs.roofline()
    >>> lab.set(intensity=2, bandwidth=80)
    >>> lab.predict(160)
    >>> lab.step()
    >>> lab.result.attainable, lab.score
    (160.0, 0.0)

    `set`, `predict`, `step`, `reset`, `choose`, `mode` do what the controls do and raise `LabError` where the page
    shows its sentence. `result`, `figure`, `text`, `score`, `values` are what the page shows. Under its `topic` what
    is predicted is kept as progress; a lab without one keeps nothing.

    To the page it is one widget model: `spec` and `page` are its words, `frame` is its picture. The page speaks in
    messages, which may arrive in any thread; each is brought to the thread of the cell that made the lab.
    """

    _esm = HERE / "panel.js"
    _css = HERE / "panel.css"
    uid = traitlets.Unicode().tag(sync=True)
    spec = traitlets.Dict().tag(sync=True)
    page = traitlets.Dict().tag(sync=True)
    frame = traitlets.Dict().tag(sync=True)
    large = traitlets.Bool().tag(sync=True)
    _closed = True  # until __init__ has run

    def __init__(
        self, experiments: Sequence[Experiment[Any]], experiment: str = "", *, topic: str = "", **values: Any
    ) -> None:
        super().__init__(uid=uuid.uuid4().hex)
        self.topic = topic
        self._cell = CellThread()
        self._picture = Picture()
        self._canvas = self._picture.canvas
        self._acknowledged: dict[str, int] = {}
        self._trials = {e.name: Trial(e) for e in experiments}
        self._run: Run | None = None
        self._notice = ""
        self._closed = False
        open_panels.note(self)
        self.on_msg(self._receive)
        cell_panels.adopt(self)
        self._pictures = {name: pictures(trial.experiment) for name, trial in self._trials.items()}
        self._on_page = {name: next(iter(each)) for name, each in self._pictures.items()}
        self._open(experiment or experiments[0].name)
        self._show()
        if values:
            self.set(**values)
            self._trial.first = self.values

    # what code and mouse can do ------------------------------------------------------------------------------------

    def set(self, **values: Any) -> None:
        """Set controls by name; a value outside its declaration raises LabError and changes nothing."""
        with self._raising():
            self._set(values)

    def predict(self, number: float) -> None:
        """Declare the answer, in the unit of the question."""
        with self._raising():
            self._predict(number)

    def step(self) -> None:
        """Run the experiment and show what happened; a long one shows its results as they come."""
        with self._raising():
            self._halt()
            self._run_here()

    def reset(self) -> None:
        """Hide the answer and ask anew; a second time also brings back the controls' first values."""
        with self._raising():
            self._reset()

    def choose(self, experiment: str) -> None:
        """Show another experiment of this lab; each keeps its values and its answer."""
        with self._raising():
            self._open(experiment)

    @property
    def pictures(self) -> list[str]:
        """The names of what this experiment can show, for `picture`."""
        return list(self._pictures[self._trial.experiment.name])

    @property
    def picture(self) -> str:
        """Which of them is on the page."""
        return self._on_page[self._trial.experiment.name]

    @picture.setter
    def picture(self, name: str) -> None:
        with self._raising():
            self._choose_picture(name)

    def redraw(self) -> None:
        """Show the figure as it is now, after it was styled by hand."""
        self._alive()
        self._show()

    @property
    def mode(self) -> str:
        """`predict` (nothing runs until Step) or `live` (every move runs)."""
        return self._trial.mode

    @mode.setter
    def mode(self, word: str) -> None:
        with self._raising():
            self._set_mode(word)

    @property
    def values(self) -> dict[str, Any]:
        """The controls' values."""
        return dict(self._trial.values)

    @property
    def prediction(self) -> float | None:
        """What was predicted."""
        return self._trial.prediction

    @property
    def result(self) -> Any:
        """What the experiment returned; None while it is hidden."""
        return self._trial.result

    @property
    def score(self) -> float | None:
        """The prediction's relative error (0 is exact); None until Step, or without a prediction."""
        return self._trial.score

    @property
    def text(self) -> str:
        """The sentence under the picture."""
        return page_state.sentence(self._trial, self._drawn())

    @property
    def error(self) -> str:
        """The sentence in the alert line, or nothing."""
        return self._trial.error

    @property
    def figure(self) -> Figure:
        """The picture, for styling (then `redraw`) and for `savefig`."""
        self._alive()
        return self._canvas.figure

    @property
    def experiment(self) -> Experiment[Any]:
        """The experiment on the page, with its artists; `experiment.answer(lab.result)` is what the question asks."""
        return self._trial.experiment

    @property
    def experiments(self) -> list[str]:
        """The names of this lab's experiments, for `choose`."""
        return list(self._trials)

    def close(self) -> None:
        """Stop, and let go of figure, thread and page."""
        if self._closed or sys.is_finalizing():
            return
        self._halt()
        self._closed = True
        layout = self.layout
        super().close()
        layout.close()
        self._canvas.clear()
        self._trials.clear()

    def png(self) -> bytes:
        """The picture as PNG, for paper: light, and fine enough to print."""
        page = self._canvas.page
        self._canvas.restyle(PAPER)
        self._paint()
        png = self._picture.png()
        self._canvas.restyle(page)
        self._paint()
        return png

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The live panel, and for pages without a kernel the picture and its sentence."""
        bundle = super()._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        if not data or self._closed:
            return bundle
        png, words = base64.b64encode(self._picture.png()).decode(), str(self.page["sentence"])
        alt = html.escape(words, quote=True)
        figure = f'<figure><img alt="{alt}" src="data:image/png;base64,{png}"><figcaption>{alt}</figcaption></figure>'
        return {**data, "text/plain": words, "text/html": figure, "image/png": png}, metadata

    # the state, shared by code and mouse ---------------------------------------------------------------------------

    @property
    def _trial(self) -> Trial:
        self._alive()
        return self._current

    def _alive(self) -> None:
        if self._closed:
            raise LabError("this panel was replaced by running its cell again: use the new one")

    @contextlib.contextmanager
    def _raising(self) -> Iterator[None]:
        """A call from code: the page shows what the caller gets, an answer or an error."""
        trial = self._trial
        try:
            yield
        except Exception as error:
            trial.error = str(error)
            raise
        finally:
            self._show()

    def _open(self, name: str) -> None:
        if name not in self._trials:
            raise LabError(f"there is no experiment {name!r} here: try {', '.join(self._trials)}")
        self._halt()
        self._current = self._trials[name]
        self._lay_out()

    def _choose_picture(self, name: str) -> None:
        if name not in self.pictures:
            raise LabError(f"picture = {name!r} is none of {', '.join(self.pictures)}: try {self.pictures[0]!r}")
        self._on_page[self._trial.experiment.name] = name
        self._lay_out()

    def _lay_out(self) -> None:
        """A new canvas for the picture that is chosen."""
        experiment = self._current.experiment
        drawn = self._drawn()
        self._canvas.clear()
        self._canvas.aspect = drawn.aspect or experiment.aspect
        self._canvas.restyle(self._canvas.page)
        drawn.layout(self._canvas)
        self.spec = page_state.spec(self._trials, self._current, self.pictures, self.picture)

    def _drawn(self) -> Own:
        return self._pictures[self._current.experiment.name][self.picture]

    def _set(self, values: Mapping[str, object]) -> None:
        self._halt()
        self._trial.set(values)
        if self._trial.mode == "live":
            self._run_here()

    def _set_mode(self, word: str) -> None:
        self._halt()
        self._trial.turn(word)
        if word == "live":
            self._run_here()

    def _predict(self, number: object) -> None:
        trial = self._trial
        trial.predict(number)
        if self.topic and trial.prediction is not None:
            class_predictions.submit(self._key(trial), trial.prediction, trial.values)

    def _key(self, trial: Trial) -> str:
        """What progress calls an experiment."""
        return f"{self.topic}.{trial.experiment.name}"

    def _finished(self, trial: Trial) -> None:
        """A run ended: its result stands, and what was predicted of it is kept."""
        trial.finish()
        if not self.topic or trial.noted or trial.score is None or trial.prediction is None:
            return
        trial.noted = True
        record.predicted(self._key(trial), trial.prediction, trial.answer, trial.score, trial.values)

    def _reset(self) -> None:
        self._halt()
        self._notice = ""
        self._trial.reset()

    def _run_here(self) -> None:
        """Run on this thread; a long run shows its results as they come."""
        run = self._run = Run(self._trial)
        try:
            for result in run.trial.outcomes():
                run.trial.result = result
                if run.is_due():
                    self._show()
                if run.stop.is_set():
                    break
            self._finished(run.trial)
        finally:
            self._run = None

    def _halt(self) -> None:
        """Stop what runs; what it has computed stays."""
        if self._run:
            self._run.stop.set()
            self._finished(self._run.trial)
            self._run = None

    # long work, started from the page: a thread computes, this one draws --------------------------------------------

    def _step(self) -> None:
        self._halt()
        if not self._trial.long:
            return self._run_here()
        self._run = Run(self._trial)
        threading.Thread(target=self._work, args=(self._run,), name=f"labkit-{self.uid[:6]}", daemon=True).start()

    def _work(self, run: Run) -> None:
        result = None
        try:
            for result in run.trial.outcomes():
                if run.is_due():
                    self._soon(functools.partial(self._take, run, result))
                if run.stop.is_set():
                    break
        except BaseException as error:
            self._soon(functools.partial(self._end, run, result, error))
        else:
            self._soon(functools.partial(self._end, run, result, None))

    def _take(self, run: Run, result: Any) -> None:
        """A result so far arrives from the thread; those of a run that was stopped do not count."""
        if run is self._run and result is not None:
            run.trial.result = result

    def _end(self, run: Run, result: Any, error: BaseException | None) -> None:
        self._take(run, result)
        if run is not self._run:
            return
        self._run = None
        self._finished(run.trial)
        if error:
            raise error

    # from the page -------------------------------------------------------------------------------------------------

    def _receive(self, _: object, content: dict[str, Any], buffers: object) -> None:
        """A message arrives, in whatever thread; Stop acts at once, even while a cell runs."""
        if any(command["type"] == "stop" for command in content.get("commands", ())) and (run := self._run):
            run.stop.set()
        self._soon(functools.partial(self._handle, content))

    def _soon(self, act: Callable[[], None]) -> None:
        """Do it on the thread of the cell: one thread draws."""
        self._cell.call(self._guarded, act)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do it and show what became of it; whatever goes wrong stands in the page."""
        if self._closed:
            return
        try:
            act()
        except BaseException as error:
            self._fail(error)
        try:
            self._show()
        except BaseException as error:
            self.page = {**self.page, "error": self._fail(error), "ack": self._acknowledged}

    def _fail(self, error: BaseException) -> str:
        sentence = faults.keep(error)
        self._halt()
        self._current.error = sentence
        return sentence

    def _handle(self, content: dict[str, Any]) -> None:
        if "client" in content:
            self._acknowledged = {**self._acknowledged, str(content["client"]): int(content["seq"])}
        if content["type"] == "page":
            self._picture.restyle(Page(**content["page"]))
        elif content["type"] == "whole":
            self._push(whole=True)
        for command in content.get("commands", ()):
            self._command(**command)

    def _command(self, type: str, **arguments: Any) -> None:
        acts: dict[str, Callable[..., None]] = {
            "set": self._set,
            "mode": self._set_mode,
            "predict": self._predict,
            "step": self._step,
            "reset": self._reset,
            "stop": self._halt,
            "choose": self._open,
            "picture": self._choose_picture,
            "projector": open_panels.projector,
        }
        acts[type](**arguments)

    # to the page ---------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        """Draw the state, and tell the page, in one message."""
        self._paint()
        with self.hold_sync():
            self.page = self._words() | {"ack": self._acknowledged}
            self._push()

    def _push(self, whole: bool = False) -> None:
        if changes := self._picture.changes(whole):
            self.frame = changes

    def _paint(self) -> None:
        trial, canvas, drawn = self._trial, self._canvas, self._drawn()
        if trial.error:
            return  # the last good picture stays
        if trial.result is None:
            drawn.tease(canvas, trial.values)
        else:
            canvas.show()
            drawn.draw(canvas, trial.result)
        drawn.guess(canvas, trial.values, trial.prediction)

    def _words(self) -> dict[str, Any]:
        self._notice = " ".join(one_time_messages.take()) or self._notice
        progress = self._run.progress() if self._run else None
        now = {"progress": progress, "primary": self._primary(), "notice": self._notice}
        return {**page_state.page(self._trial, self._drawn()), **now}

    def _primary(self) -> str:
        """The one button that is next."""
        trial = self._trial
        if trial.mode == "live" or self._run or trial.result is not None:
            return ""  # a control, or the next cell
        return "predict" if trial.prediction is None else "step"
