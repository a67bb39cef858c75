"""A real kernel, as JupyterLab starts, interrupts, restarts and kills it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from jupyter_client import BlockingKernelClient, KernelManager

from tests.lab_in_browser import ROOT
from tests.workers.living import PATIENCE, below


class Kernel:
    """A kernel whose temporary folder is its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manager = KernelManager(kernel_name="python3", shutdown_wait_time=2)
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path})
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    @property
    def processes(self) -> list[psutil.Process]:
        """What the kernel has started, and itself."""
        return [psutil.Process(self.pid), *below(self.pid)]

    @property
    def folders(self) -> list[str]:
        """What the kernel has in its temporary folder, but for the cache that torch makes for all its programs."""
        return sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("torchinductor_"))

    def begin(self, code: str) -> str:
        """Run a cell without waiting for it."""
        return str(self.client.execute(code))

    def outcome(self, cell: str) -> str:
        """What a cell printed, or the error that it ended with, without its colours."""
        said = ""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                message: dict[str, Any] = self.client.get_iopub_msg(timeout=1)
                if message["parent_header"].get("msg_id") != cell:
                    continue
                content = message["content"]
                if message["msg_type"] == "stream" and content["name"] == "stdout":
                    said += content["text"]
                elif message["msg_type"] == "error":
                    said += f"{content['ename']}: {content['evalue']}"
                elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                    return said.strip()
        raise AssertionError(f"no answer: {said}")

    def run(self, code: str) -> str:
        return self.outcome(self.begin(code))

    def interrupt(self) -> None:
        """What the button does: SIGINT to the process group of the kernel."""
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        """What the menu does: a message; who does not heed it is killed, with its process group."""
        self.manager.restart_kernel()
        self.client.wait_for_ready(timeout=PATIENCE)

    def kill(self) -> None:
        """The kernel alone, as the system does that runs out of memory."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@contextlib.contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    opened = Kernel(folder)
    try:
        yield opened
    finally:
        opened.close()
