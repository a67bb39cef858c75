"""FSDP2: parameters, gradients and optimizer state in shards, and how accumulation changes the collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit import workers
from labkit.data_parallel.compare import Ranks
from labkit.declare import Range, Switch, quantity
from labkit.fit import distance, flat, gradient, gradient_of
from labkit.tolerance import depth, tolerance

LAYERS, WIDTH = 4, 16


class Counted(TorchDispatchMode):
    """Counts every operation by name while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def stack(seed: int) -> nn.Sequential:
    """A few small layers, float64, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(LAYERS)))


def examples(ranks: int, K: int, seed: int) -> Tensor:
    """Two examples for every microbatch of every rank, [W, K, 2, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ranks, K, 2, WIDTH, generator=generator, dtype=torch.float64)


def shard(model: nn.Sequential, world: int) -> Any:
    """Every layer in shards over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # takes a second to load

    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run_sharded(
    rank: int, world: int, *, K: int, last_only: bool, gathered: bool, seed: int
) -> tuple[int, int, int, list[float]]:
    """Reduce-scatters, all-gathers, numbers in this rank's shards, and the whole gradient."""
    model, x = shard(stack(seed), world), examples(world, K, seed)
    if gathered:
        model.set_reshard_after_forward(False)
    with Counted() as counter:
        for at in range(K):
            model.set_requires_gradient_sync(at == K - 1 or not last_only)
            model.set_reshard_after_backward(at == K - 1 or not gathered)
            loss = model(x[rank, at]).square().sum() * world / (2 * world * K)
            loss.backward()
    shards = [p.grad for p in model.parameters()]
    mine = sum(each.to_local().numel() for each in shards)
    whole: list[float] = flat(each.full_tensor() for each in shards).tolist()
    return counter.calls["_reduce_scatter_base_"], counter.calls["_allgather_base_"], mine, whole


@dataclass(frozen=True)
class Sharded:
    """One optimizer step of FSDP2."""

    reduce_scatters: int = quantity("reduce-scatters of one optimizer step, on each rank")
    all_gathers: int = quantity("all-gathers of one optimizer step, on each rank")
    layers: int = quantity("layers, each sharded by itself")
    accumulation_steps: int = quantity("K", "microbatches")
    shard: int = quantity("numbers of the gradient that each rank keeps at the end")
    parameters: int = quantity("numbers in the whole gradient")
    relative_error: float = quantity("‖g − G‖ / ‖G‖ of the whole gradient")
    tolerance: float = quantity("relative error that rounding alone explains")


def fsdp(
    *,
    last_only: Annotated[bool, Switch(help="on: gradients are synchronised after the last microbatch alone")] = True,
    gathered: Annotated[bool, Switch(help="on: whole layers stay gathered until the last microbatch is done")] = False,
    ranks: Ranks = 2,
    accumulation_steps: Annotated[
        int, Range(1, 6, unit="microbatches", help="K, microbatches of each rank in one optimizer step")
    ] = 3,
    seed: Annotated[int, Range(0, 9999, help="draws the weights and the examples")] = 0,
) -> Sharded:
    """One optimizer step with parameters in shards: collectives counted, and the gradient against the whole batch.

    >>> step = fsdp()
    >>> step.reduce_scatters, step.all_gathers, fsdp(last_only=False).reduce_scatters, fsdp(gathered=True).all_gathers
    (4, 24, 12, 4)

    torch.distributed.fsdp.fully_shard on the CPU, float64. A rank that does not synchronise keeps whole gradients until
    it does: fewer messages cost that memory.
    """
    run = "labkit.data_parallel.sharding:run_sharded"
    answers = workers.run(run, ranks, K=accumulation_steps, last_only=last_only, gathered=gathered, seed=seed)
    scatters, gathers, mine, whole = answers[0]
    model, x = stack(seed), examples(ranks, accumulation_steps, seed).flatten(0, 2)
    (model(x).square().sum() / len(x)).backward()
    right, sharded_gradient = flat(gradient(model)), torch.tensor(whole, dtype=torch.float64)
    terms = [_one(model, each, len(x)) for each in x]
    bound = tolerance(terms, count=len(x), depth=depth(model), dtype=torch.float64, result=float(right.norm()))
    error = distance(sharded_gradient, right).relative_error
    return Sharded(scatters, gathers, LAYERS, accumulation_steps, mine, len(right), error, bound.value)


def _one(model: nn.Module, x: Tensor, B: int) -> Tensor:
    """The contribution of one example to the gradient."""
    return gradient_of(model, model(x[None]).square().sum() / B)
