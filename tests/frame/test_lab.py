"""The lab from code and from messages: what it shows, refuses, keeps and stops."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import labkit
from labkit.declare import parameters
from labkit.frame import cell_panels
from labkit.frame.style import LIGHT, Page
from labkit.labs import Lab, check, errors
from tests.made import Broken, Long, Quick
from tests.strategies import forbidden, settings_of


@pytest.fixture
def lab() -> Lab:
    cell_panels.page = LIGHT
    return Lab([Quick(), Long(), Broken()])


def page_says(lab: Lab, *commands: dict[str, Any]) -> None:
    """A message as the browser sends it."""
    lab._receive(lab, {"type": "commands", "client": "me", "seq": 1, "commands": list(commands)}, [])


def wait_for(true: Any) -> None:
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")


def state(lab: Lab) -> str:
    """All that the page is told, the picture apart."""
    return json.dumps([lab.spec, lab.page])


def test_predict_step_reset(lab: Lab) -> None:
    lab.set(rows=5, columns=3)
    lab.predict(12)
    assert (lab.result, lab.score) == (None, None)
    lab.step()
    assert (lab.result.product, lab.score) == (15, 0.2)
    assert lab.text == lab.page["sentence"] == "There are 15 cells." and lab.page["headline"] == "15 cells"
    assert "12 cells, it is 15 cells: 20 % off" in lab.page["score"]
    lab.reset()
    assert lab.result is None and lab.values["rows"] == 5
    lab.reset()
    assert lab.values["rows"] == 3


def test_nothing_tells_the_answer_before_step(lab: Lab) -> None:
    """The same state, to the letter and to the pixel, whatever the answer will be."""
    lab.set(rows=50, columns=64)
    lab.step()
    lab.set(rows=77)
    hidden, pixels = state(lab), lab._canvas.draw().copy()
    assert "4928" not in hidden and lab.page["tables"] == [] and lab.result is None
    lab.experiment.run = lambda **values: type(lab.experiment).run(**{**values, "twice": True})
    lab.redraw()
    assert state(lab) == hidden and np.array_equal(lab._canvas.draw(), pixels)


def test_nothing_runs_before_step(lab: Lab) -> None:
    lab.experiment.run = pytest.fail
    lab.set(rows=4)
    lab.predict(3)
    lab.reset()


def test_live_runs_at_every_move(lab: Lab) -> None:
    lab.mode = "live"
    lab.set(rows=7)
    assert lab.result.product == 28
    assert lab.page["primary"] == ""
    lab.reset()
    assert (lab.mode, lab.result) == ("predict", None)


def test_values_are_exact_to_the_last_bit(lab: Lab) -> None:
    lab.set(rows=0.1 + 0.2 + 1)
    lab.step()
    assert lab.result.product == (0.1 + 0.2 + 1) * 4 and lab.page["values"]["rows"] == 0.1 + 0.2 + 1


def test_an_impossible_value_raises_and_the_last_good_picture_stays(lab: Lab) -> None:
    lab.step()
    before = lab._canvas.draw().copy()
    with pytest.raises(labkit.LabError, match=r"rows = 900 is outside 1 … 100 rows: try 100"):
        lab.set(rows=900)
    assert "900" in lab.page["error"] and lab.page["rejected"] == {"rows": "900"}
    assert lab.result.product == 12 and np.array_equal(lab._canvas.draw(), before)
    lab.set(rows=100)
    assert lab.error == lab.page["error"] == ""


def test_an_impossible_combination_is_refused_by_step_and_its_remedy_is_true(lab: Lab) -> None:
    lab.set(rows=51, kind="empty")
    with pytest.raises(labkit.LabError, match="try at most 50"):
        lab.step()
    assert "at most 50" in lab.error
    lab.set(rows=50)
    lab.step()
    assert lab.error == "" and lab.result.product == 0


def test_the_page_shows_what_goes_wrong_and_check_raises_it(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    page_says(lab, {"type": "choose", "name": "broken"}, {"type": "set", "values": {"when": 2}}, {"type": "step"})
    assert "ZeroDivisionError: a fault of its own" in lab.page["error"]
    assert "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        check()
    errors.clear()


def test_a_refusal_is_no_fault_of_labkit(lab: Lab) -> None:
    page_says(lab, {"type": "set", "values": {"rows": None}})
    assert "rows = None is not a number" in lab.page["error"]
    check()


def test_a_picture_that_cannot_be_drawn_is_told_too(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quick, "draw", lambda *_: 1 / 0)
    page_says(lab, {"type": "step"})
    assert "ZeroDivisionError" in lab.page["error"] and len(errors) == 1
    errors.clear()


def test_each_experiment_keeps_its_values_and_its_answer(lab: Lab) -> None:
    lab.set(rows=9)
    lab.step()
    lab.choose("long")
    assert lab.values == {"steps": 5, "pause": 0.0} and lab.result is None
    lab.choose("quick")
    assert (lab.values["rows"], lab.result.product) == (9, 36)
    with pytest.raises(labkit.LabError, match="try quick, long, broken"):
        lab.choose("slow")


def test_commands_of_one_message_are_all_done_and_acknowledged(lab: Lab) -> None:
    page_says(lab, {"type": "set", "values": {"rows": 6}}, {"type": "predict", "number": 24}, {"type": "step"})
    assert lab.score == 0 and lab.page["ack"] == {"me": 1}


def test_a_command_that_fails_is_acknowledged_too(lab: Lab) -> None:
    page_says(lab, {"type": "set", "values": {"rows": -1}})
    assert lab.page["ack"] == {"me": 1}


def test_messages_of_another_thread_come_to_the_one_that_draws() -> None:
    """As JupyterLab's subshells do: eight moves from another thread, every draw on this one."""
    cell_panels.page = LIGHT
    drew: list[str] = []

    class Watched(Quick):
        name = "watched"

        def draw(self, canvas: Any, result: Any) -> None:
            drew.append(threading.current_thread().name)
            super().draw(canvas, result)

    async def cell() -> Lab:
        lab = Lab([Watched()])
        lab.mode = "live"
        for rows in range(1, 9):
            command = {"type": "set", "values": {"rows": rows}}
            thread = threading.Thread(target=page_says, args=(lab, command), name="subshell")
            thread.start()
            thread.join()
        await asyncio.sleep(0.2)
        return lab

    lab = asyncio.run(cell())
    assert lab.values["rows"] == 8 and len(drew) >= 9
    assert set(drew) == {threading.current_thread().name}


