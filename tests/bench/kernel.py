"""The kernel's side: a lab and its naive form, both with clocks; the bench's notebooks import it."""

from __future__ import annotations

import cProfile
import dataclasses
import functools
import json
import pstats
import time
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
from ipywidgets import Dropdown, SelectionSlider, interact

from labkit import LabError, device, labs
from labkit.declare import Range
from labkit.labs import _canvas

REACH = 12  # positions that a control is moved to each side of where it starts
rows: dict[str, list[dict[str, Any]]] = {"ours": [], "naive": []}
shown: dict[str, Any] = {}


def stops(trial: Any) -> dict[str, tuple[list[float], int]]:
    """For each numeric control the values it stops at, and which of them is nearest to its default."""
    numeric = [parameter for parameter in trial.parameters.values() if isinstance(parameter.rule, Range)]
    values = {each.name: (each.rule.positions(each.kind), each.default) for each in numeric}
    return {name: (all, min(range(len(all)), key=lambda at: abs(all[at] - by))) for name, (all, by) in values.items()}


def reach(trial: Any, name: str, way: int) -> int:
    """How many positions a control can be moved before `run` refuses."""
    positions, start = stops(trial)[name]
    path = positions[start::way][1 : REACH + 1]
    for far, value in enumerate(path):
        try:
            trial.experiment.run(**{**trial.values, name: value})
        except LabError:
            return far
    return len(path)


def about() -> None:
    """Print the machine and the labs there are."""
    cpu = device.name(device.pick("cpu"))
    print(json.dumps({"cpu": cpu, "quota threads": device.threads(), "labs": list(labs.all())}))


def cases(topic: str) -> None:
    """Print a lab's quick experiments, with the numeric controls that can be moved alone."""
    trials = [labs.all()[topic](name)._trial for name in labs.all()[topic]().experiments]
    for trial in (quick := [trial for trial in trials if not trial.long]):
        ends = {name: (reach(trial, name, -1), reach(trial, name, 1)) for name in stops(trial)}
        trial.ends = [{"name": name, "place": at, "ends": each} for at, (name, each) in enumerate(ends.items())]
    found = {f"{topic}.{t.experiment.name}": [control for control in t.ends if any(control["ends"])] for t in quick}
    print(json.dumps(found))


def timed(spent: dict[str, float], part: str, work: Any, *given: Any, **named: Any) -> Any:
    """Do the work and note its seconds."""
    start = time.perf_counter()
    value = work(*given, **named)
    spent[part] = time.perf_counter() - start
    return value


def lab(name: str) -> labs.Lab:
    """A lab in live mode; every move leaves a row with the seconds of its parts."""
    topic, experiment = name.split(".")
    made = labs.all()[topic](experiment)
    made.mode = "live"
    made.set(**{control: positions[start] for control, (positions, start) in stops(made._trial).items()})
    spent: dict[str, float] = {}
    for owner, part in ((made._trial.experiment, "run"), (made._canvas, "draw"), (made._canvas, "patches")):
        setattr(owner, part, functools.partial(timed, spent, part, getattr(owner, part)))
    handle = made._guarded

    def guarded(act: Any) -> None:  # a message from the page, from here until the answer is sent
        spent.clear()
        timed(spent, "total", handle, act)
        if "run" in spent and "patches" in spent:
            encode, other = spent["patches"] - spent["draw"], spent["total"] - spent["patches"] - spent["run"]
            size = sum(len(patch["png"]) for patch in made.frame["patches"])
            limits = repr([(axes.get_xlim(), axes.get_ylim()) for axes in made.figure.axes])
            rows["ours"].append({**spent, "encode": encode, "other": other, "bytes": size, "limits": limits})
        shown.update(ours=made.values, text=made.page["sentence"])

    made._guarded = guarded  # type: ignore[method-assign]
    return made


def naive(made: labs.Lab) -> None:
    """The form that most notebooks have, with the same picture: `interact`, and a new pyplot figure at each move.

    The experiment's own layout and draw make the same artists, at the same size, in a figure from `plt.figure`; then
    `plt.show` draws all of it (saving draws animated artists too) and sends it as one PNG through the output area.
    Sliders stop at the lab's own positions, so that both forms run and draw the same values.
    """
    experiment = type(made._trial.experiment)()

    def picture(**values: Any) -> None:
        spent: dict[str, float] = {}
        start = time.perf_counter()
        result = timed(spent, "run", experiment.run, **values)
        page = dataclasses.replace(made._canvas.page, ratio=1.0)  # inline's "retina" doubles the pixels
        with mock.patch.object(_canvas, "Figure", plt.figure):
            canvas = _canvas.Canvas(page, experiment.aspect)
        experiment.layout(canvas)
        experiment.draw(canvas, result)
        experiment.guess(canvas, values, None)
        plt.show()
        rows["naive"].append({**spent, "total": time.perf_counter() - start})
        shown["naive"] = values

    def control(name: str, parameter: Any) -> Any:
        if name in stops(made._trial):
            positions, start = stops(made._trial)[name]
            return SelectionSlider(options=positions, value=positions[start])
        return Dropdown(options=getattr(parameter.rule, "options", (False, True)), value=parameter.default)

    interact(picture, **{name: control(name, parameter) for name, parameter in made._trial.parameters.items()})


def taken() -> str:
    """The rows since the last call, and what is shown now."""
    told = json.dumps({**rows, "shown": shown})
    for each in rows.values():
        each.clear()
    return told


def profile(name: str, moves: int = 100) -> None:
    """Print where the time of a move goes, in this process, without browser or comm."""
    topic, experiment, control = name.split(".")
    made = labs.all()[topic](experiment)
    made.mode = "live"
    made._receive(None, {"type": "page", "page": vars(made._canvas.page)}, [])
    positions, start = stops(made._trial)[control]

    def move(turn: int) -> None:
        commands = [{"type": "set", "values": {control: positions[max(0, start - 1) + turn % 2]}}]
        made._receive(None, {"type": "commands", "client": "bench", "seq": turn, "commands": commands}, [])

    move(1)
    with cProfile.Profile() as watched:
        for turn in range(moves):
            move(turn)
    labs.check()
    print(f"{name}: {moves} moves, so 0.1 s here is 1 ms a move")
    for order in ("tottime", "cumulative"):
        pstats.Stats(watched).sort_stats(order).print_stats(15)
