"""What a panel says: pure functions of the trial's state to plain values for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.declare import Choice, Parameter, Range
from labkit.frame.pictures import Own
from labkit.frame.trial import Trial
from labkit.wording import with_unit

SELDOM = ("seed", "text", "epoch", "depth")  # controls that fold under “more”


def spec(trials: Mapping[str, Trial], current: Trial, pictures: Sequence[str], picture: str) -> dict[str, Any]:
    """What stays the same while an experiment is on the page."""
    experiment = current.experiment
    return {
        "experiments": [{"name": name, "title": trial.experiment.title} for name, trial in trials.items()],
        "chosen": experiment.name,
        "pictures": list(pictures),
        "picture": picture,
        "title": experiment.title,
        "question": experiment.question,
        "unit": experiment.unit,
        "note": experiment.note,
        "long": current.long,
        "source": experiment.source(),
        "controls": [_control(parameter) for parameter in current.parameters.values()],
    }


def page(trial: Trial, picture: Own) -> dict[str, Any]:
    """What changes; nothing in it follows from an answer that is hidden."""
    experiment, known = trial.experiment, trial.result is not None
    return {
        "mode": trial.mode,
        "values": trial.values,
        "rejected": {name: str(value) for name, value in trial.rejected.items()},
        "prediction": trial.prediction,
        "headline": experiment.headline(trial.result) if known else experiment.title,
        "sentence": sentence(trial, picture),
        "score": trial.verdict or acknowledge(trial),
        "error": trial.error,
        "tables": picture.tables(trial.result) if known else [],
    }


def acknowledge(trial: Trial) -> str:
    """That a prediction was taken, until the answer is there."""
    if trial.prediction is None or trial.result is not None:
        return ""
    return f"Your prediction: {with_unit(trial.prediction, trial.experiment.unit)}. Step shows the answer."


def sentence(trial: Trial, picture: Own) -> str:
    """What stands under the picture; before the answer nothing that follows from it."""
    if trial.result is not None:
        return picture.describe(trial.result)
    return f"The answer is hidden: predict it, then press Step. {settings(trial)}"


def settings(trial: Trial) -> str:
    """How the controls stand."""
    given = ", ".join(_setting(trial.parameters[name], value) for name, value in trial.values.items())
    return f"Set: {given}."


def _setting(parameter: Parameter, value: Any) -> str:
    if isinstance(parameter.rule, Range):
        return f"{parameter.label} {with_unit(value, parameter.rule.unit)}"
    said = ("on" if value else "off") if isinstance(value, bool) else value
    return f"{parameter.label} {said}"


def _control(parameter: Parameter) -> dict[str, Any]:
    rule = parameter.rule
    seldom = parameter.name in SELDOM
    control = {"name": parameter.name, "label": parameter.label, "help": rule.help, "seldom": seldom}
    if isinstance(rule, Range):
        return {**control, "unit": rule.unit, "positions": rule.positions(parameter.kind)}
    if isinstance(rule, Choice):
        return {**control, "options": list(rule.options)}
    return {**control, "switch": True}
