"""Steps on real ranks: every fault by its word, with the weights that algebra gives."""

from __future__ import annotations

import math

import pytest
import torch

from labkit import audit
from labkit.audit.across_ranks import dealt
from labkit.data_parallel import rank_losses
from labkit.data_parallel.steps import microbatches as packaged
from labkit.errors import LabError
from labkit.nets import Transformer, valid_tokens
from tests.audit import rank_steps

torch.set_num_threads(1)

RIGHT = ("right", "right_reduced_by_hand", "right_clipped", "right_every_microbatch")
WRONG = {
    "rank_means": "rank-means",
    "missing_world_factor": "missing-world-factor",
    "mean_times_world": "extra-world-factor",
    "world_factor_twice": "extra-world-factor",
    "mean_of_means": "mean-of-means",
    "divided_by_k_too": "double-division",
    "token_sum": "token-sum",
    "padded_count": "padded-count",
    "through_the_module": "reduction-bypassed",
    "never_synchronised": "reduction-bypassed",
    "first_synchronised": "reduction-bypassed",
    "stepped_each_time": "step-per-microbatch",
    "one_rank_skips": "overflow-disagreement",
    "schedule_in_the_loop": "schedule-per-microbatch",
    "not_finite": "non-finite",
    "no_step": "no-step",
}


def counts(world: int) -> list[list[int]]:
    return [[valid_tokens(labels) for _, labels in part] for part in dealt(rank_steps.microbatches, world)]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_right(name: str) -> None:
    report = audit.ranks(f"tests.audit.rank_steps:{name}")
    assert report.right and report.verdict == "token-mean", report.explain()
    assert report.token_weights == pytest.approx([1.0] * 6) and report.relative_error <= report.tolerance
    assert list(report.counts) == [n for rank in counts(2) for n in rank] and report.backward_passes == 3


@pytest.mark.parametrize(("name", "word"), WRONG.items())
def test_a_wrong_step_is_named(name: str, word: str) -> None:
    report = audit.ranks(f"tests.audit.rank_steps:{name}")
    assert report.faults == (word,) and report.verdict == word, report.explain()
    assert report.explain().count("The fix: ") == 1 and math.isnan(report.relative_error) == (word == "non-finite")


@pytest.mark.parametrize("word", [word for word in rank_losses.RECIPES if word != "token-mean"])
@pytest.mark.parametrize("world", [2, 3])
def test_the_weights_of_a_recipe_are_reported(word: str, world: int) -> None:
    report = audit.ranks(f"labkit.data_parallel.steps:{word.replace('-', '_')}", world)
    assert report.verdict == word, report.explain()
    expected = rank_losses.weights(
        word, rank_losses.layout([[valid_tokens(labels) for _, labels in part] for part in dealt(packaged, world)])
    )
    assert report.token_weights == pytest.approx(expected.tolist(), abs=1e-9)


def test_it_says_the_weights_and_the_fix() -> None:
    said = audit.ranks("tests.audit.rank_steps:missing_world_factor").explain()
    assert (
        "of rank 0 received 0.5; those of rank 1 received 0.5" in said and "multiply the summed loss by W / N" in said
    )
    said = audit.ranks("tests.audit.rank_steps:through_the_module").explain()
    assert "3 of 3 microbatches of other ranks did not reach rank 0" in said and "never model.module" in said
    said = audit.ranks("tests.audit.rank_steps:first_synchronised").explain()
    assert "2 of 3 microbatches of other ranks did not reach rank 0" in said
    said = audit.ranks("tests.audit.rank_steps:one_rank_skips").explain()
    assert "rank 0: 0, rank 1: 1" in said


def test_an_optimizer_that_accumulates_internally_steps_once_on_ranks_as_in_one_process() -> None:
    def build() -> rank_steps.Made:
        model = Transformer(seed=0, dtype=torch.float64)
        return rank_steps.accumulated_internally(model, 6, lambda batches: 1 / sum(map(sum, counts(2))))

    one_process = audit.audit(build, rank_steps.microbatches, rank_steps.loss_sum)
    ranks = audit.ranks("tests.audit.rank_steps:right_accumulated_internally")
    assert one_process.right and ranks.right, (one_process.explain(), ranks.explain())
    assert one_process.optimizer_steps == ranks.optimizer_steps == 1


def test_several_windows_and_ranks_of_unequal_numbers() -> None:
    assert audit.ranks("tests.audit.rank_steps:right", windows=2).right
    assert audit.ranks("labkit.data_parallel.steps:build", 4).right
    uneven = audit.ranks("labkit.data_parallel.steps:mean_of_means", 4)  # 2, 2, 1 and 1 microbatches
    assert uneven.verdict == "mean-of-means", uneven.explain()


def test_one_rank_has_one_microbatch_each_and_what_looks_the_same_is_said() -> None:
    report = audit.ranks("labkit.data_parallel.steps:rank_means", 1)
    assert report.right


def test_microbatches_are_dealt_in_order() -> None:
    assert dealt([1, 2, 3, 4, 5, 6, 7], 3) == [[1, 2, 3], [4, 5], [6, 7]]
    with pytest.raises(LabError, match="1 microbatches for 2 ranks: try 4"):
        dealt([1], 2)


def test_what_raises_says_so() -> None:
    with pytest.raises(LabError, match="no such file"):
        audit.ranks("tests.audit.rank_steps:raises")
    with pytest.raises(LabError, match="windows = 0"):
        audit.ranks("tests.audit.rank_steps:right", windows=0)


def test_half_precision_on_ranks_is_no_fault_and_hides_none() -> None:
    report = audit.ranks("tests.audit.rank_steps:right_in_bfloat16")
    assert report.verdict == "token-mean" and 1e-4 < report.relative_error <= report.tolerance < 0.2, report.explain()
    assert audit.ranks("tests.audit.rank_steps:rank_means_in_bfloat16").verdict == "rank-means"
