"""The process group of the ranks, and a call on it: the part that needs torch."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from labkit.errors import LabError

LOOPBACK = {"linux": "lo", "darwin": "lo0"}
_device = ""


def join(rank: int, world: int, folder: str, device: str) -> None:
    """Meet the other ranks over a file; talk over 127.0.0.1 alone, or over NCCL where each rank has a GPU."""
    stay_local()
    backend = set_device(rank, world, device)
    store = dist.FileStore(os.path.join(folder, "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def stay_local() -> None:
    """Bind gloo to 127.0.0.1: by default it listens on the address of the machine's name, in later groups too."""
    if sys.platform in LOOPBACK:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]


def set_device(rank: int, world: int, device: str) -> str:
    """Choose the GPU of a rank, if one is asked for; return the matching backend."""
    global _device
    if device == "cpu":
        return "gloo"
    count = torch.cuda.device_count()
    if not count:
        raise LabError(f"device = {device!r}, and there is no GPU: try 'cpu'")
    _device = f"cuda:{rank % count}"
    torch.cuda.set_device(_device)
    return "cpu:gloo,cuda:nccl" if count >= world else "gloo"  # NCCL refuses two ranks on one GPU


def call(function: Callable[..., Any], rank: int, world: int, values: dict[str, Any]) -> Any:
    """Call the function from the same state every time, whatever earlier calls left behind."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
    return function(rank, world, **(values | {"device": _device} if _device else values))
