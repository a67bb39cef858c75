"""Driving a lab to every extreme of its controls, as tests of all labs do."""

from __future__ import annotations

import ast
import itertools
from typing import Any

from hypothesis import strategies as st

import labkit
from labkit.declare import Choice, Range, parameters
from labkit.labs import Lab
from tests.strategies import settings_of


def extremes(run: Any) -> list[dict[str, Any]]:
    """Every combination of the ends of every number and switch, and through them every choice in turn."""
    declared = parameters(run)
    choices = {name: itertools.cycle(p.rule.options) for name, p in declared.items() if isinstance(p.rule, Choice)}
    ends = {
        name: (p.rule.low, p.rule.high) if isinstance(p.rule, Range) else (False, True)
        for name, p in declared.items()
        if name not in choices
    }
    corners = [dict(zip(ends, values, strict=True)) for values in itertools.product(*ends.values())]
    return [{**corner, **{name: next(each) for name, each in choices.items()}} for corner in corners]


def ticks(lab: Lab) -> int:
    """The most ticks that any axis of the picture shows."""
    axes = [(axis, sorted(axis.get_view_interval())) for each in lab.figure.axes for axis in (each.xaxis, each.yaxis)]
    return max(sum(low <= place <= high for place in axis.get_majorticklocs()) for axis, (low, high) in axes)


def remedy(error: labkit.LabError) -> dict[str, Any]:
    """What a message says to try, as a setting."""
    said, _, value = str(error).rpartition("try ")
    return {said.split(" = ")[0].replace(" ", "_"): ast.literal_eval(value)}


def drive(lab: Lab, values: dict[str, Any]) -> None:
    """One setting is drawn, or refused in one sentence whose remedies lead to a picture."""
    lab.set(**values)
    assert ticks(lab) <= 5
    for _ in range(3):
        try:
            lab.step()
            break
        except labkit.LabError as error:
            assert lab.page["error"] == str(error)
            lab.set(**remedy(error))
    assert lab.text and lab.page["headline"] and lab.page["tables"] and not lab.error and ticks(lab) <= 5
    lab.experiment.answer(lab.result)


def drive_to_extremes(lab: Lab) -> None:
    """Every extreme of every control of the experiment that is shown."""
    for values in extremes(lab.experiment.run):
        drive(lab, values)


def drive_anywhere(lab: Lab, data: st.DataObject) -> None:
    """Any setting of the experiment that is shown."""
    drive(lab, data.draw(settings_of(lab.experiment.run)))
