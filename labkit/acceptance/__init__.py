"""May a changed training step be adopted? Four gates in a fixed order, and one record of everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from labkit.acceptance.equality import INVARIANTS, Outcome, check_invariant, examples
from labkit.acceptance.record import NOT_RUN
from labkit.acceptance.record import Gate as Gate
from labkit.acceptance.record import Record as Record
from labkit.acceptance.record import Side as Side
from labkit.acceptance.side import Twin, examine
from labkit.acceptance.state import State, record
from labkit.acceptance.timing import Clock
from labkit.audit.references import LossSum
from labkit.audit.runs import Build
from labkit.decision import MARGIN, RUNS
from labkit.declare import Choice, Range

WINDOWS = Range(1, 1000, unit="updates", help="updates of the trace")
TIMED = Range(RUNS, 1000, unit="runs", help="timed runs of each side")
SECONDS = Range(0, 3600, unit="s", help="least time of one run")


def accept(
    base: Build,
    candidate: Build,
    microbatches: Sequence[Any],
    loss_sum: LossSum,
    *,
    invariant: str,
    candidate_microbatches: Sequence[Any] | None = None,
    concat: Callable[[list[Any]], Any] | None = None,
    objective: str = "token-mean",
    windows: int = 8,
    runs: int = 3,
    margin: float = 0.03,
    seconds: float = 0.2,
    clock: Clock = time.perf_counter,
) -> Record:
    """Whether a candidate may replace the base: adopt, reject or cannot tell, with every number behind it.

    >>> from labkit.acceptance.candidates import Pair
    >>> pair = Pair("twice the microbatch")
    >>> record = accept(pair.base, pair.candidate, pair.microbatches, pair.loss_sum, invariant="systems",
    ...                 candidate_microbatches=pair.candidate_microbatches, seconds=0, clock=pair.clock)
    >>> record.verdict, record.passed
    ('adopt', 4)

    base, candidate: `build() -> (model, step)` as for `labkit.audit.audit`; both models start from the same weights.
    microbatches: of the base; candidate_microbatches: the same examples cut differently, by default the base's.
    invariant: "systems" holds global batch and update cadence fixed, so that gradients must be equal; "large-batch"
    does not, and then nothing is ever adopted here. It has no default: it is chosen before testing.
    concat, objective: as for the audit. windows: updates of the trace. runs, margin: of the throughput, as for
    `labkit.decision.decide`. seconds: least time of one run. clock: seconds, to be injected where none may be read.
    The gates, in order: the invariant; one update equal up to rounding; traces of loss and gradient norm as close as
    rounding leaves them; throughput. A gate that fails ends the test, and so does a base that is faulty itself.
    Raises LabError for anything that the audit refuses, and for models that do not start alike.
    """
    Choice(INVARIANTS).check("invariant", invariant, str)
    windows = int(WINDOWS.check("windows", windows, int))
    runs = int(TIMED.check("runs", runs, int))
    margin = float(MARGIN.check("margin", margin, float))
    seconds = float(SECONDS.check("seconds", seconds, float))
    cut = microbatches if candidate_microbatches is None else candidate_microbatches
    calls = min(2, windows)
    sides = (
        examine("base", base, microbatches, loss_sum, concat, calls, objective),
        examine("candidate", candidate, cut, loss_sum, concat, calls, objective),
    )
    twins = Twin(sides[0], loss_sum), Twin(sides[1], loss_sum)
    state = State(sides, twins[0], examples(*sides, twins))
    gates: list[Gate] = []
    questions: dict[str, Callable[[], Outcome]] = {
        "invariant": lambda: check_invariant(invariant, *sides, state.examples),
        "equality": lambda: state.check_equality(invariant, windows),
        "traces": lambda: state.check_traces(gates[1].outcome),
        "throughput": lambda: state.check_throughput(runs, margin, seconds, clock),
    }
    for name, ask in questions.items():
        ended = next((gate.name for gate in gates if state.ends(gate)), "")
        gates.append(Gate(name, *((NOT_RUN, f"{ended} ended the test.") if ended else ask())))
    return record(state, gates, invariant=invariant, objective=objective, windows=windows, runs=runs, margin=margin)
