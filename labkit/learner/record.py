"""A learner's record, kept between kernels: predictions and passed exercises, in one small file.

The file holds experiments, numbers, times and settings: no names, no paths. It is sent nowhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import filelock

from labkit.declare import Value, quantity
from labkit.learner import one_time_messages

VERSION = 1
KEPT = 50  # predictions of one experiment: the best, and the last ones
LARGEST = 4_000_000  # bytes that a file of this version cannot have
PATIENCE = 2.0  # seconds to wait for another kernel that writes


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One prediction whose answer was then shown."""

    at: str = quantity("when, in UTC")
    predicted: float = quantity("the number that was declared, in the unit of the question")
    answer: float | None = quantity("what came out; None where it is not finite")
    score: float | None = quantity("relative error; None where the answer is 0 or not finite, and was missed")
    values: Mapping[str, Value] = quantity("how the controls stood")


@dataclasses.dataclass(frozen=True)
class Done:
    """All that was done so far."""

    predictions: Mapping[str, tuple[Prediction, ...]] = quantity("of each experiment, 'topic.name', the oldest first")
    exercises: Mapping[str, str] = quantity("exercises that were passed, and when for the first time, in UTC")

    def best(self, experiment: str) -> float | None:
        """The smallest score of an experiment; None without one.

        >>> Done({}, {}).best("roofline.ceiling")
        """
        return min(
            (each.score for each in self.predictions.get(experiment, ()) if each.score is not None), default=None
        )

    def last(self, experiment: str) -> Prediction | None:
        """The latest prediction of an experiment.

        >>> Done({}, {}).last("roofline.ceiling")
        """
        return next(reversed(self.predictions.get(experiment, ())), None)


class Foreign(ValueError):
    """A file that this version cannot read."""


def predicted(experiment: str, number: float, answer: float, score: float, values: Mapping[str, Value]) -> None:
    """Record a prediction and the answer; if that fails, one sentence says so, once.

    >>> predicted("roofline.ceiling", 150, 160, 0.0625, {"intensity": 2.0})
    >>> done().last("roofline.ceiling").answer
    160.0
    """
    new = Prediction(_now(), float(number), _finite(answer), _finite(score), dict(values))

    def add(old: Done) -> Done:
        series = _latest((*old.predictions.get(experiment, ()), new))
        return dataclasses.replace(old, predictions={**old.predictions, experiment: series})

    _change(add)


def passed(exercise: str) -> None:
    """Record that an exercise was passed.

    >>> passed("token_mean")
    >>> "token_mean" in done().exercises
    True
    """
    _change(lambda old: dataclasses.replace(old, exercises={exercise: _now(), **old.exercises}))


def done() -> Done:
    """The record of all kernels of this user so far; empty without a readable file.

    >>> isinstance(done().exercises, dict)
    True
    """
    try:
        path = folder() / "progress.json"
        try:
            return _read(path)
        except Foreign:
            with _alone(path):
                return _own(path)
    except OSError as error:
        return _given_up(error)


def folder() -> pathlib.Path:
    """Where the file is: LABKIT_DATA, or the folder in which this system keeps a user's data.

    >>> folder().is_absolute()
    True

    Raises OSError where there is none.
    """
    if setting := os.environ.get("LABKIT_DATA"):
        return pathlib.Path(setting).absolute()
    try:
        import platformdirs
    except ModuleNotFoundError as error:  # it comes with JupyterLab
        raise OSError("no package platformdirs") from error
    try:
        path = platformdirs.user_data_path("labkit", appauthor=False)
    except RuntimeError as error:
        raise OSError("no home folder") from error
    if not path.is_absolute():
        raise OSError("no home folder")
    return path


# The file: read, changed and replaced by one kernel at a time.


def _change(change: Callable[[Done], Done]) -> None:
    try:
        path = folder() / "progress.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            _replace(path, json.dumps(_plain(change(_own(path))), allow_nan=False, separators=(",", ":")))
    except OSError as error:
        _given_up(error)


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
    """While no other kernel writes."""
    with filelock.FileLock(path.with_suffix(".lock"), timeout=PATIENCE):
        yield


def _replace(path: pathlib.Path, text: str) -> None:
    """Replace the file so that at any time the old one or the new one is there, complete."""
    new = path.with_suffix(".new")
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _given_up(error: OSError) -> Done:
    reason = "another kernel holds it" if isinstance(error, TimeoutError) else error.strerror or str(error)
    one_time_messages.tell("progress", f"Your progress cannot be kept here ({reason}); all else works.")
    return Done({}, {})


def _own(path: pathlib.Path) -> Done:
    """The content of the file; an unreadable one is first set aside under another name."""
    try:
        return _read(path)
    except Foreign as error:
        names = (path.with_name(f"progress-{error}-{n}.json") for n in range(1, 1000))
        aside = next(name for name in names if not os.path.lexists(name))
        os.rename(path, aside)
        what = "is of a newer labkit" if str(error) == "newer" else "could not be read"
        one_time_messages.tell(
            "set aside", f"Your progress file {what}: it is kept as {aside.name}, and a new one was begun."
        )
        return Done({}, {})


def _read(path: pathlib.Path) -> Done:
    if not path.exists():
        return Done({}, {})
    if not path.is_file():
        raise Foreign("damaged")
    with open(path, "rb") as file:
        text = file.read(LARGEST + 1)
    try:
        return _parsed(json.loads(text if len(text) <= LARGEST else b"", parse_constant=_refuse))
    except Foreign:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise Foreign("damaged") from error


def _parsed(content: Any) -> Done:
    """Every part as this version writes it, or an error."""
    if int(content["version"]) > VERSION:
        raise Foreign("newer")
    if set(content) != {"version", "predictions", "exercises"} or content["version"] != VERSION:
        raise ValueError("another layout")
    series = {_text(key): tuple(map(_prediction, rows)) for key, rows in content["predictions"].items()}
    return Done(series, {_text(key): _time(at) for key, at in content["exercises"].items()})


def _prediction(row: Mapping[str, Any]) -> Prediction:
    values = {_text(name): _setting(value) for name, value in row["values"].items()}
    return Prediction(_time(row["at"]), _number(row["predicted"]), _maybe(row["answer"]), _maybe(row["score"]), values)


def _plain(done: Done) -> dict[str, Any]:
    series = {key: [dataclasses.asdict(each) for each in rows] for key, rows in done.predictions.items()}
    return {"version": VERSION, "predictions": series, "exercises": dict(done.exercises)}


def _latest(series: tuple[Prediction, ...]) -> tuple[Prediction, ...]:
    """The last predictions, and the best of all."""
    best = min(series, key=lambda each: math.inf if each.score is None else each.score)
    rest = series[1 - KEPT :]
    return rest if best in rest or len(series) < KEPT else (best, *rest)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError("a number")
    return float(value)


def _maybe(value: Any) -> float | None:
    return None if value is None else _number(value)


def _setting(value: Any) -> Value:
    return value if isinstance(value, bool | int | str) else _number(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a word")
    return value


def _time(value: Any) -> str:
    datetime.datetime.strptime(_text(value), "%Y-%m-%dT%H:%M:%SZ")
    return str(value)


def _refuse(word: str) -> None:
    raise ValueError(word)
