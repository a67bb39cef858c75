"""The plan of one optimizer step: how many sequences and tokens it consumes, and on how many devices.

    global batch = microbatch × data-parallel replicas × accumulation steps
    tokens per update = sequence length × global batch

Tensor-, pipeline- and context-parallel ranks share their sequences. Together they are one replica, and they never
multiply the batch: replicas = world / (tp × pp × cp).
Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.declare import Range, quantity
from labkit.errors import LabError


@dataclass(frozen=True)
class Plan:
    """How the work of one optimizer step is divided."""

    microbatch: int = quantity("b, one forward pass of one replica", "sequences")
    replicas: int = quantity("D, data-parallel replicas, each with sequences of its own")
    accumulation: int = quantity("K, what each replica accumulates for one optimizer step", "microbatches")
    sequence_length: int = quantity("S, length of a sequence", "tokens")
    world: int = quantity("all of them, tp × pp × cp for each replica", "devices")
    tp: int = quantity("tensor-parallel ranks: they share layers")
    pp: int = quantity("pipeline-parallel ranks: they share the depth")
    cp: int = quantity("context-parallel ranks: they share each sequence")

    def __str__(self) -> str:
        return f"({self.microbatch}, {self.replicas}, {self.accumulation})"

    @property
    def global_batch(self) -> int:
        """Sequences of one optimizer step: b × D × K."""
        return self.microbatch * self.replicas * self.accumulation

    @property
    def tokens_per_update(self) -> int:
        """Token positions of one optimizer step: S × b × D × K."""
        return self.sequence_length * self.global_batch

    def updates(self, sequences: int) -> int:
        """Full optimizer steps that so many sequences make."""
        return _whole("sequences", sequences, 0) // self.global_batch

    def left(self, sequences: int) -> int:
        """Sequences that fill no optimizer step: a tail window, or dropped."""
        return _whole("sequences", sequences, 0) % self.global_batch

    def samples_after(self, step: int) -> int:
        """Sequences seen after so many optimizer steps, repetitions included."""
        return _whole("step", step, 0) * self.global_batch

    def tokens_after(self, step: int) -> int:
        """Token positions seen after so many optimizer steps, repetitions included."""
        return _whole("step", step, 0) * self.tokens_per_update


def plan(
    *,
    microbatch: int = 1,
    replicas: int | None = None,
    accumulation: int = 1,
    sequence_length: int = 4096,
    world: int | None = None,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
) -> Plan:
    """The plan of one optimizer step, from the replicas or from the world of devices that makes them.

    >>> plan(microbatch=8, world=64, tp=4, pp=2, accumulation=4).global_batch
    256
    >>> plan(microbatch=4, replicas=128, accumulation=8, sequence_length=4096).tokens_per_update
    16777216

    Whole numbers from 1 on. With neither `world` nor `replicas` there is one replica. Raises LabError for a world
    that tp × pp × cp does not divide, and for replicas that contradict the world.
    """
    sizes = {"microbatch": microbatch, "accumulation": accumulation, "sequence_length": sequence_length}
    whole = {name: _whole(name, value) for name, value in {**sizes, "tp": tp, "pp": pp, "cp": cp}.items()}
    devices = whole["tp"] * whole["pp"] * whole["cp"]
    if world is None:
        D = 1 if replicas is None else _whole("replicas", replicas)
    else:
        D = _replicas(_whole("world", world), devices)
        if replicas is not None and _whole("replicas", replicas) != D:
            raise LabError(f"replicas = {replicas} is not world / (tp × pp × cp) = {D}: try {D}")
    return Plan(replicas=D, world=D * devices, **whole)


def _whole(name: str, value: object, low: int = 1) -> int:
    """A whole number from `low` on."""
    return int(Range(low, 10**12).check(name.replace("_", " "), value, int))


def _replicas(world: int, devices: int) -> int:
    """How many replicas of so many devices the world makes."""
    if world % devices:
        below = world // devices * devices
        near = f"{below} and {below + devices} are: try {below}" if below else f"{devices} is: try {devices}"
        raise LabError(f"world = {world} is no multiple of tp × pp × cp = {devices}, but {near}")
    return world // devices
