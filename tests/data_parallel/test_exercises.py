"""Losses and loops under DDP as learners write them, and the sentence that each of them gets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import check, workers
from labkit.data_parallel import no_sync
from labkit.data_parallel.exercises import DDP_LOSS
from tests.data_parallel import synced

torch.set_num_threads(1)

RIGHT_LOSSES: list[Callable[..., Any]] = [
    lambda local_sum, local_count, global_count, world: local_sum * world / global_count,
    lambda s, n, N, W: torch.tensor(s) / N * W,
    lambda s, n, N, W: (s / n) * (n / N) * W if n else 0.0,
    lambda s, n, N, W: s / (N / W),
]


@pytest.mark.parametrize("function", RIGHT_LOSSES)
def test_a_right_loss_passes_however_it_is_written(function: Callable[..., Any]) -> None:
    verdict = check.ddp_loss(function)
    assert verdict.passed and verdict.sentence == "Right in all cases."


WRONG_LOSSES: list[tuple[Callable[..., Any], str]] = [
    (lambda s, n, N, W: s / N, "gives 0.6, and 2.4 is right: that is S / N, and DDP divides by the number of ranks"),
    (lambda s, n, N, W: s / n, "gives 4, and 2.4 is right: that is the rank's own token mean"),
    (lambda s, n, N, W: s / max(n, 1), "max(n, 1) takes the NaN away and not the wrong weight"),
    (lambda s, n, N, W: s / n * W, "world belongs before a sum divided by the tokens of all ranks, and not before the"),
    (lambda s, n, N, W: s / max(n, 1) * W, "and max(n, 1) is not their number"),
    (lambda s, n, N, W: s / N / W, "it is divided by world, as DDP does anyway"),
    (lambda s, n, N, W: s * W * W / N, "world stands in it twice"),
    (lambda s, n, N, W: s * W, "it is never divided by the number of tokens"),
    (lambda s, n, N, W: s, "it is the bare sum"),
    (lambda s, n, N, W: s / n / W, "the rank's own mean was divided by world, as DDP does anyway"),
    (lambda s, n, N, W: s / n * (N / n) * W, "the share of the tokens is upside down"),
    (lambda s, n, N, W: s * n / N * W, "a sum needs no share of the tokens: only a mean does"),
    (lambda s, n, N, W: s / (n * W / N), "both counts and world are upside down"),
    (lambda s, n, N, W: s + 1, "none of the usual slips"),
    (lambda s, n, N, W: None, "returns None, which is no finite number"),
    (
        lambda s, n: s / n,
        "Your function takes (s, n), and is called with (local_sum, local_count, global_count, world)",
    ),
]


@pytest.mark.parametrize(("function", "words"), WRONG_LOSSES)
def test_a_wrong_loss_is_told_in_the_sentence_meant_for_it(function: Callable[..., Any], words: str) -> None:
    verdict = check.ddp_loss(function)
    assert not verdict.passed and words in verdict.sentence, verdict.sentence


def test_the_own_mean_of_an_empty_rank_is_zero_by_zero() -> None:
    said = check.ddp_loss(lambda s, n, N, W: s / n).sentence
    assert "In the check “a rank without a valid target” line 1" in said and "ZeroDivisionError" in said


def test_no_two_slips_give_the_same_numbers() -> None:
    told: set[tuple[float, ...]] = set()
    for formula in (DDP_LOSS.right, *DDP_LOSS.wrong.values()):
        numbers = []
        for case in DDP_LOSS.cases.values():
            try:
                numbers.append(round(formula(*case), 9))
            except ZeroDivisionError:
                numbers.append(-1.0)
        told.add(tuple(numbers))
    assert len(told) == 1 + len(DDP_LOSS.wrong)


# Loops that synchronise once.

RIGHT = (no_sync.forward_and_backward, no_sync.only_forward, synced.flag_before, synced.stack, synced.evaluated_before)


@pytest.mark.parametrize("loop", [*RIGHT, synced.one_backward])
def test_a_right_loop_passes_however_it_is_written(loop: Callable[..., Any]) -> None:
    verdict = check.no_sync(loop)
    assert verdict.passed and all(ok for _, ok in verdict.checks), verdict
    assert verdict.sentence.startswith("Right: one all-reduce for four microbatches, with all of them in it")


def no_loss(model: Any, microbatches: Any, loss: Any) -> None:
    pass


def returns_it(model: Any, microbatches: Any, loss: Any) -> Any:
    return sum(loss(model, each) for each in microbatches)


def twice(model: Any, microbatches: Any, loss: Any) -> None:
    loss(model, microbatches[0]).backward()
    model.module.zero_grad()
    no_sync.forward_and_backward(model, microbatches, loss)
    with model.no_sync():
        loss(model, microbatches[0]).backward()


def first_only_no_sync(model: Any, microbatches: Any, loss: Any) -> None:
    with model.no_sync():
        loss(model, microbatches[0]).backward()
    for each in microbatches[1:]:
        loss(model, each).backward()


def cleared(model: Any, microbatches: Any, loss: Any) -> None:
    no_sync.forward_and_backward(model, microbatches, loss)
    model.zero_grad()


def another_gradient(model: Any, microbatches: Any, loss: Any) -> None:
    no_sync.forward_and_backward(model, microbatches, loss)
    for p in model.parameters():
        p.grad += 1


WRONG: list[tuple[Callable[..., Any], list[int], str]] = [
    (no_sync.nowhere, [0, 1, 1, 0, 0], "4 all-reduces for 4 microbatches, and one is enough: no_sync is never used"),
    (
        no_sync.only_backward,
        [0, 1, 1, 0, 0],
        "one is enough: the forward arms the all-reduce, and it stands outside no_sync. The fix: forward and backward",
    ),
    (
        no_sync.last_too,
        [0, 0, 0, 0, 0],
        "No all-reduce ran, since no_sync is on for the last microbatch too: every rank keeps a gradient of its own",
    ),
    (
        no_sync.first_instead,
        [0, 0, 1, 0, 0],
        "The first microbatch is synchronised, and the three after it stay on their rank: the last one has to be",
    ),
    (
        synced.flag_after_forward,
        [0, 0, 0, 0, 0],
        "No all-reduce ran: no_sync was off at a backward, but it is the forward that arms the all-reduce",
    ),
    (
        synced.every_fourth,
        [1, 1, 0, 0, 1],
        "In the check “a window of one microbatch” no all-reduce ran, since no_sync is on for the last microbatch too",
    ),
    (
        synced.through_the_module,
        [0, 0, 0, 0, 0],
        "No all-reduce ran, since the model itself was never called: model.module knows",
    ),
    (synced.second_last, [0, 1, 1, 0, 0], "2 all-reduces for 4 microbatches, and one is enough: no_sync was entered"),
    (
        first_only_no_sync,
        [0, 1, 0, 0, 0],
        "3 all-reduces for 4 microbatches, and one is enough: no_sync was entered once",
    ),
    (
        synced.zero_grad_in_the_loop,
        [0, 0, 1, 0, 0],
        "The microbatches weigh 0, 0, 0 and 1 in .grad, and 1 is right: 3 of 4 did not stay in the gradient",
    ),
    (
        synced.divided,
        [0, 0, 1, 0, 0],
        "weigh 0.25, 0.25, 0.25 and 0.25 in .grad, and 1 is right: the loss that is given is the right share already",
    ),
    (synced.forgets_the_last, [0, 0, 0, 0, 0], "The microbatches weigh 1, 1, 1 and 0 in .grad"),
    (twice, [0, 0, 0, 0, 0], "weigh 2, 1, 1 and 1 in .grad, and 1 is right: backward once for each, on the loss as it"),
    (cleared, [0, 0, 0, 0, 0], "The gradient is zero: backward() ran four times, and .grad was cleared after it."),
    (another_gradient, [0, 0, 0, 0, 0], "The gradient is no sum of these losses"),
    (no_loss, [0, 0, 0, 0, 0], "backward() was never called on a loss of this model."),
    (returns_it, [0, 0, 0, 0, 0], "Your function returns a Tensor and calls no backward()."),
    (lambda model, microbatches: None, [0, 0, 0, 0, 0], "is called with (model, microbatches, loss)"),
    (lambda model, microbatches, loss: 1 / 0, [0, 0, 0, 0, 0], "raises ZeroDivisionError"),
]


@pytest.mark.parametrize(("loop", "held", "words"), WRONG)
def test_a_wrong_loop_is_told_in_the_sentence_meant_for_it(loop: Any, held: list[int], words: str) -> None:
    verdict = check.no_sync(loop)
    assert not verdict.passed and words in verdict.sentence, verdict.sentence
    assert [int(ok) for _, ok in verdict.checks] == held, verdict


def test_a_tail_that_a_fixed_k_forgets_is_told() -> None:
    def every_second(model: Any, microbatches: Any, loss: Any) -> None:
        for at, each in enumerate(microbatches):
            last = at + 1 == 4 or len(microbatches) == 1
            model.require_backward_grad_sync = last
            loss(model, each).backward()
        model.require_backward_grad_sync = True

    said = check.no_sync(every_second).sentence
    assert (
        "In the check “six microbatches” the ranks are synchronised once, the last time after microbatch 4 of 6" in said
    )
    assert "the last two stay on their rank. Does a K stand in the code" in said


def test_a_flag_that_is_left_off_is_seen_in_the_window_after() -> None:
    def left_off(model: Any, microbatches: Any, loss: Any) -> None:
        no_sync.forward_and_backward(model, microbatches, loss)
        model.require_backward_grad_sync = False

    verdict = check.no_sync(left_off)
    assert [ok for _, ok in verdict.checks] == [True] * 4 + [False]
    assert "In the check “the window after” no all-reduce ran" in verdict.sentence


def test_the_stand_in_arms_as_the_real_one_does() -> None:
    for K in (1, 4):
        for answer in workers.run("tests.data_parallel.synced:run_loops", 2, K=K):
            for name, (real, alone) in answer.items():
                assert real == alone, name


ACTIONS: list[Callable[..., Any]] = [
    *synced.LOOPS.values(),
    lambda m, b, loss: setattr(m, "require_backward_grad_sync", None),
    lambda m, b, loss: b.clear(),
    lambda m, b, loss: delattr(m, "module"),
    lambda m, b, loss: m.module.float(),
    lambda m, b, loss: sys.exit(3),
    lambda m, b, loss: print("x" * 10_000),
    lambda m, b, loss: m.passes.clear(),
    lambda m, b, loss: [setattr(p, "grad", torch.full_like(p, float("nan"))) for p in m.parameters()],
]


@settings(max_examples=12)
@given(st.lists(st.sampled_from(ACTIONS), max_size=3))
def test_whatever_a_loop_does_there_is_a_verdict(actions: list[Callable[..., Any]]) -> None:
    def loop(model: Any, microbatches: Any, loss: Any) -> None:
        for action in actions:
            action(model, microbatches, loss)

    verdict = check.no_sync(loop)
    assert verdict.sentence and len(verdict.checks) == 5
