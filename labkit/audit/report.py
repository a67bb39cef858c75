"""What an audit found: a word, its numbers, and plain sentences."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

from labkit.audit.measurements import Fault
from labkit.declare import quantity
from labkit.wording import percent, three


@dataclass(frozen=True)
class Report:
    """What one training step really does, against the objective that was meant."""

    verdict: str = quantity("the objective's word where the step equals it, else the weightiest fault, or unknown")
    faults: tuple[str, ...] = quantity("words of all faults, the weightiest first")
    objective: str = quantity("the objective that was meant")
    token_weights: tuple[float, ...] = quantity("fitted weight × N of each microbatch; 1 is right for the token mean")
    counts: tuple[int, ...] = quantity("valid tokens of each microbatch", "tokens")
    relative_error: float = quantity("‖g − G‖ / ‖G‖, G the gradient that was meant, g before a clip in its place")
    residual: float = quantity("share of the gradient that no weights explain")
    tolerance: float = quantity("relative error that rounding alone explains")
    optimizer_steps: int = quantity("optimizer steps in one window")
    backward_passes: int = quantity("backward passes in one window")
    schedule_steps: int = quantity("steps of the schedule in one window")
    clips: int = quantity("calls of a clipping function in one window")
    skipped_steps: int = quantity("optimizer steps that a loss scaler left out, in all windows")
    cannot_tell: tuple[str, ...] = quantity("what these microbatches cannot tell apart")
    details: tuple[Fault, ...] = quantity("each fault in a sentence")
    adam_count: float = quantity("by how much the optimizer's own count advanced in a window; NaN: it keeps none")
    second_run: float = quantity("how far a run with other random numbers is from the first, ‖g′ − g‖ / ‖g‖")
    one_forward: float = quantity("how far one forward of all is from the sum of the microbatches'; NaN: no concat")
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
            lines.append(f"Not to be told with these microbatches: {'; '.join(self.cannot_tell)}.")
        return "\n".join(lines)

    def _first(self) -> str:
        explained = f"rounding explains {self.tolerance:.1g}"
        if not self.faults:
            return f"The step equals the {self.objective}: {self.relative_error:.1g} off, {explained}."
        if self.relative_error <= self.tolerance:
            return f"The gradient equals the {self.objective} ({self.relative_error:.1g} off, {explained}), and yet:"
        off = (
            percent(self.relative_error)
            if math.isfinite(self.relative_error)
            else "not finite, so it cannot be said how far"
        )
        return f"The step is no {self.objective}: its gradient is {off} off ({explained})."

    def to_json(self) -> str:
        """The report as JSON, what is not finite as null."""
        values = dataclasses.asdict(self)
        values["details"] = [{"word": each.word, "said": each.said, "fix": each.fix} for each in self.details]
        return json.dumps(_plain(values), indent=2)

    def __repr__(self) -> str:
        weights = ", ".join(three(each) for each in self.token_weights)
        return f"{self.verdict}\nweight × N of each microbatch: {weights}\n{self.explain()}"


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
