"""One panel with its experiments; all that a mouse can do, code can do."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from labkit.errors import LabError
from labkit.frame import page_state
from labkit.frame.experiment import Experiment
from labkit.frame.open_panels import projector
from labkit.frame.panel import Panel
from labkit.frame.run import Run
from labkit.frame.trial import Trial
from labkit.learner import class_predictions, one_time_messages, record

REFRESH = 0.1  # seconds between two pictures of a long run


class Lab(Panel):
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
    """

    def __init__(
        self, experiments: Sequence[Experiment[Any]], experiment: str = "", *, topic: str = "", **values: Any
    ) -> None:
        super().__init__()
        self.topic = topic
        self._trials = {e.name: Trial(e) for e in experiments}
        self._run: Run | None = None
        self._notice = ""
        self._open(experiment or experiments[0].name)
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
            shown = time.monotonic()
            for _ in self._results():
                if self._trial.long and time.monotonic() - shown > REFRESH:
                    self._show()
                    shown = time.monotonic()

    def reset(self) -> None:
        """Hide the answer and ask anew; a second time also brings back the controls' first values."""
        with self._raising():
            self._reset()

    def choose(self, experiment: str) -> None:
        """Show another experiment of this lab; each keeps its values and its answer."""
        with self._raising():
            self._open(experiment)

    def redraw(self) -> None:
        """Show the figure as it is now, after it was styled by hand."""
        with self._raising():
            pass

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
        return str(page_state.page(self._trial)["sentence"])

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
        super().close()
        self._trials.clear()

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
        experiment = self._current.experiment
        self._canvas.clear()
        self._canvas.aspect = experiment.aspect
        self._canvas.restyle(self._canvas.page)
        experiment.layout(self._canvas)
        self.spec = page_state.spec(self._trials, self._current)
        self._show()

    def _set(self, values: Mapping[str, object]) -> None:
        self._halt()
        self._trial.set(values)
        if self._trial.mode == "live":
            self._finish()

    def _set_mode(self, word: str) -> None:
        self._halt()
        self._trial.turn(word)
        if word == "live":
            self._finish()

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
        answer = trial.experiment.answer(trial.result)
        record.predicted(self._key(trial), trial.prediction, answer, trial.score, trial.values)

    def _reset(self) -> None:
        self._halt()
        self._notice = ""
        self._trial.reset()

    def _results(self) -> Iterator[Any]:
        """Run on this thread."""
        run = self._run = Run(self._trial)
        run.trial.begin()
        try:
            for result in run:
                run.trial.result = result
                yield result
            self._finished(run.trial)
        finally:
            self._run = None

    def _finish(self) -> None:
        for _ in self._results():
            pass

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
            return self._finish()
        self._run = Run(self._trial)
        self._trial.begin()
        threading.Thread(target=self._work, args=(self._run,), name=f"labkit-{self.uid[:6]}", daemon=True).start()

    def _work(self, run: Run) -> None:
        posted, result = 0.0, None
        try:
            for result in run:
                if time.monotonic() - posted > REFRESH:
                    posted = time.monotonic()
                    self._on_main(functools.partial(self._take, run, result))
        except BaseException as error:
            caught = error
            self._on_main(lambda: self._end(run, result, caught))
        else:
            self._on_main(lambda: self._end(run, result, None))

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

    # what the widget asks ------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        if run := self._run:
            run.stop.set()

    def _refuse(self, sentence: str) -> None:
        self._halt()
        self._current.error = sentence

    def _command(self, type: str, **given: Any) -> None:
        acts: dict[str, Callable[..., None]] = {
            "set": self._set,
            "mode": self._set_mode,
            "predict": self._predict,
            "step": self._step,
            "reset": self._reset,
            "stop": self._halt,
            "choose": self._open,
            "projector": projector,
        }
        acts[type](**given)

    def _paint(self) -> None:
        trial, canvas = self._trial, self._canvas
        if trial.error:
            return  # the last good picture stays
        if trial.result is None:
            trial.experiment.tease(canvas, trial.values)
        else:
            canvas.show()
            trial.experiment.draw(canvas, trial.result)
        trial.experiment.guess(canvas, trial.values, trial.prediction)

    def _words(self) -> dict[str, Any]:
        self._notice = " ".join(one_time_messages.take()) or self._notice
        under_way = self._run.progress() if self._run else None
        told = {"progress": under_way, "primary": self._primary(), "notice": self._notice}
        return {**page_state.page(self._trial), **told}

    def _primary(self) -> str:
        """The one button that is next."""
        trial = self._trial
        if trial.mode == "live" or self._run:
            return ""
        if trial.result is not None:
            return "reset"
        return "predict" if trial.prediction is None else "step"