def test_a_long_run_from_code_ends_with_all_of_its_result(lab: Lab) -> None:
    lab.choose("long")
    lab.set(steps=30, pause=0.01)
    told: list[Any] = []
    lab.observe(lambda change: told.append(change["new"]["progress"]), "page")
    lab.step()
    assert len(lab.result.counts) == 30 and lab.page["progress"] is None
    assert any(0 < progress["fraction"] < 1 for progress in told if progress)
    assert any("s left" in progress["words"] for progress in told if progress)


def test_stop_acts_within_a_second_keeps_the_points_and_the_next_run_works() -> None:
    cell_panels.page = LIGHT

    async def cell() -> None:
        lab = Lab([Long()])
        lab.set(steps=1000, pause=0.02)
        page_says(lab, {"type": "step"})
        while lab.result is None or len(lab.result.counts) < 5:
            await asyncio.sleep(0.01)
        assert lab.page["progress"]["fraction"] < 1
        pressed = time.monotonic()
        page_says(lab, {"type": "stop"})
        assert lab.page["progress"] is None and time.monotonic() - pressed < 1
        kept = len(lab.result.counts)
        await asyncio.sleep(0.3)
        assert 5 <= len(lab.result.counts) == kept < 1000 and lab.score is None
        page_says(lab, {"type": "set", "values": {"steps": 3, "pause": 0}}, {"type": "step"})
        while not lab._trial.complete:
            await asyncio.sleep(0.01)
        assert len(lab.result.counts) == 3

    asyncio.run(asyncio.wait_for(cell(), 60))


def test_stop_reaches_a_run_while_a_cell_runs(lab: Lab) -> None:
    lab.choose("long")
    lab.set(steps=1000, pause=0.02)
    stopper = threading.Timer(0.3, lambda: lab._receive(lab, {"type": "commands", "commands": [{"type": "stop"}]}, []))
    stopper.start()
    lab.step()
    stopper.join()
    assert 0 < len(lab.result.counts) < 1000


def test_an_interrupt_leaves_a_lab_that_works(lab: Lab) -> None:
    def interrupted(**_: Any) -> Any:
        yield Long.run(steps=1).__next__()
        raise KeyboardInterrupt

    lab.choose("long")
    lab.experiment.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        lab.step()
    assert lab.page["progress"] is None and len(lab.result.counts) == 1
    del lab.experiment.run
    lab.step()
    assert len(lab.result.counts) == 5


def test_a_move_stops_a_run_of_the_page_and_hides_its_result(lab: Lab) -> None:
    page_says(lab, {"type": "choose", "name": "long"}, {"type": "set", "values": {"pause": 0.05, "steps": 100}})
    page_says(lab, {"type": "step"})
    wait_for(lambda: lab.result is not None)
    page_says(lab, {"type": "set", "values": {"steps": 50}})
    time.sleep(0.2)
    assert lab.result is None and lab.page["progress"] is None


