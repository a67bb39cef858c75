"""Ten learners on one JupyterHub: memory of each, and how long a move of a slider waits, alone and all at once.

    python -m tests.bench.hub --users 10

It needs jupyterhub, psutil and labkit in this Python's environment, and configurable-http-proxy (npm) on the PATH.
The hub listens on 127.0.0.1 alone and ends with this script. Every learner has a server, a notebook that runs from top
to bottom with all panels, and a panel in live mode whose slider moves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_server.services.kernels.connection.base import deserialize_binary_message
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from tests.bench.pss import family, megabytes

ROOT = Path(__file__).parents[2]
CONFIG = """
c = get_config()
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_ip = "127.0.0.1"
c.JupyterHub.hub_port = {hub}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy}"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.spawner_class = "simple"
c.Spawner.cmd = [{python!r}, "-m", "jupyterhub.singleuser", "--allow-root"]
c.Spawner.environment = {{"PYTHONPATH": {root!r}, "OMP_NUM_THREADS": "1"}}
c.Spawner.start_timeout = c.Spawner.http_timeout = 300
c.JupyterHub.concurrent_spawn_limit = 0
c.JupyterHub.services = [{{"name": "bench", "api_token": {token!r}}}]
c.JupyterHub.load_roles = [{{"name": "bench", "services": ["bench"],
    "scopes": ["admin:users", "admin:servers", "access:servers"]}}]
