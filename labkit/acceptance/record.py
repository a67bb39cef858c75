"""The result of an acceptance test: four gates in their order, a verdict, and all that is needed to repeat it."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from labkit.declare import quantity

GATES = ("invariant", "equality", "traces", "throughput")
PASSED, FAILED, UNSURE, NOT_RUN = "passed", "failed", "cannot tell", "not run"
MARKS = {PASSED: "✓", FAILED: "✗", UNSURE: "?", NOT_RUN: "–"}
ADOPT, REJECT = "adopt", "reject"


@dataclass(frozen=True)
class Gate:
    """One of the four questions, and its outcome."""

    name: str = quantity("invariant, equality, traces or throughput")
    outcome: str = quantity("passed, failed, cannot tell or not run")
    said: str = quantity("why, with the numbers")


@dataclass(frozen=True)
class Side:
    """One of the two steps, and everything measured of it."""

    microbatches: tuple[int, ...] = quantity("rows of each microbatch; 0 where it has no rows", "sequences")
    counts: tuple[int, ...] = quantity("valid tokens of each microbatch", "tokens")
    accumulation: int = quantity("K, microbatches of one update")
    denominator: float = quantity("what the loss sum is divided by, fitted; NaN where weights differ", "tokens")
    parameters: int = quantity("numbers that are trained")
    dtype: str = quantity("precision of the parameters")
    autocast: str = quantity("precision that autocast computes in; empty without it")
    device: str = quantity("where the parameters lie")
    random_layers: tuple[str, ...] = quantity("layers that draw random numbers")
    batch_layers: tuple[str, ...] = quantity("layers that look at the batch")
    verdict: str = quantity("the audit's verdict")
    faults: tuple[str, ...] = quantity("the audit's faults")
    token_weights: tuple[float, ...] = quantity("weight × N of each microbatch, fitted")
    optimizer_steps: int = quantity("optimizer steps of one update")
    losses: tuple[float, ...] = quantity("mean loss on the base's examples before and after each update", "nat")
    norms: tuple[float, ...] = quantity("length of its gradient there")
    skipped: int = quantity("updates of the trace that moved no weight")
    seconds: tuple[float, ...] = quantity("time of each run", "s")
    throughputs: tuple[float, ...] = quantity("of each run", "valid tokens/s")

    @property
    def tokens(self) -> int:
        """Valid tokens of one update."""
        return sum(self.counts)


@dataclass(frozen=True)
class Record:
    """The verdict on a candidate, its reasons, and every number behind it."""

    verdict: str = quantity("adopt, reject or cannot tell")
    reasons: tuple[str, ...] = quantity("the sentences that decide")
    not_proved: tuple[str, ...] = quantity("what the verdict does not say")
    invariant: str = quantity("what was held fixed, chosen before")
    gates: tuple[Gate, ...] = quantity("the four questions in their order")
    base: Side = quantity("the present step")
    candidate: Side = quantity("the step that may replace it")
    objective: str = quantity("what both should compute")
    examples_difference: float = quantity("how far the gradients of both partitions are apart in float64, relative")
    gradient_difference: float = quantity("‖g′ − g‖ / ‖g‖ before a clip, first update")
    gradient_tolerance: float = quantity("what rounding explains of it")
    derivation: str = quantity("how that tolerance is made up")
    delta_difference: float = quantity("‖Δ′ − Δ‖ / ‖Δ‖ of the parameters, first update")
    delta_tolerance: float = quantity("what a gradient within its tolerance explains of it")
    loss_band: tuple[float, ...] = quantity("how far rounding can take the loss, before and after each update", "nat")
    norm_band: tuple[float, ...] = quantity("the same for the length of the gradient")
    loss_difference: float = quantity("largest difference of the two losses", "nat")
    norm_difference: float = quantity("largest difference of the two lengths")
    ratio: float = quantity("median throughput of the candidate over the base's")
    low: float = quantity("low end of its interval")
    high: float = quantity("high end of its interval")
    margin: float = quantity("gain below which a change does not count, declared before")
    runs: int = quantity("timed runs of each side, in turn")
    updates_per_run: int = quantity("updates in each of them")
    windows: int = quantity("updates of the trace")
    seeds: tuple[int, ...] = quantity("of the steps, then of each control run")
    replicas: int = quantity("processes that train together")
    threads: int = quantity("torch threads")
    machine: str = quantity("what the device calls itself")
    versions: dict[str, str] = quantity("Python, torch, labkit")

    @property
    def passed(self) -> int:
        """How many gates it passes."""
        return sum(gate.outcome == PASSED for gate in self.gates)

    def explain(self) -> str:
        """The verdict, the four gates and what they do not prove, in plain words."""
        lines = [f"{self.verdict}: {self.passed} of {len(self.gates)} gates passed"]
        lines += [f"{MARKS[gate.outcome]} {gate.name}: {gate.said}" for gate in self.gates]
        return "\n".join([*lines, "What this does not prove:", *(f"- {each}" for each in self.not_proved)])

    def to_json(self) -> str:
        """The record as JSON, what is not finite as null."""
        return json.dumps(_plain(dataclasses.asdict(self)), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The record that was written as JSON; what was null is NaN again."""
        values = json.loads(text, object_hook=_back)
        values["gates"] = tuple(Gate(**gate) for gate in values["gates"])
        return cls(**{**values, "base": Side(**values["base"]), "candidate": Side(**values["candidate"])})

    def __repr__(self) -> str:
        return self.explain()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _back(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _restored(value) for key, value in values.items()}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_restored(each) for each in value)
    return math.nan if value is None else value
