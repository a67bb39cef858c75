"""One experiment in a learner's hands, without page or picture: values set, a prediction made, an answer shown."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

from labkit.declare import Value, checked, parameters
from labkit.device import quota_threads
from labkit.errors import LabError
from labkit.frame.experiment import Experiment
from labkit.wording import show, three, with_unit

NOTHING = 1e-9  # %


class Trial:
    """What is set, predicted and known of one experiment; every change of it is a method here.

    >>> from labkit.roofline.panels import Ceiling
    >>> trial = Trial(Ceiling())
    >>> trial.set({"intensity": 2, "bandwidth": 80})
    >>> trial.predict(150)
    >>> (trial.result,) = trial.outcomes()
    >>> trial.finish(); trial.score
    0.0625
    """

    def __init__(self, experiment: Experiment[Any]) -> None:
        self.experiment = experiment
        self.parameters = parameters(experiment.run)
        self.long = inspect.isgeneratorfunction(experiment.run)
        self.mode = "predict"
        self.values: dict[str, Value] = {name: parameter.default for name, parameter in self.parameters.items()}
        self.first = dict(self.values)  # the declared ones, or those that the panel was made with
        self.hide()

    def restore(self) -> None:
        """Back to the first values."""
        self.values = dict(self.first)
        self.hide()

    def hide(self) -> None:
        """Forget answer and prediction: a new question."""
        self.prediction: float | None = None
        self.result: Any = None
        self.complete = False
        self.noted = False  # whether this prediction and its answer were kept as progress
        self.error = ""
        self.rejected: dict[str, object] = {}

    def set(self, values: Mapping[str, object]) -> None:
        """Take new values, all or none; a move after an answer hides it again."""
        try:
            moved = {**self.values, **checked(self.parameters, values)}
        except LabError as error:
            self.rejected = dict(values)
            self.error = str(error)
            raise
        if moved != self.values and self.result is not None and self.mode == "predict":
            self.hide()
        self.values, self.rejected, self.error = moved, {}, ""

    def predict(self, number: object) -> None:
        """Declare what the answer will be."""
        if self.result is not None or self.mode == "live":
            raise LabError("the answer is on the page already: press Reset, then predict")
        try:
            prediction = float(number)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            prediction = math.nan
        if not math.isfinite(prediction) or isinstance(number, bool):
            said = "is empty" if number in (None, "") else f"= {show(number)} is not a number"
            raise LabError(f"the prediction {said}: type one, as in 12.5")
        self.prediction, self.noted, self.error = prediction, False, ""

    def turn(self, mode: str) -> None:
        """`predict` hides the answer until Step; `live` runs at every move."""
        if mode not in ("predict", "live"):
            raise LabError(f"mode = {mode!r} is none of predict, live: try 'predict'")
        if mode == "live" and self.long:
            raise LabError("mode = 'live' is for quick experiments, this one runs for seconds: try 'predict' and Step")
        self.mode = mode
        self.hide()

    def reset(self) -> None:
        """Hide the answer and ask anew; where there is nothing to hide, bring back the first values."""
        fresh = self.prediction is None and self.result is None and not self.error
        self.mode = "predict"
        if fresh:
            self.restore()
        else:
            self.hide()

    def begin(self) -> None:
        """A run starts: what stands is not yet its result."""
        self.complete, self.error = False, ""

    def outcomes(self) -> Iterator[Any]:
        """Run: the result, or each result so far where the run is long.

        On one torch thread: beside a busy program two threads wait for each other ten times as long as a tiny model
        computes. What measures the machine sets its own.
        """
        with quota_threads(1):
            outcome = self.experiment.run(**self.values)
            if self.long:
                yield from outcome
            else:
                yield outcome

    def finish(self) -> None:
        """The run ended: its result stands."""
        self.complete = self.result is not None and getattr(self.result, "progress", 1.0) >= 1
        self.error = ""

    @property
    def answer(self) -> float:
        """The number that the question asks for; a share that only rounding tells from 0 is 0."""
        answer = self.experiment.answer(self.result)
        return 0.0 if self.experiment.unit == "%" and abs(answer) < NOTHING else answer

    @property
    def score(self) -> float | None:
        """How far the prediction is off, |predicted − answer| / |answer|; of a share in %, the difference itself.

        None without a prediction or an answer.
        """
        if self.prediction is None or not self.complete:
            return None
        if self.experiment.unit == "%" and math.isfinite(self.answer):
            return abs(self.prediction - self.answer) / 100
        if self.answer == 0 or not math.isfinite(self.answer):
            return 0.0 if self.prediction == self.answer else math.inf
        return abs(self.prediction - self.answer) / abs(self.answer)

    @property
    def verdict(self) -> str:
        """The score in words."""
        if self.score is None or self.prediction is None:
            return ""
        unit = self.experiment.unit
        sentence = f"You predicted {with_unit(self.prediction, unit)}, it is {with_unit(self.answer, unit)}"
        if self.score < 0.0005:
            return f"{sentence}: exactly."
        if self.score > 10:
            return f"{sentence}: far off."
        return f"{sentence}: {three(100 * self.score)} {'points' if unit == '%' else '%'} off."
