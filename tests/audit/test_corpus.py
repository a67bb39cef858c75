"""Every entry of the corpus is what it says it is, proved in float64 by plain torch and by algebra."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import replace

import torch

from tests.audit import watching
from tests.audit.proofs import (
    ALL,
    FAULTY,
    RIGHT,
    TELLABLE,
    UNTELLABLE,
    WITHOUT_ALGEBRA,
    alone,
    by_name,
    clear,
    of,
    plainly,
    predicted,
    rounding,
    run,
    summed_gradients,
    tensors,
)
from tests.audit.steps import Step
from tests.audit.watching import gap, weights_of

WORDS = (
    *("mean-of-means", "sum-of-means", "token-sum", "double-division", "padded-count", "unshifted-count"),
    *("sequence-means", "last-microbatch-only", "tail-divided-by-k", "carried-over"),
    *("clip-per-microbatch", "unscale-early", "clip-scaled"),
    *("step-per-microbatch", "adam-count-per-microbatch", "moments-per-microbatch", "momentum-per-microbatch"),
    *("decay-per-microbatch", "ema-per-microbatch", "schedule-per-microbatch", "schedule-per-process"),
    *("batch-dependent-layer", "nondeterministic", "stale-gradient", "non-finite", "no-step", "unknown"),
)
ALGEBRAIC = [entry for entry in FAULTY if not WITHOUT_ALGEBRA & set(entry.faults)]


def test_there_are_enough_of_every_sort() -> None:
    words = Counter(word for entry in FAULTY for word in entry.faults)
    assert [word for word in WORDS if words[word] < 2 or not alone(word)] == []
    assert set(words) <= {*WORDS, "token-mean"}  # right, and not the objective that was meant
    assert len({frozenset(entry.faults) for entry in FAULTY if len(entry.faults) == 2}) >= 10
    assert len(FAULTY) >= 60 and len(RIGHT) >= 30 and len(UNTELLABLE) >= 5
    assert len({entry.structure for entry in FAULTY}) >= 20
    assert len({entry.name for entry in ALL}) == len(ALL)


def test_a_gap_is_seen_in_everything_that_is_noted() -> None:
    found, _ = run(by_name("own_average"))
    event = found.events[0]
    assert gap([found], [found]) == 0 and len(found.counts) > 0
    for name in ("after", "average", "rates", "counts"):
        value = getattr(found, name)
        larger = 1.5 * value if isinstance(value, torch.Tensor) else tuple(1.5 * each for each in value)
        assert gap([replace(found, **{name: larger})], [found]) > 0.1
    for name, larger in {"gradient": 1.5 * event.gradient, "rates": (0.5,)}.items():
        assert gap([replace(found, events=[replace(event, **{name: larger})])], [found]) > 0.1
    assert gap([replace(found, after=found.after * torch.nan)], [found]) == math.inf
    assert (
        gap([replace(found, events=[])], [found]) == gap([replace(found, average=found.after[:0])], [found]) == math.inf
    )


@of(ALL)
def test_an_entry_is_well_made(entry: Step) -> None:
    state = torch.random.get_rng_state()
    first, _ = entry.build()
    assert torch.equal(state, torch.random.get_rng_state())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        second, step = entry.build()
    assert first is not second and torch.equal(weights_of(first), weights_of(second))
    assert sum(p.numel() for p in first.parameters()) <= 5000
    assert {p.dtype for p in first.parameters()} == {entry.task.dtype}
    assert entry.verdict == (entry.faults or (entry.objective,))[0]
    given, before = list(entry.microbatches), copy.deepcopy(entry.microbatches)
    step(given)
    assert len(given) == len(before)
    assert all(torch.equal(a, b) for a, b in zip(tensors(given), tensors(before), strict=True))


@of(TELLABLE)
def test_its_window_can_tell(entry: Step) -> None:
    rows, counts = summed_gradients(entry)
    assert len(counts) >= 3 and len(set(counts.tolist())) == len(counts)
    there = rows[counts > 0]
    lengths = torch.linalg.svdvals(there / there.norm(dim=1, keepdim=True))
    assert len(there) >= 3 and lengths[-1] > 1e-2 * lengths[0]


@of([entry for entry in ALL if not entry.faults])
def test_a_right_step_is_the_whole_window_in_one_pass(entry: Step) -> None:
    assert gap(run(entry), plainly(entry)) <= rounding(entry)


@of(RIGHT)
def test_a_right_step_would_show_a_fault(entry: Step) -> None:
    K, optimizers = len(entry.microbatches), {event.owned for event in run(entry)[0].events}
    assert K >= 3 and all(len(window.events) == len(optimizers) for window in run(entry))
    for word in {"mean-of-means", "sequence-means", "last-microbatch-only", "step-per-microbatch"}:
        means_it = word.removesuffix("s") == entry.objective.removesuffix("s")
        if not means_it and (word != "sequence-means" or has_sequences(entry)):
            assert gap(run(entry), predicted(entry, [word])) >= clear(entry)


def has_sequences(entry: Step) -> bool:
    return hasattr(entry.build()[0], "embedding")


@of(TELLABLE)
def test_without_faults_algebra_and_one_pass_agree(entry: Step) -> None:
    assert gap(predicted(entry, ()), plainly(entry)) <= rounding(entry, torch.float64)


@of(ALGEBRAIC)
def test_a_faulty_step_does_what_its_words_predict(entry: Step) -> None:
    assert gap(run(entry), predicted(entry, entry.faults)) <= rounding(entry)


@of(ALGEBRAIC)
def test_every_one_of_its_words_is_needed_and_the_weightiest_stands_first(entry: Step) -> None:
    """A word weighs what is left to mend when all the others are mended but it is not counted."""
    found = run(entry)
    without = [predicted(entry, [each for each in entry.faults if each != word]) for word in entry.faults]
    weights = [gap(found, each) for each in without]
    assert min(weights) >= clear(entry) and weights == sorted(weights, reverse=True)
    assert gap(found, plainly(entry)) >= clear(entry)


@of(UNTELLABLE)
def test_several_readings_explain_the_same(entry: Step) -> None:
    assert len(entry.readings) >= 2 and entry.faults in entry.readings
    for reading in entry.readings:
        assert gap(run(entry), predicted(entry, reading)) <= rounding(entry)


@of([entry for entry in ALL if "nondeterministic" not in entry.faults])
def test_a_step_runs_the_same_twice(entry: Step) -> None:
    for a, b in zip(run(entry), watching.run(entry), strict=True):
        assert torch.equal(a.after.nan_to_num(7.0), b.after.nan_to_num(7.0))


@of(alone("unknown"))
def test_no_word_predicts_what_has_none(entry: Step) -> None:
    needs = {"tail-divided-by-k", "carried-over"}  # a K that is not the window's
    needs |= set() if has_sequences(entry) else {"padded-count", "unshifted-count", "sequence-means"}
    for word in sorted({*WORDS} - WITHOUT_ALGEBRA - needs):
        if word != "decay-per-microbatch" or "weight_decay" in entry.plan.optimizers(entry.build()[0])[0].defaults:
            assert gap(run(entry), predicted(entry, [word])) >= clear(entry)
