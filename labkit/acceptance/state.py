"""The state of a test, gate after gate, and the record of it."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import labkit
from labkit.acceptance.equality import (
    Examples,
    Outcome,
    audit_outcome,
    check_equality,
    delta_tolerance,
    distance,
    faults,
)
from labkit.acceptance.record import ADOPT, FAILED, PASSED, REJECT, UNSURE, Gate, Record, Side
from labkit.acceptance.side import SEED, TestedStep, Trace, Twin, trace
from labkit.acceptance.timing import Clock, Timing, check_throughput, time_sides
from labkit.acceptance.traces import CONTROLS, Bands, bands, check_traces, differences, nudge
from labkit.audit.references import pieces
from labkit.decision import Decision, decide
from labkit.device import name as device_name

ALWAYS = (
    "That training converges, or converges as well: equal gradients make the base's updates, good or bad.",
    "Anything where a layer looks at the batch or draws random numbers: there another physical microbatch, or other "
    "random numbers, need a quality run over several seeds.",
)
NO_QUALITY = "That quality stays: that needs a quality run over several seeds, its rate and schedule tuned anew."


@dataclass
class State:
    """Both sides and what was measured of them; a gate that was not reached leaves its fields empty."""

    sides: tuple[TestedStep, TestedStep]
    twin: Twin  # of the base: both traces are judged on its examples
    examples: Examples
    traces: tuple[Trace, Trace] | None = None
    bands: Bands | None = None
    deltas: tuple[float, float] = (math.nan, math.nan)  # how far apart, and how far they may be
    timing: Timing | None = None
    decision: Decision | None = None

    def check_equality(self, invariant: str, windows: int) -> Outcome:
        """The second gate; the traces are made on the way, since the control runs say how far a move may be off."""
        base = self.sides[0]
        self.traces = trace(base, self.twin, windows), trace(self.sides[1], self.twin, windows)
        if invariant == "large-batch":
            outcome = UNSURE, "both audits are right; that the updates are equal was not asked."
            return audit_outcome(*self.sides) or outcome
        if rounding := self.examples.rounding:
            nudges = [nudge(rounding.value / rounding.cancellation, seed) for seed in CONTROLS]
            controls = [trace(base, self.twin, windows, each) for each in nudges]
            self.deltas = distance(self.sides[1].delta, base.delta), delta_tolerance(base, controls, rounding.value)
            if all(control.first.ne(base.delta).any() for control in controls):  # else nothing was moved
                self.bands = bands(self.traces[0], controls, rounding.value)
        return check_equality(*self.sides, self.examples, self.deltas)

    def ends(self, gate: Gate) -> bool:
        """Whether nothing is asked after this gate: it failed, or there is no base to compare with."""
        return gate.outcome == FAILED or (gate.name == "equality" and bool(faults(self.sides[0])))

    def check_traces(self, equality: str) -> Outcome:
        """The third gate."""
        assert self.traces
        return check_traces(*self.traces, self.bands if equality == PASSED else None)

    def check_throughput(self, runs: int, margin: float, seconds: float, clock: Clock) -> Outcome:
        """The fourth gate."""
        self.timing = time_sides(self.sides, runs, seconds, clock)
        self.decision = decide(*self.timing.throughputs, margin)
        return check_throughput(self.decision)


def verdict(gates: Sequence[Gate]) -> str:
    """One gate that fails rejects; without one, a gate that cannot tell leaves it open; else it is adopted.

    >>> verdict([Gate("invariant", "passed", ""), Gate("equality", "cannot tell", "")])
    'cannot tell'
    """
    outcomes = [gate.outcome for gate in gates]
    return REJECT if FAILED in outcomes else UNSURE if UNSURE in outcomes else ADOPT


def record(
    state: State, gates: Sequence[Gate], *, invariant: str, objective: str, windows: int, runs: int, margin: float
) -> Record:
    """Everything in one place."""
    base, candidate = state.traces or (None, None)
    decision, timing, word = state.decision, state.timing, verdict(gates)
    deciding = {ADOPT: PASSED, REJECT: FAILED, UNSURE: UNSURE}[word]
    return Record(
        verdict=word,
        reasons=tuple(f"{gate.name}: {gate.said}" for gate in gates if gate.outcome == deciding),
        not_proved=_not_proved(state, word, windows),
        invariant=invariant,
        gates=tuple(gates),
        base=_side(state, 0),
        candidate=_side(state, 1),
        objective=objective,
        examples_difference=state.examples.difference,
        gradient_difference=distance(state.sides[1].gradient, state.sides[0].gradient),
        gradient_tolerance=state.examples.bound,
        derivation=state.examples.derivation,
        delta_difference=state.deltas[0],
        delta_tolerance=state.deltas[1],
        loss_band=state.bands.losses if state.bands else (),
        norm_band=state.bands.norms if state.bands else (),
        loss_difference=max(differences(base.losses, candidate.losses)) if base and candidate else math.nan,
        norm_difference=max(differences(base.norms, candidate.norms)) if base and candidate else math.nan,
        ratio=decision.ratio if decision else math.nan,
        low=decision.low if decision else math.nan,
        high=decision.high if decision else math.nan,
        margin=margin,
        runs=runs,
        updates_per_run=timing.updates if timing else 0,
        windows=windows,
        seeds=(SEED, *CONTROLS),
        replicas=_replicas(),
        threads=torch.get_num_threads(),
        machine=device_name(_device(state.sides[0])),
        versions={"python": platform.python_version(), "torch": torch.__version__, "labkit": labkit.__version__},
    )


def _side(state: State, at: int) -> Side:
    side, trace = state.sides[at], state.traces[at] if state.traces else None
    weights = side.report.token_weights
    same = max(weights) - min(weights) <= 1e-3 * abs(max(weights)) and max(weights) > 0
    autocast = side.window.autocast
    return Side(
        microbatches=tuple(len(pieces(each)) for each in side.microbatches),
        counts=side.report.counts,
        accumulation=len(side.microbatches),
        denominator=side.tokens * len(weights) / sum(weights) if same else math.nan,
        parameters=sum(p.numel() for p in side.model.parameters()),
        dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in side.model.parameters()})),
        autocast=str(autocast).removeprefix("torch.") if autocast else "",
        device=str(_device(side)),
        random_layers=side.random_layers,
        batch_layers=side.batch_layers,
        verdict=side.report.verdict,
        faults=side.report.faults,
        token_weights=weights,
        optimizer_steps=side.report.optimizer_steps,
        losses=trace.losses if trace else (),
        norms=trace.norms if trace else (),
        skipped=trace.skipped if trace else 0,
        seconds=state.timing.seconds[at] if state.timing else (),
        throughputs=state.timing.throughputs[at] if state.timing else (),
    )


def _not_proved(state: State, word: str, windows: int) -> tuple[str, ...]:
    here = f"{device_name(_device(state.sides[0]))}, torch threads: {torch.get_num_threads()}"
    later = f"That later updates are as equal: {windows} updates on one window of examples were seen, in one process."
    speed = (f"That it is faster elsewhere: it was timed here ({here}).",) if state.timing else ()
    return (*ALWAYS, *((NO_QUALITY,) if word == UNSURE else ()), later, *speed)


def _device(side: TestedStep) -> torch.device:
    return next(side.model.parameters()).device


def _replicas() -> int:
    """Processes of this run."""
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if group else 1