def test_an_error_of_a_thread_stands_in_the_page(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(**_: Any) -> Any:
        yield Long.run(steps=1).__next__()
        raise OSError("disk is gone")

    lab.choose("long")
    lab.experiment.run = breaks
    page_says(lab, {"type": "step"})
    wait_for(lambda: "disk is gone" in lab.page["error"] and lab.page["progress"] is None)
    assert [str(error) for error in errors] == ["disk is gone"]
    errors.clear()


def test_styling_by_hand_travels_to_the_page(lab: Lab) -> None:
    seq = lab.frame["seq"]
    lab.figure.axes[0].set_title("of a teacher")
    lab.redraw()
    assert lab.frame["seq"] == seq + 1
    lab.step()
    assert lab.figure.axes[0].get_title() == "of a teacher"


def test_until_a_page_speaks_the_picture_comes_in_both_themes() -> None:
    lab = Lab([Quick()])
    assert lab.frame["themes"]["dark"][0]["colours"] != lab.frame["patches"][0]["colours"]
    page = {"width": 500, "ratio": 2, "font": 16, "text": "#eeeeee", "background": "#111111"}
    lab._receive(lab, {"type": "page", "page": page}, [])
    assert lab.frame["themes"] == {} and lab.frame["size"] == [1000, 600] and lab.frame["css"] == [500, 300]
    assert Lab([Quick()])._canvas.page == Page(**page)


def test_a_page_that_lost_its_picture_gets_the_whole(lab: Lab) -> None:
    lab.step()
    assert lab.frame["base"] is not None
    lab._receive(lab, {"type": "whole"}, [])
    assert lab.frame["base"] is None


def test_without_a_kernel_picture_and_sentence_remain(lab: Lab) -> None:
    lab.step()
    bundle, _ = lab._repr_mimebundle_()
    assert "There are 12 cells." in bundle["text/html"] and "<img alt=" in bundle["text/html"]
    assert bundle["image/png"] and bundle["text/plain"] == "There are 12 cells."


def test_a_closed_lab_says_what_happened(lab: Lab) -> None:
    figure = lab.figure
    lab.close()
    lab.close()
    for use in (
        lab.step,
        lab.redraw,
        lambda: lab.text,
        lambda: lab.figure,
        lambda: lab.values,
        lambda: lab.set(rows=3),
    ):
        with pytest.raises(labkit.LabError, match="replaced by running its cell again"):
            use()
    assert figure.axes == []
    page_says(lab, {"type": "step"})


def test_closing_stops_a_run(lab: Lab) -> None:
    lab.choose("long")
    lab.set(steps=1000, pause=0.05)
    page_says(lab, {"type": "step"})
    wait_for(lambda: any(t.name.startswith("labkit-") for t in threading.enumerate()))
    lab.close()
    wait_for(lambda: not any(t.name.startswith("labkit-") for t in threading.enumerate()))


beyond = st.sampled_from(list(parameters(Quick.run).values())).flatmap(
    lambda parameter: st.fixed_dictionaries({parameter.name: forbidden(parameter)})
)
moves = st.one_of(
    beyond.map(lambda values: ("set", values)),
    settings_of(Quick.run).map(lambda values: ("set", values)),
    st.tuples(st.just("predict"), st.floats(-1e9, 1e9)),
    st.sampled_from([("step", None), ("reset", None), ("mode", "live"), ("mode", "predict"), ("redraw", None)]),
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(moves, max_size=8))
def test_any_sequence_of_moves_leaves_a_state_that_holds_together(moves: list[tuple[str, Any]]) -> None:
    cell_panels.page = Page(width=200)
    lab = Lab([Quick()])
    for name, given_ in moves:
        try:
            if name == "mode":
                lab.mode = given_
            elif isinstance(given_, dict):
                getattr(lab, name)(**given_)
            else:
                getattr(lab, name)(*([] if given_ is None else [given_]))
        except labkit.LabError as error:
            assert lab.page["error"] == str(error) != ""
        assert lab.page["values"] == lab.values and set(lab.values) == set(parameters(Quick.run))
        assert (lab.page["tables"] == []) == (lab.result is None)
        assert lab.score is None or (lab.result is not None and lab.prediction is not None)
        if lab.result is not None and not lab.error:
            assert lab.result == Quick.run(**lab.values)


def test_a_second_reset_brings_back_the_values_that_the_panel_was_made_with() -> None:
    lab = labkit.labs.roofline("ceiling", intensity=4)
    lab.set(intensity=8)
    lab.reset()
    assert lab.values["intensity"] == 4