"""
PANEL = "import labkit\nlab = labkit.labs.{}\nlab.mode = 'live'\nprint(lab.model_id)"


class Learner:
    """One user: a server, a kernel, and a panel whose slider can be moved."""

    def __init__(self, hub: str, token: str, name: str) -> None:
        self.hub, self.token, self.name = hub, token, name
        self.session, self.seq = uuid.uuid4().hex, 0
        self.http = AsyncHTTPClient(force_instance=True)

    async def ask(self, path: str, method: str = "GET", **body: Any) -> Any:
        """What the hub or the learner's server answers."""
        given = {"body": json.dumps(body)} if method == "POST" else {}
        headers = {"Authorization": f"token {self.token}"}
        request = HTTPRequest(self.hub + path, method, headers, request_timeout=300, **given)
        answer = await self.http.fetch(request)
        return json.loads(answer.body or b"null")

    async def start(self) -> None:
        """A server, and a kernel in it."""
        await self.ask(f"/hub/api/users/{self.name}", "POST")
        await self.ask(f"/hub/api/users/{self.name}/server", "POST")
        while not (await self.ask(f"/hub/api/users/{self.name}"))["servers"].get("", {}).get("ready"):
            await asyncio.sleep(0.5)
        kernel = await self.ask(f"/user/{self.name}/api/kernels", "POST", name="python3")
        where = f"{self.hub}/user/{self.name}/api/kernels/{kernel['id']}/channels?session_id={self.session}"
        request = HTTPRequest(where.replace("http", "ws", 1), headers={"Authorization": f"token {self.token}"})
        self.socket: WebSocketClientConnection = await websocket_connect(request)

    async def send(self, kind: str, content: dict[str, Any]) -> str:
        """A message to the kernel; its id."""
        name = uuid.uuid4().hex
        header = {"msg_id": name, "msg_type": kind, "session": self.session, "username": self.name, "version": "5.3"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        await self.socket.write_message(json.dumps(message | {"buffers": []}))
        return name

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """What the kernel says."""
        while True:
            heard = await asyncio.wait_for(self.socket.read_message(), 300)
            if heard is None:
                raise RuntimeError(f"{self.name}: the kernel's connection ended")
            yield json.loads(heard) if isinstance(heard, str) else deserialize_binary_message(heard)

    async def execute(self, code: str) -> str:
        """Run a cell to its end; what it printed."""
        request, printed = await self.send("execute_request", {"code": code, "silent": False, "allow_stdin": False}), ""
        async for message in self.messages():
            kind, content = message["header"]["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "stream" and content["name"] == "stdout":
                printed += content["text"]
            if kind == "error":
                raise RuntimeError(f"{self.name}: {content['ename']}: {content['evalue']}")
            if kind == "status" and content["execution_state"] == "idle":
                return printed
        raise AssertionError

    async def notebook(self, path: Path) -> float:
        """Run every cell of a notebook, as Run All does; the seconds."""
        began = time.perf_counter()
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                await self.execute(cell.source)
        return time.perf_counter() - began

    async def open(self, panel: str) -> None:
        """A panel in live mode, on a page that has told its size."""
        self.comm = (await self.execute(PANEL.format(panel))).split()[-1]
        page = {"width": 640, "ratio": 1.0, "font": 14.0, "text": "#212121", "background": "#ffffff"}
        await self.say({"type": "page", "page": page})
        await self.move("seed", 1)

    async def say(self, content: dict[str, Any]) -> None:
        await self.send("comm_msg", {"comm_id": self.comm, "data": {"method": "custom", "content": content}})

    async def move(self, control: str, value: float) -> float:
        """Move a slider; the seconds until the answer has arrived, picture included."""
        self.seq += 1
        began = time.perf_counter()
        commands = [{"type": "set", "values": {control: value}}]
        await self.say({"type": "commands", "client": self.name, "seq": self.seq, "commands": commands})
        async for message in self.messages():
            data = message["content"].get("data", {})
            page = data.get("state", {}).get("page", {}) if isinstance(data, dict) else {}
            if page.get("ack", {}).get(self.name) == self.seq:
                if page["error"]:
                    raise RuntimeError(f"{self.name}: {page['error']}")
                return time.perf_counter() - began
        raise AssertionError

    async def moves(self, control: str, count: int, think: float) -> list[float]:
        """Moves, and a pause after each."""
        found = []
        for at in range(count):
            found.append(await self.move(control, 2 + at % 30))
            await asyncio.sleep(think)
        return found


@contextlib.contextmanager
def running(folder: str) -> Iterator[tuple[str, str, psutil.Process]]:
    """A hub with its proxy: its address, a token that may do everything, and its process."""
    token, ports = secrets.token_hex(16), [free() for _ in range(3)]
    config = Path(folder, "jupyterhub_config.py")
    given = {"port": ports[0], "hub": ports[1], "proxy": ports[2], "token": token}
    config.write_text(CONFIG.format(python=sys.executable, root=str(ROOT), **given))
    with Path(folder, "hub.log").open("w") as log:
        command = [sys.executable, "-m", "jupyterhub", "-f", str(config)]
        hub = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=os.environ | {"HOME": folder})
    try:
        yield f"http://127.0.0.1:{ports[0]}", token, psutil.Process(hub.pid)
    finally:
        family = psutil.Process(hub.pid).children(recursive=True)
        hub.terminate()
        psutil.wait_procs(family, 20)
        for each in family:
            with contextlib.suppress(psutil.Error):
                each.kill()
        hub.wait()


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spread(values: list[float]) -> str:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return f"median {1e3 * statistics.median(values):.0f} ms, 95 % within {1e3 * cuts[18]:.0f} ms ({len(values)} moves)"


async def measure(options: argparse.Namespace, hub: str, token: str, process: psutil.Process) -> None:
    """Alone, then all at once; every figure is printed as it comes."""
    learners = [Learner(hub, token, f"learner{at}") for at in range(options.users)]
    await ready(learners[0])
    empty = megabytes(family(process))
    print(f"hub and proxy: {empty:.0f} MB")
    first = learners[0]
    await first.start()
    print(f"one learner, notebook {options.notebook}: {await first.notebook(options.notebook):.0f} s")
    await first.open(options.panel)
    for think in options.think:
        print(f"one learner, {think:g} s after each move: {spread(await first.moves('seed', options.moves, think))}")
    print(f"one learner's server and kernel: {megabytes(family(process)) - empty:.0f} MB")
    began = time.perf_counter()
    await asyncio.gather(*(each.start() for each in learners[1:]))
    print(f"{len(learners) - 1} more servers and kernels, started at once: {time.perf_counter() - began:.0f} s")
    seconds = await asyncio.gather(*(each.notebook(options.notebook) for each in learners[1:]))
    print(f"{len(learners) - 1} learners, the notebook at once: {min(seconds):.0f} … {max(seconds):.0f} s")
    await asyncio.gather(*(each.open(options.panel) for each in learners))
    for think in options.think:
        found = await asyncio.gather(*(each.moves("seed", options.moves, think) for each in learners))
        print(f"{len(learners)} learners, {think:g} s after each move: {spread(list(itertools.chain(*found)))}")
    share = (megabytes(family(process)) - empty) / len(learners)
    print(f"each of {len(learners)} learners: {share:.0f} MB (PSS), {megabytes(family(process)):.0f} MB in all")


async def ready(learner: Learner) -> None:
    for _ in range(120):
        with contextlib.suppress(Exception):
            await learner.ask("/hub/api/")
            return
        await asyncio.sleep(0.5)
    raise RuntimeError("the hub does not answer: is configurable-http-proxy on the PATH?")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hub", description=__doc__)
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--moves", type=int, default=30, help="moves of each learner's slider")
    parser.add_argument("--think", type=float, nargs="+", default=[1.0, 0.0], help="seconds after each move")
    parser.add_argument("--notebook", type=Path, default=ROOT / "notebooks/03_mean_or_token_sum.ipynb")
    parser.add_argument("--panel", default="accumulation('weights')")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder, running(folder) as (hub, token, process):
        try:
            asyncio.run(measure(options, hub, token, process))
        except BaseException:
            print(Path(folder, "hub.log").read_text()[-3000:], file=sys.stderr)
            raise


if __name__ == "__main__":
    main()
