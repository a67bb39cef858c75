"""What holds for every experiment of every lab."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import labkit
from labkit import workers
from labkit.declare import parameters
from labkit.device import Spread
from labkit.frame import cell_panels
from labkit.frame.experiment import Experiment
from labkit.frame.style import Page
from labkit.frame.trial import Trial
from labkit.labs import Lab
from labkit.listing import sources
from labkit.throughput import compared
from tests.frame import driven
from tests.made import Quick
from tests.strategies import forbidden, settings_of
from tests.virtual import set_clock

KINDS = {f"{topic}.{kind.name}": kind for topic in labkit.labs.all() for kind in labkit.labs.experiments(topic)}
SLOW: dict[str, dict[str, Any]] = {  # ends that take seconds: driven once
    "audit.traces": {"updates": 32},
    "casebook.overview": {"within": 10},
    "pipeline.ways": {"microbatches": 8, "ranks": 4},
    "pipeline.timeline": {"forward": 40},
    "pipeline.bubble": {"forward": 20, "ranks": 4, "largest": 16},
    "pipeline.cut": {"batch": 512, "ranks": 4},
}
ELSEWHERE: dict[str, dict[str, Any]] = {  # ends that take longer, and are run in the tests of their topic
    "casebook.overview": {"family": "all"},
    "noise.batches": {"seeds": 32},
    "noise.rates": {"seeds": 32},
}
SMALLEST = (  # minutes for all ends: their smallest alone
    *("accumulation.trainings", "cadence.translated", "normalization.targets", "casebook.case"),
    *("roofline.machine", "roofline.cache", "roofline.precision"),
)
QUICK = [name for name in KINDS if name not in (*SLOW, *ELSEWHERE, *SMALLEST, "clipping.overflow")]

every = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(autouse=True)
def small_page(monkeypatch: pytest.MonkeyPatch) -> None:
    cell_panels.page = Page(width=320)
    monkeypatch.setattr(compared, "STEPS", 1)
    set_clock(monkeypatch, 2.0**-16, 2.0**-19, 2.0**-17)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    workers.close()


def opened(name: str) -> Lab:
    topic, _, experiment = name.partition(".")
    return labkit.labs.all()[topic](experiment)


def told(lab: Lab) -> str:
    """All that the page says of a result."""
    return json.dumps([lab.page[part] for part in ("headline", "sentence", "tables")])


def timed(lab: Lab) -> bool:
    """Whether a clock was read: a result with a spread, or a time or a rate that is not modelled."""
    fields = dataclasses.fields(lab.result)
    units = {field.metadata["unit"] for field in fields} | {"s" for f in fields if spread(getattr(lab.result, f.name))}
    rates = any(unit in ("s", "ms") or unit.endswith("/s") for unit in units)
    return rates and not lab.experiment.note.startswith("Modelled")


def spread(value: Any) -> bool:
    if dataclasses.is_dataclass(value):
        return isinstance(value, Spread) or any(spread(each) for each in vars(value).values())
    return isinstance(value, (tuple, list)) and any(map(spread, value))


@every
def test_class_name_and_function_are_one(name: str) -> None:
    kind, (topic, _, word) = KINDS[name], name.partition(".")
    run = inspect.unwrap(kind.run)
    assert kind.name == word and kind.__name__ == word.title().replace("_", "") and run.__name__ in (word, f"{word}s")
    assert kind.title and kind.question.endswith("?") and kind.note.endswith(".")
    assert run.__module__.split(".")[1] in (topic, "acceptance")


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"casebook.case"}))  # it shows the loops of all cases
def test_the_source_on_the_page_is_the_function_that_runs(name: str) -> None:
    experiment = KINDS[name]()
    functions = [inspect.unwrap(each) for each in (*experiment.shown, experiment.run)]
    code = experiment.source()
    assert all(sources(each) in code for each in functions) and code.endswith(sources(functions[-1]))
    lines = inspect.getsource(functions[-1]).rstrip().splitlines()
    assert code.endswith("\n".join(lines[-2:])) and ">>>" not in code, "the code itself, and no example that answers"


@every
def test_every_control_explains_itself(name: str) -> None:
    declared = parameters(KINDS[name].run)
    assert declared.keys() == inspect.signature(KINDS[name].run).parameters.keys()
    assert declared and all(p.rule.help and p.check(p.default) == p.default for p in declared.values())


@every
@settings(max_examples=30)
@given(data=st.data())
def test_what_is_declared_is_taken_and_the_rest_is_refused_and_changes_nothing(name: str, data: st.DataObject) -> None:
    trial, allowed = Trial(KINDS[name]()), data.draw(settings_of(KINDS[name].run))
    trial.set(allowed)
    assert trial.values == trial.values | allowed
    before, parameter = dict(trial.values), data.draw(st.sampled_from(list(trial.parameters.values())))
    for wrong in ({parameter.name: data.draw(forbidden(parameter))}, {"nothing": 1}):
        with pytest.raises(labkit.LabError, match=f"{parameter.label}|nothing.*try") as refused:
            trial.set({**before, **wrong})
        assert trial.values == before and trial.error == str(refused.value) and "try " in trial.error


@every
def test_every_extreme_is_drawn_or_refused_in_one_sentence_whose_remedy_is_true(name: str) -> None:
    lab = opened(name)
    assert lab.page["headline"] == lab.experiment.title and lab.page["tables"] == [] and lab.result is None
    slow, results = SLOW.get(name, {}), []
    corners = driven.extremes(lab.experiment.run, slow | ELSEWHERE.get(name, {}))
    corners = corners[: 1 if name in SMALLEST else None]
    corners += [{**corners[0], control: end} for control, end in slow.items()]
    corners.sort(key=lambda values: values.get("ranks", 0))  # another number starts new ranks
    lab.predict(2)
    for values in corners:
        driven.drive(lab, values)
        check_tables(lab)
        assert (lab.score is None) == bool(results), "the first alone was predicted"
        results.append(told(lab))
    if not timed(lab):
        driven.drive(lab, corners[0])
        assert told(lab) == results[0], "the same values give the same result, whatever ran in between"


def check_tables(lab: Lab) -> None:
    """Every column has a head, every row all columns, every number of its own a meaning."""
    for table in lab.page["tables"]:
        columns = table["columns"]
        assert table["rows"] and all(len(row) == len(columns) for row in table["rows"])
        if columns == ["", "value", "unit", "meaning"]:
            assert all(label and meaning for label, _, _, meaning in table["rows"]), table


@pytest.mark.parametrize("name", QUICK)
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_setting_is_drawn_or_refused(name: str, data: st.DataObject) -> None:
    driven.drive_anywhere(opened(name), data)


@pytest.mark.parametrize(
    ("word", "parts", "sentence"),
    [
        ("Product", {}, "the experiment Product lacks run, title, question, layout, draw, answer, headline, describe"),
        ("Product", vars(Quick) | {"draw": Experiment.draw}, "the experiment Product lacks draw: try the example"),
        ("Products", {**vars(Quick), "name": "product"}, "the experiment Products runs 'product': try class Product"),
    ],
)
def test_an_incomplete_experiment_is_refused_when_it_is_made(word: str, parts: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        type(word, (Experiment,), dict(parts))


PAIRS = {"a": (0, 1), "b": (0, 1), "c": "xyz", "d": (0.5, 2), "e": (False, True), "f": range(5)}


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5).map(range), min_size=2))
@example(PAIRS)
def test_any_two_values_of_two_controls_occur_together(values: Any) -> None:
    settings = list(driven.pairwise(values))
    for one, other in itertools.combinations(values, 2):
        pairs = {(setting[one], setting[other]) for setting in settings}
        assert pairs == set(itertools.product(values[one], values[other]))
    assert settings == list(driven.pairwise(values)) and all(list(setting) == list(values) for setting in settings)
    least = sorted(map(len, values.values()))[-2:]
    assert least[0] * least[1] <= len(settings) <= 2 * least[0] * least[1] + len(values)
