"""What the ranks do in the tests of the pool; they can import this file."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist


def sentinel(rank: int, world: int, **values: Any) -> list[Any]:
    """The rank, the size of the world, and what was sent."""
    return [rank, world, values]


def everyone(rank: int, world: int) -> list[int]:
    """What every rank says, by an object collective."""
    answers: list[Any] = [None] * world
    dist.all_gather_object(answers, rank * 10)
    return answers


def wasted(rank: int, world: int) -> int:
    """A hundred megabytes in blocks of two, all held by a cycle."""
    ring: list[Any] = [torch.ones(2**18, dtype=torch.float64) for _ in range(50)]
    ring.append(ring)
    return len(ring)


def fault(rank: int, world: int, who: int, how: str) -> float:
    """One rank meets its fate, the others wait for it in a collective."""
    if rank == who:
        FATES[how]()
    term = torch.ones(1)
    dist.all_reduce(term)
    return term.item()


def _raises() -> None:
    raise ValueError("weights are gone")


def _memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**33, resource.RLIM_INFINITY))
    torch.zeros(2**34)


FATES = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "realtime": lambda: os.kill(os.getpid(), 40),
    "aborted": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "os._exit": lambda: os._exit(7),
    "sys.exit": lambda: sys.exit(3),
    "raises": _raises,
    "interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    "memory": _memory,
    "hangs": lambda: time.sleep(10_000),
    "spins": lambda: [None for _ in iter(int, 1)],
    "in C": lambda: re.match(r"(a+)+$", "a" * 80 + "b"),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "nothing": lambda: None,
}


def echo_first(rank: int, world: int) -> None:
    """Rank 0 complains of its connection before rank 1 has said what went wrong."""
    if rank == 0:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4242")
    time.sleep(0.5)
    raise ValueError("the cause")


def only_echo(rank: int, world: int) -> None:
    """A connection breaks, and nobody knows why."""
    if rank == 0:
        raise ConnectionResetError("a server far away")


def death_after_answer(rank: int, world: int) -> None:
    """Rank 1 answers, and dies while rank 0 works."""
    import threading

    if rank == 1:
        threading.Timer(0.3, lambda: os._exit(9)).start()
    else:
        time.sleep(10_000)


def skips(rank: int, world: int) -> None:
    """Rank 0 leaves a collective out."""
    if rank == 1:
        dist.all_reduce(torch.ones(1))


def unsendable(rank: int, world: int) -> Any:
    return lambda: None


class Unreadable:
    """Can be packed, and not unpacked."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def unreadable(rank: int, world: int) -> Any:
    return Unreadable()


def bulk(rank: int, world: int, size: int) -> bytes:
    return bytes(size)


def size(rank: int, world: int, data: bytes) -> int:
    return len(data)


def drawn(rank: int, world: int) -> list[float]:
    """Random numbers, after which everything that a call may leave behind is left behind."""
    values = [torch.rand(1).item(), random.random(), float(torch.get_num_threads()), float(torch.is_grad_enabled())]
    values.append(torch.ones(1).element_size())
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    return values


def nested(rank: int, world: int) -> Any:
    from labkit import workers

    return workers.run("labkit.workers:total", 2, value=1)


def listening(rank: int, world: int) -> list[str]:
    """Where this rank listens, of a group made later too."""
    import psutil

    dist.all_reduce(torch.ones(1), group=dist.new_group())
    return [each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"]


def folder(rank: int, world: int) -> str:
    """The folder in which ranks meet."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return os.path.dirname(store.path)


def state(rank: int, world: int) -> dict[str, Any]:
    """Threads and open files of this rank."""
    import psutil

    me = psutil.Process()
    return {"threads": me.num_threads(), "files": me.num_fds(), "memory": me.memory_info().rss}


def ddp_step(rank: int, world: int) -> float:
    """A step of DistributedDataParallel, which loads what it needs."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.ones(4, 256)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()
