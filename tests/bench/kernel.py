"""The kernel's side: a lab and its naive form, both with clocks; the bench's notebooks import it."""

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
from labkit.frame import canvas

REACH = 12  # positions that a control is moved to each side of where it starts
rows: dict[str, list[dict[str, Any]]] = {"ours": [], "naive": []}
shown: dict[str, Any] = {"controls": []}


def about() -> None:
    """Print the machine and every lab's quick experiments."""
    trials = [(topic, trial) for topic, make in labs.all().items() for trial in make()._trials.values()]
    quick = [f"{topic}.{trial.experiment.name}" for topic, trial in trials if not trial.long]
    print(json.dumps({"cpu": device.name(device.pick("cpu")), "quota threads": device.threads(), "experiments": quick}))


def numeric(trial: Any) -> dict[str, tuple[list[float], int]]:
    """For each numeric control the values it stops at, and which of them is nearest to its default."""
    ranges = [parameter for parameter in trial.parameters.values() if isinstance(parameter.rule, Range)]
    stops = {each.name: (each.rule.positions(each.kind), each.default) for each in ranges}
    return {name: (all, min(range(len(all)), key=lambda at: abs(all[at] - by))) for name, (all, by) in stops.items()}


def reach(trial: Any, name: str, path: list[float]) -> int:
    """How many values of a path a control can take before `run` refuses."""
    for far, value in enumerate(path):
        try:
            trial.experiment.run(**{**trial.values, name: value})
        except LabError:
            return far
    return len(path)


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
    trial, canvas, handle, spent = made._trial, made._canvas, made._guarded, {}
    made.set(**{control: stops[start] for control, (stops, start) in numeric(trial).items()})
    for place, (control, (stops, start)) in enumerate(numeric(trial).items()):
        ends = [reach(trial, control, stops[start::way][1 : REACH + 1]) for way in (-1, 1)]
        shown["controls"] += [{"name": control, "place": place, "ends": ends}] if any(ends) else []
    for owner, part, word in ((trial.experiment, "run", "compute"), (canvas, "draw", "draw"), (canvas, "patches", "")):
        setattr(owner, part, functools.partial(timed, spent, word, getattr(owner, part)))

    def guarded(act: Any) -> None:  # a message from the page, from here until the answer is sent
        spent.clear()
        timed(spent, "total", handle, act)
        if {"compute", "draw"} <= spent.keys():
            drawn = spent.pop("")
            size = sum(len(patch["colours"]) + len(patch["lengths"]) for patch in made.frame["patches"])
            limits = repr([(axes.get_xlim(), axes.get_ylim()) for axes in made.figure.axes])
            parts = {"encode": drawn - spent["draw"], "other": spent["total"] - drawn - spent["compute"]}
            rows["ours"].append({**spent, **parts, "bytes": size, "limits": limits})
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
        timed(spent, "total", show, spent, values)
        rows["naive"].append(spent)
        shown["naive"] = values

    def show(spent: dict[str, float], values: dict[str, Any]) -> None:
        result = timed(spent, "compute", experiment.run, **values)
        page = dataclasses.replace(made._canvas.page, ratio=1.0)  # inline's "retina" doubles the pixels
        with mock.patch.object(canvas, "Figure", plt.figure):
            drawn = canvas.Canvas(page, experiment.aspect)
        experiment.layout(drawn)
        experiment.draw(drawn, result)
        experiment.guess(canvas, values, None)
        plt.show()

    controls: dict[str, Any] = {}
    for name, parameter in made._trial.parameters.items():
        options, start = numeric(made._trial).get(name, (getattr(parameter.rule, "options", (False, True)), None))
        value = parameter.default if start is None else options[start]
        controls[name] = (Dropdown if start is None else SelectionSlider)(options=options, value=value)
    interact(picture, **controls)


def taken() -> str:
    """The rows since the last call, and what is shown now."""
    told = json.dumps({**rows, "shown": shown})
    for each in rows.values():
        each.clear()
    return told


def profile(name: str, ratio: str = "1", moves: int = 100) -> None:
    """Print where the time of a move goes, in this process, without browser or comm."""
    topic, experiment, control = name.split(".")
    made = labs.all()[topic](experiment)
    made.mode = "live"
    made._receive(None, {"type": "page", "page": {**vars(made._canvas.page), "ratio": float(ratio)}}, [])
    stops, start = numeric(made._trial)[control]
    with cProfile.Profile() as watched:
        for turn in range(moves):
            commands = [{"type": "set", "values": {control: stops[max(0, start - 1) + turn % 2]}}]
            made._receive(None, {"type": "commands", "client": "bench", "seq": turn, "commands": commands}, [])
    labs.check()
    print(f"{name} at pixel ratio {ratio}: {moves} moves, so 0.1 s here is 1 ms a move")
    for order in ("tottime", "cumulative"):
        pstats.Stats(watched).sort_stats(order).print_stats(15)
