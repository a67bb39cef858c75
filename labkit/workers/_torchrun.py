"""The same call on the ranks that torchrun has started: here every rank runs the notebook's code."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labkit.declare import Choice, Range
from labkit.errors import LabError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

FAULT = "labkit/fault"


def launched() -> bool:
    """Whether torchrun has started this process (Source: torch.distributed.is_torchelastic_launched)."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run(name: str, ranks: int, timeout: float, device: str, values: dict[str, Any]) -> list[Any]:
    """Call the function as this rank, and return what every rank returned, the same list on every rank."""
    from labkit.workers._names import load

    world = int(os.environ["WORLD_SIZE"])
    if ranks != world:
        raise LabError(f"ranks = {ranks}, and torchrun started {world}: try {world}")
    seconds = Range(0.01, 86400, unit="s").check("timeout", timeout, float)
    store = _joined(Choice(("cpu", "cuda")).check("device", device, str), seconds)
    try:
        return _everyone(load(name), values if device == "cpu" else {**values, "device": device})
    except Exception as error:
        raise _cause(store, error, seconds) from error


def _joined(device: str, seconds: float) -> Store:
    """Join the group once; the store outlives its ranks, since torchrun itself keeps it."""
    import datetime

    import torch.distributed as dist

    from labkit.workers import _group

    limit = datetime.timedelta(seconds=seconds)
    if not dist.is_initialized():
        if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
            _group.stay_local()
        local, beside = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        dist.init_process_group(_group.set_device(local, beside, device), timeout=limit)
        atexit.register(_leave)
    dist.distributed_c10d._set_pg_timeout(limit)
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _leave() -> None:
    """Let gloo's threads end before the process does; otherwise they may abort it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _everyone(function: Callable[..., Any], values: dict[str, Any]) -> list[Any]:
    import torch.distributed as dist

    from labkit.workers import _group

    rank, world = dist.get_rank(), dist.get_world_size()
    answers: list[Any] = [None] * world
    dist.all_gather_object(answers, _group.call(function, rank, world, values))
    return answers


def _cause(store: Store, error: Exception, seconds: float) -> LabError:
    """The first fault recorded by a rank; a broken connection or a timeout is only its echo."""
    from labkit.workers._rank import outcome_of

    rank, (kind, sentence, _) = os.environ["RANK"], outcome_of(error)
    waited = "Timed out waiting" in sentence
    if not waited and kind != "lost":
        return LabError(store.compare_set(FAULT, "", f"rank {rank}: {sentence}").decode())
    if store.check([FAULT]):
        return LabError(store.get(FAULT).decode())
    if waited:
        return LabError(
            f"rank {rank} waited {seconds:g} s for another rank: "
            "try to let every rank take part in each collective, or a longer timeout"
        )
    return LabError(f"rank {rank} lost a rank that ended: try to find which in torchrun's report")
