"""Driving a lab to every extreme of its controls, as tests of all labs do."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st

import labkit
from labkit.declare import Choice, Parameter, Range, parameters
from labkit.labs import Lab
from tests.strategies import settings_of

Setting = dict[str, Any]
FEW = 8  # combinations of a quick experiment that are all driven; of more, any two ends meet once


def ends(parameter: Parameter) -> tuple[Any, ...]:
    """Both ends of a number or a switch, every word of a choice; a seed has none."""
    rule = parameter.rule
    if parameter.name == "seed":
        return (parameter.default,)
    if isinstance(rule, Range):
        return rule.low, rule.high
    return rule.options if isinstance(rule, Choice) else (False, True)


def together(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[frozenset[Any]]:
    """Every pair of a value of one setting and a value of another control in the other."""
    return [frozenset(((a, x), (b, y))) for a, x in one.items() for b, y in other.items() if a != b]


def pairwise(values: Mapping[str, Sequence[Any]]) -> Iterator[Setting]:
    """Few settings in which any two values of two controls occur together: greedy, the same at every call."""
    singles = [{name: value} for name, some in values.items() for value in some]
    missing = dict.fromkeys(pair for one, other in itertools.combinations(singles, 2) for pair in together(one, other))
    while missing:
        setting: Setting = dict(next(iter(missing)))
        for name in [name for name in values if name not in setting]:
            setting[name] = max(
                values[name], key=lambda value: sum(p in missing for p in together({name: value}, setting))
            )
        for pair in together(setting, setting):
            missing.pop(pair, None)
        yield {name: setting[name] for name in values}


def extremes(run: Any, without: Mapping[str, Any] = MappingProxyType({})) -> list[Setting]:
    """Every combination of the extremes of few controls, every pair of them of many; `without` some ends."""
    values = {
        name: [end for end in ends(parameter) if end != without.get(name)]
        for name, parameter in parameters(run).items()
    }
    count, few = math.prod(map(len, values.values())), 0 if inspect.isgeneratorfunction(run) else FEW
    if count <= few or sum(len(some) > 1 for some in values.values()) < 2:
        return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    return list(pairwise(values))


def ticks(lab: Lab) -> int:
    """The most ticks that any axis of the picture shows."""
    axes = [(axis, sorted(axis.get_view_interval())) for each in lab.figure.axes for axis in (each.xaxis, each.yaxis)]
    return max(sum(low <= place <= high for place in axis.get_majorticklocs()) for axis, (low, high) in axes)


def remedy(error: labkit.LabError) -> Setting:
    """What a message says to try, as a setting."""
    sentence, _, value = str(error).rpartition("try ")
    return {sentence.split(" = ")[0].replace(" ", "_"): ast.literal_eval(value)}


def drive(lab: Lab, values: Setting) -> None:
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
    assert math.isfinite(lab.experiment.answer(lab.result)) and getattr(lab.result, "progress", 1) == 1


def draw(lab: Lab, result: Any) -> Any:
    """Let the picture show a result that no control leads to."""
    lab._canvas.show()
    lab.experiment.draw(lab._canvas, result)
    return result


def drawn_while_running(lab: Lab) -> Iterator[Any]:
    """Every result so far of a long run, each drawn and said."""
    for result in lab.experiment.run(**lab.values):
        draw(lab, result)
        assert ticks(lab) <= 5 and lab.experiment.headline(result) and lab.experiment.describe(result)
        assert lab.experiment.tables(result)
        yield result


def drive_anywhere(lab: Lab, data: st.DataObject) -> None:
    """Any setting of the experiment that is shown, on the ranks that run already."""
    values = data.draw(settings_of(lab.experiment.run))
    drive(lab, {name: value for name, value in values.items() if name != "ranks"})
