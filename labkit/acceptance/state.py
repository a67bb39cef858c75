"""What a test has measured so far, gate after gate, and the record that is made of it."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import labkit
from labkit.acceptance.equality import Examples, Outcome, apart, audited, delta_tolerance, equal, faults
from labkit.acceptance.record import ADOPT, FAILED, PASSED, REJECT, UNSURE, Gate, Record, Side
from labkit.acceptance.side import SEED, Sided, Trace, Twin, traced
from labkit.acceptance.timing import Clock, Timed, faster, timed
from labkit.acceptance.traces import CONTROLS, Bands, bands, differences, nudge, within
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
class Found:
    """Both sides and what was measured; a gate that was not reached leaves its part empty."""

    sides: tuple[Sided, Sided]
    twin: Twin  # of the base: both traces are judged on its examples
    examples: Examples
    traces: tuple[Trace, Trace] | None = None
    bands: Bands | None = None
    deltas: tuple[float, float] = (math.nan, math.nan)  # how far apart, and how far they may be
    timed: Timed | None = None
    decision: Decision | None = None

    def equal(self, invariant: str, windows: int) -> Outcome:
        """The second gate; the traces are made on the way, since the control runs say how far a move may be off."""
        base = self.sides[0]
        self.traces = traced(base, self.twin, windows), traced(self.sides[1], self.twin, windows)
        if invariant == "large-batch":
            said = UNSURE, "both audits are right; that the updates are equal was not asked."
            return audited(*self.sides) or said
        if rounding := self.examples.rounding:
            moved = [nudge(rounding.value / rounding.cancellation, seed) for seed in CONTROLS]
            controls = [traced(base, self.twin, windows, each) for each in moved]
            self.deltas = apart(self.sides[1].delta, base.delta), delta_tolerance(base, controls, rounding.value)
            if all(control.first.ne(base.delta).any() for control in controls):  # else nothing was moved
                self.bands = bands(self.traces[0], controls, rounding.value)
        return equal(*self.sides, self.examples, self.deltas)

    def ends(self, gate: Gate) -> bool:
        """Whether nothing is asked after this gate: it failed, or there is no base to compare with."""
        return gate.outcome == FAILED or (gate.name == "equality" and bool(faults(self.sides[0])))

    def within(self, equality: str) -> Outcome:
        """The third gate."""
        assert self.traces
        return within(*self.traces, self.bands if equality == PASSED else None)

    def faster(self, runs: int, margin: float, seconds: float, clock: Clock) -> Outcome:
        """The fourth gate."""
        self.timed = timed(self.sides, runs, seconds, clock)
        self.decision = decide(*self.timed.throughputs, margin)
        return faster(self.decision)


def verdict(gates: Sequence[Gate]) -> str:
    """One gate that fails rejects; without one, a gate that cannot tell leaves it open; else it is adopted.

    >>> verdict([Gate("invariant", "passed", ""), Gate("equality", "cannot tell", "")])
    'cannot tell'
    """
    outcomes = [gate.outcome for gate in gates]
    return REJECT if FAILED in outcomes else UNSURE if UNSURE in outcomes else ADOPT


def record(
    found: Found, gates: Sequence[Gate], *, invariant: str, objective: str, windows: int, runs: int, margin: float
) -> Record:
    """Everything in one place."""
    base, candidate = found.traces or (None, None)
    decided, clocked, word = found.decision, found.timed, verdict(gates)
    deciding = {ADOPT: PASSED, REJECT: FAILED, UNSURE: UNSURE}[word]
    return Record(
        verdict=word,
        reasons=tuple(f"{gate.name}: {gate.said}" for gate in gates if gate.outcome == deciding),
        not_proved=_not_proved(found, word, windows),
        invariant=invariant,
        gates=tuple(gates),
        base=_side(found, 0),
        candidate=_side(found, 1),
        objective=objective,
        examples_difference=found.examples.difference,
        gradient_difference=apart(found.sides[1].gradient, found.sides[0].gradient),
        gradient_tolerance=found.examples.bound,
        derivation=found.examples.derivation,
        delta_difference=found.deltas[0],
        delta_tolerance=found.deltas[1],
        loss_band=found.bands.losses if found.bands else (),
        norm_band=found.bands.norms if found.bands else (),
        loss_difference=max(differences(base.losses, candidate.losses)) if base and candidate else math.nan,
        norm_difference=max(differences(base.norms, candidate.norms)) if base and candidate else math.nan,
        ratio=decided.ratio if decided else math.nan,
        low=decided.low if decided else math.nan,
        high=decided.high if decided else math.nan,
        margin=margin,
        runs=runs,
        updates_per_run=clocked.updates if clocked else 0,
        windows=windows,
        seeds=(SEED, *CONTROLS),
        replicas=_replicas(),
        threads=torch.get_num_threads(),
        machine=device_name(_device(found.sides[0])),
        versions={"python": platform.python_version(), "torch": torch.__version__, "labkit": labkit.__version__},
    )


def _side(found: Found, at: int) -> Side:
    side, trace = found.sides[at], found.traces[at] if found.traces else None
    weights = side.report.token_weights
    same = max(weights) - min(weights) <= 1e-3 * abs(max(weights)) and max(weights) > 0
    window = side.window.autocast
    return Side(
        microbatches=tuple(len(pieces(each)) for each in side.microbatches),
        counts=side.report.counts,
        accumulation=len(side.microbatches),
        denominator=side.tokens * len(weights) / sum(weights) if same else math.nan,
        parameters=sum(p.numel() for p in side.model.parameters()),
        dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in side.model.parameters()})),
        autocast=str(window).removeprefix("torch.") if window else "",
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
        seconds=found.timed.seconds[at] if found.timed else (),
        throughputs=found.timed.throughputs[at] if found.timed else (),
    )


def _not_proved(found: Found, word: str, windows: int) -> tuple[str, ...]:
    here = f"{device_name(_device(found.sides[0]))}, torch threads: {torch.get_num_threads()}"
    seen = f"That later updates are as equal: {windows} updates on one window of examples were seen, in one process."
    speed = (f"That it is faster elsewhere: it was timed here ({here}).",) if found.timed else ()
    return (*ALWAYS, *((NO_QUALITY,) if word == UNSURE else ()), seen, *speed)


def _device(side: Sided) -> torch.device:
    return next(side.model.parameters()).device


def _replicas() -> int:
    """Processes of this run."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1
