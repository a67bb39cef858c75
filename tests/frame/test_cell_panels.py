"""Running a cell again replaces its panel: in a real kernel, nothing of ten runs is left."""

from __future__ import annotations

import json
from typing import Any

from jupyter_client.manager import start_new_kernel

CELL = """
from labkit.labs import Lab
from tests.made import Quick, Long
lab, other = Lab([Quick()]), Lab([Long()], steps=1000, pause=0.02)
lab.step()
other._command("step")
"""
COUNT = """
import gc, json, threading
from matplotlib.figure import Figure
from ipywidgets import Widget
gc.collect()
figures = sum(isinstance(o, Figure) and bool(o.axes) for o in gc.get_objects())
from ipywidgets.widgets import widget
threads = sum(t.name.startswith("labkit-") for t in threading.enumerate())
print(json.dumps({"figures": figures, "widgets": len(widget._instances), "threads": threads}))
"""


def execute(client: Any, code: str, cell: str) -> str:
    """Run a cell as JupyterLab does, with its id."""
    message = client.session.msg("execute_request", {"code": code, "silent": False, "store_history": True})
    message["metadata"] = {"cellId": cell}
    client.shell_channel.send(message)
    printed = ""
    while True:
        answer = client.get_iopub_msg(timeout=60)
        if answer["parent_header"].get("msg_id") != message["header"]["msg_id"]:
            continue
        assert answer["msg_type"] != "error", answer["content"]["traceback"]
        if answer["msg_type"] == "stream" and answer["content"]["name"] == "stdout":
            printed += answer["content"]["text"]
        if answer["msg_type"] == "status" and answer["content"]["execution_state"] == "idle":
            return printed


def test_ten_runs_of_a_cell_leave_one_panel_each() -> None:
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        execute(client, CELL + "first = lab", "one")
        after_one = json.loads(execute(client, COUNT, "count"))
        for _ in range(9):
            execute(client, CELL, "one")
        assert json.loads(execute(client, COUNT, "count")) == after_one
        assert after_one == {"figures": 2, "widgets": 4, "threads": 1}
        said = execute(client, "try: first.step()\nexcept Exception as e: print(e)", "two")
        assert "replaced by running its cell again" in said
        assert "12 cells" in execute(client, "lab.step(); print(lab.text)", "two")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
