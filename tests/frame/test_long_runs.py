"""Everything that runs for long, in all labs: Stop acts in the middle, what was computed stays, the next run works."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from labkit import labs
from labkit.frame.experiment import Experiment
from labkit.labs import Lab

LONG = [
    pytest.param(kind, id=f"{topic}-{kind.name}")
    for topic in labs.all()
    for kind in labs.experiments(topic)
    if inspect.isgeneratorfunction(kind.run)
]
HELD = 2  # results after which a run is held until it may go on


class Counted:
    """A long run that notes its results, and is held after two of them."""

    def __init__(self, run: Callable[..., Iterator[Any]]) -> None:
        self.run, self.results, self.go = run, list[Any](), threading.Event()
        functools.update_wrapper(self, run)

    def __call__(self, **values: Any) -> Iterator[Any]:
        for result in self.run(**values):
            self.results.append(result)
            yield result
            if len(self.results) == HELD:
                assert self.go.wait(60)


async def until(true: Callable[[], Any]) -> None:
    for _ in range(6000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


def press(lab: Lab, button: str) -> None:
    """As the page does."""
    lab._receive(lab, {"type": "commands", "client": "me", "seq": 1, "commands": [{"type": button}]}, [])


def threads(lab: Lab) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == f"labkit-{lab.uid[:6]}"]


async def stopped(kind: type[Experiment[Any]]) -> None:
    """Twice the same panel: Step, Stop in the middle, and what stands then."""
    lab = Lab([kind()])
    for _ in range(2):
        run: Any = Counted(kind.run)
        lab.experiment.run = run
        press(lab, "step")
        await until(lambda run=run: len(run.results) == HELD and lab.result in run.results)
        press(lab, "stop")
        kept = lab.result
        assert lab.page["progress"] is None and lab.page["headline"] and lab.text and not lab.error
        run.go.set()
        await until(lambda: not threads(lab))
        await asyncio.sleep(0.05)
        assert len(run.results) <= HELD + 1, "at most the result that was under way is still computed"
        assert lab.result is kept and kept.progress < 1 and lab.score is None
    lab.close()


@pytest.mark.parametrize("kind", LONG)
def test_stop_acts_in_the_middle_and_the_next_run_works(kind: type[Experiment[Any]]) -> None:
    asyncio.run(asyncio.wait_for(stopped(kind), 120))


@pytest.mark.parametrize("kind", LONG)
def test_progress_grows_and_ends_at_one(kind: type[Experiment[Any]]) -> None:
    first = [result.progress for _, result in zip(range(HELD + 1), kind.run(), strict=False)]
    assert all(0 <= each <= 1 for each in first) and first == sorted(set(first))


def test_there_are_some() -> None:
    assert {"memory-kept", "roofline-machine", "accumulation-trainings"} <= {each.id for each in LONG}


@pytest.mark.parametrize(
    ("topic", "experiment", "values"),
    [
        ("accumulation", "trainings", {"updates": 10, "accumulation_steps": 2}),
        ("cadence", "translated", {"samples": 2048, "factor": 2}),
        ("normalization", "targets", {"draws": 16}),
    ],
)
def test_a_second_look_is_the_first_ones_result(topic: str, experiment: str, values: dict[str, Any]) -> None:
    first, second = (labs.all()[topic](experiment, **values) for _ in range(2))
    first.step()
    second.step()
    assert second.result is first.result and first.result.progress == 1
    second.set(seed=9)
    second.step()
    assert second.result is not first.result
