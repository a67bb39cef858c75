"""The result of an audit: a word, its numbers, and plain sentences."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.audit.cadence import adam_count, one_forward_distance, rerun_distance
from labkit.audit.measurements import Evidence, Fault, Judgement, solve
from labkit.declare import quantity
from labkit.wording import percent, three


@dataclass(frozen=True)
class Report:
    """What one training step really does, compared with its objective."""

    verdict: str = quantity("the objective's word where the step equals it, else the weightiest fault, or unknown")
    faults: tuple[str, ...] = quantity("words of all faults, the weightiest first")
    objective: str = quantity("the objective to compare with")
    token_weights: tuple[float, ...] = quantity("fitted weight × N of each microbatch; 1 is right for the token mean")
    counts: tuple[int, ...] = quantity("valid tokens of each microbatch", "tokens")
    relative_error: float = quantity("‖g − G‖ / ‖G‖, G the objective's gradient, g before a clip in the right place")
    residual: float = quantity("share of the gradient that no weights explain")
    tolerance: float = quantity("relative error that rounding alone explains")
    optimizer_steps: int = quantity("optimizer steps in one window")
    backward_passes: int = quantity("backward passes in one window")
    schedule_steps: int = quantity("steps of the schedule in one window")
    clips: int = quantity("calls of a clipping function in one window")
    skipped_steps: int = quantity("optimizer steps that a loss scaler left out, in all windows")
    cannot_tell: tuple[str, ...] = quantity("what these microbatches cannot tell apart")
    details: tuple[Fault, ...] = quantity("each fault in a sentence")
    adam_count: float = quantity("by how much the optimizer's own count advanced in a window; NaN where it keeps none")
    second_run: float = quantity("how far a run with other random numbers is from the first, ‖g′ − g‖ / ‖g‖")
    one_forward: float = quantity("how far one forward of all is from the sum of the microbatches'; NaN without concat")
    sequence_weights: tuple[float, ...] = quantity(
        "fitted weight × N of each row; none where microbatches have no rows"
    )

    @property
    def right(self) -> bool:
        """Whether the step equals the objective and nothing else is wrong."""
        return not self.faults and self.verdict == self.objective

    def explain(self) -> str:
        """What is wrong, the numbers that show it, and the fix, in plain words."""
        lines = [self._first()]
        for fault in self.details:
            fix = f" The fix: {fault.fix}." if fault.fix else ""
            lines.append(f"{fault.word}: {fault.said}{fix}")
        if self.cannot_tell:
            lines.append(f"What these microbatches cannot tell: {'; '.join(self.cannot_tell)}.")
        return "\n".join(lines)

    def _first(self) -> str:
        rounding = f"rounding explains {self.tolerance:.1g}"
        if not self.faults:
            return f"The step equals the {self.objective}: {self.relative_error:.1g} off, {rounding}."
        if self.relative_error <= self.tolerance:
            return f"The gradient equals the {self.objective} ({self.relative_error:.1g} off, {rounding}), and yet:"
        error = (
            percent(self.relative_error)
            if math.isfinite(self.relative_error)
            else "not finite, so it cannot be said how far"
        )
        return f"The step is no {self.objective}: its gradient is {error} off ({rounding})."

    def to_json(self) -> str:
        """The report as JSON, what is not finite as null."""
        values = dataclasses.asdict(self)
        values["details"] = [{"word": each.word, "said": each.said, "fix": each.fix} for each in self.details]
        return json.dumps(_plain(values), indent=2)

    def __repr__(self) -> str:
        weights = ", ".join(three(each) for each in self.token_weights)
        return f"{self.verdict}\nweight × N of each microbatch: {weights}\n{self.explain()}"


def write_report(
    evidence: Evidence,
    judgement: Judgement,
    faults: tuple[Fault, ...],
    *,
    cannot_tell: Iterable[str],
    local: Evidence | None = None,
) -> Report:
    """The report on a step; `local`, where `evidence` is of all ranks, is that of the rank whose report it is."""
    local = local or evidence
    window, counts = local.windows[0], evidence.references[0].counts
    return Report(
        verdict=faults[0].word if faults else evidence.objective,
        faults=tuple(fault.word for fault in faults),
        objective=evidence.objective,
        token_weights=tuple((judgement.weights.values * counts.sum()).tolist()),
        counts=tuple(int(n) for n in counts),
        relative_error=judgement.error,
        residual=judgement.weights.residual,
        tolerance=evidence.tolerance,
        optimizer_steps=max(Counter(step.optimizer for step in window.effective_steps).values(), default=0),
        backward_passes=len(window.passes),
        schedule_steps=max(window.schedule_steps.values(), default=0),
        clips=len(window.clips),
        skipped_steps=sum(each.skipped for each in local.windows),
        cannot_tell=tuple(cannot_tell),
        details=faults,
        adam_count=adam_count(local),
        second_run=rerun_distance(local),
        one_forward=one_forward_distance(local),
        sequence_weights=_sequence_weights(evidence, judgement),
    )


def _sequence_weights(evidence: Evidence, judgement: Judgement) -> tuple[float, ...]:
    """The weight × N of every row, in the window that was judged."""
    if evidence.sequences is None or not judgement.gradient.isfinite().all():
        return ()
    sequences = evidence.sequences[judgement.window]
    return tuple((solve(judgement.gradient, sequences.gradients).values * sequences.counts.sum()).tolist())


def same_looks(words: Iterable[str]) -> list[str]:
    """A sentence for each rule that these microbatches cannot tell from the verdict."""
    return [f"{word} would look the same: take unequal counts, K at least 3" for word in sorted(set(words))]


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
