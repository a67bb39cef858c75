"""What a panel says: pure functions of the trial's state to plain values for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.declare import Choice, Parameter, Range
from labkit.frame.trial import Trial
from labkit.wording import with_unit


def spec(trials: Mapping[str, Trial], current: Trial) -> dict[str, Any]:
    """What stays the same while an experiment is on the page."""
    experiment = current.experiment
    return {
        "experiments": [{"name": name, "title": trial.experiment.title} for name, trial in trials.items()],
        "chosen": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "unit": experiment.unit,
        "note": experiment.note,
        "long": current.long,
        "source": experiment.source(),
        "controls": [_control(parameter) for parameter in current.parameters.values()],
    }


def page(trial: Trial) -> dict[str, Any]:
    """What changes; nothing in it follows from an answer that is hidden."""
    experiment, known = trial.experiment, trial.result is not None
    return {
        "mode": trial.mode,
        "values": trial.values,
        "rejected": {name: str(value) for name, value in trial.rejected.items()},
        "prediction": trial.prediction,
        "headline": experiment.headline(trial.result) if known else experiment.title,
        "sentence": sentence(trial),
        "score": trial.verdict,
        "error": trial.error,
        "tables": experiment.tables(trial.result) if known else [],
    }


def sentence(trial: Trial) -> str:
    """What stands under the picture; before the answer nothing that follows from it."""
    if trial.result is not None:
        return trial.experiment.describe(trial.result)
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
    control = {"name": parameter.name, "label": parameter.label, "help": rule.help}
    if isinstance(rule, Range):
        return {**control, "unit": rule.unit, "positions": rule.positions(parameter.kind)}
    if isinstance(rule, Choice):
        return {**control, "options": list(rule.options)}
    return {**control, "switch": True}
