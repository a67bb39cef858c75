"""Symptoms to name: a shipped loop is drawn, run on fresh microbatches, and only what can be counted of it is told."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, replace

import torch

from labkit.audit import Report, probe
from labkit.casebook.entry import Case, all
from labkit.declare import quantity
from labkit.device import quota_threads
from labkit.nets import VOCABULARY
from labkit.wording import three

HOW_MANY = 5
SHOWN = (  # words that the numbers told here give away
    *("mean-of-means", "sum-of-means", "double-division", "tail-divided-by-k", "last-microbatch-only"),
    *("schedule-per-microbatch", "adam-count-per-microbatch", "clip-per-microbatch"),
)


@dataclass(frozen=True)
class Symptom:
    """What can be counted of a step in one window."""

    case: str = quantity("id of the case")
    word: str = quantity("its word")
    counts: tuple[int, ...] = quantity("valid tokens of each microbatch", "tokens")
    report: Report = quantity("what the audit found")

    def __str__(self) -> str:
        counts, r = ", ".join(map(str, self.counts)), self.report
        adam = "" if r.adam_count != r.adam_count else f", Adam's count {three(r.adam_count)}"
        lines = (
            f"valid tokens {counts} (N = {sum(self.counts)})",
            f"weights × N {weights_in_words(self)}",
            f"in one window: optimizer steps {r.optimizer_steps}, schedule {r.schedule_steps}, clips {r.clips}{adam}",
        )
        return "\n   ".join(lines)


class Symptoms(tuple[Symptom, ...]):
    """Symptoms, numbered from 1 where they are shown."""

    def __repr__(self) -> str:
        return "\n".join(f"{at}. {each}" for at, each in enumerate(self, 1))


def weights_in_words(symptom: Symptom) -> str:
    """The weights × N, as they are said."""
    return ", ".join("0" if abs(w) < 1e-6 else three(w) for w in symptom.report.token_weights)


def symptoms(seed: int = 0) -> Symptoms:
    """Five steps of the casebook, no two alike, as numbers alone.

    >>> five = symptoms(0)
    >>> len(five), len({each.word for each in five}), five[0].word in str(five)
    (5, 5, False)

    Each loop makes one update of a small language model, on microbatches drawn from the seed.
    """
    return _draw(seed)


@functools.lru_cache(maxsize=4)
@quota_threads(1)
def _draw(seed: int) -> Symptoms:
    generator = torch.Generator().manual_seed(seed)
    known = {case.word: case for case in all() if case.word in SHOWN}
    order = torch.randperm(len(SHOWN), generator=generator)[:HOW_MANY].tolist()
    return Symptoms(_symptom(known[SHOWN[at]], seed, 3 + at % 3) for at in order)


def _symptom(case: Case, seed: int, K: int) -> Symptom:
    microbatches = probe(VOCABULARY, accumulation=K, length=20 + seed % 12, seed=seed)
    with warnings.catch_warnings(action="ignore"):  # torch warns of schedules that step early
        report = replace(case, microbatches=lambda: microbatches).audit(case.wrong)
    return Symptom(case.id, case.word, report.counts, report)
