"""Two trainings differ in nothing but the rule, and their verdict follows from the numbers."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.accumulation.training import Trainings, held_out_loss, training, trainings
from labkit.corpus import batch, split
from labkit.errors import LabError
from labkit.nets import Transformer

torch.set_num_threads(1)

NAN = math.nan


def made(right: list[list[float]], wrong: list[list[float]], measured: int) -> Trainings:
    at = torch.arange(len(right[0])) * 10
    return Trainings("mean-of-means", at, torch.tensor(right), torch.tensor(wrong), measured)


def last(**values: object) -> Trainings:
    *_, result = trainings(**values)  # type: ignore[arg-type]
    return result


def test_sixty_updates_of_three_seeds_under_sgd() -> None:
    held_out_loss(Transformer())
    results, times = [], [time.perf_counter()]
    for result in trainings(updates=60):
        results.append(result)
        times.append(time.perf_counter())
    found, slices = results[-1], np.diff(times)
    assert found.progress == 1 and found.right.shape == found.wrong.shape == (3, 13)
    assert found.updates.tolist() == list(range(0, 61, 5))
    assert np.median(slices) < 0.3
    assert torch.equal(found.right[:, 0], found.wrong[:, 0])
    assert (found.right[:, -1] < found.right[:, 0] - 1).all() and (found.wrong[:, -1] < found.wrong[:, 0] - 1).all()
    assert found.gaps.abs().max() < 1 and ("more than" in found.verdict) == found.differ


def test_the_first_updates_by_torchs_own_means() -> None:
    model = Transformer(seed=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(10):
        optimizer.zero_grad()
        microbatches = split(*batch(1_000_003 * 5 + step, 6), 3)
        losses: list[Tensor] = [
            F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            for tokens, labels in microbatches
        ]
        torch.stack(losses).mean().backward()
        optimizer.step()
    *_, found = training("mean-of-means", "Adam", 2.0, 10, 3, 6, 4)
    assert found == pytest.approx(held_out_loss(model), rel=1e-4)


def test_the_held_out_loss_is_per_token() -> None:
    model = Transformer()
    tokens, labels = batch(0, 64, held_out=True)
    expected = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert held_out_loss(model) == pytest.approx(expected.item(), rel=1e-5)


def test_adam_hides_a_factor_and_sgd_does_not() -> None:
    hidden = last(rule="double-division", optimizer="Adam", updates=40)
    assert hidden.gaps.abs().max() < 0.01
    shown = last(rule="double-division", optimizer="SGD", updates=40)
    assert shown.differ and shown.gaps.min() > 0.1 and "more than the seeds explain" in shown.verdict


def test_two_right_rules_do_not_differ_and_it_says_so() -> None:
    found = last(rule="token-mean-once", updates=20, seed=7)
    assert not found.differ and "no difference that these seeds can tell" in found.verdict


def test_a_training_that_diverges_is_said() -> None:
    found = last(rule="token-sum", updates=20, learning_rate=10.0)
    assert found.progress == 1 and found.differ and "diverges" in found.verdict


def test_results_come_one_by_one_and_stop_where_one_stops() -> None:
    run = trainings(updates=25, seeds=3, seed=2)
    results = [next(run) for _ in range(7)]
    assert [each.measured for each in results] == list(range(1, 8))
    assert [each.progress for each in results] == pytest.approx([n / 36 for n in range(1, 8)])
    assert results[0].updates.tolist() == [0, 5, 10, 15, 20, 25]
    assert results[0].right.isnan().sum() == 17 and results[0].wrong.isnan().all()
    assert (
        "Not every training" in results[0].verdict
        and not results[0].differ
        and not results[6].right[:, 0].isnan().any()
    )
    assert math.isnan(float(results[5].right[0, 1])) and not math.isnan(float(results[6].right[0, 1]))


def test_the_verdict_by_hand() -> None:
    apart = made([[4, 2.0], [4, 3.0], [4, 2.5]], [[4, 2.17], [4, 3.13], [4, 2.65]], 12)
    assert apart.gaps.tolist() == pytest.approx([0.17, 0.13, 0.15], abs=1e-6)
    assert apart.margin == pytest.approx(4.303 * 0.02 / math.sqrt(3), rel=1e-4)  # t of 2 degrees of freedom
    assert apart.differ and "10 updates" in apart.verdict
    assert "2.500 (2.000 … 3.000) with token-mean and 2.650 (2.170 … 3.130) with mean-of-means" in apart.verdict
    assert "higher by 0.150 ± 0.050 (95 %, 3 seeds): more than the seeds explain" in apart.verdict
    alike = made([[4, 2.0], [4, 3.0], [4, 2.5]], [[4, 2.2], [4, 3.1], [4, 2.65]], 12)
    assert alike.margin == pytest.approx(4.303 * 0.05 / math.sqrt(3), rel=1e-4) and alike.differ
    alike = made([[4, 2.0], [4, 3.0], [4, 2.5]], [[4, 2.3], [4, 3.0], [4, 2.65]], 12)
    assert not alike.differ and "no difference that these seeds can tell" in alike.verdict
    lost = made([[4, 2.0], [4, 3.0], [4, 2.5]], [[4, 3.0], [4, 19.0], [4, 3.5]], 12)
    assert lost.differ and lost.diverged and "worse than untrained" in lost.verdict
    halfway = made([[4, 2.0], [4, NAN], [4, NAN]], [[4, NAN], [4, NAN], [4, NAN]], 7)
    assert halfway.reached == 0 and not halfway.differ and "After 0 updates" in halfway.verdict


@pytest.mark.parametrize(("seeds", "t"), [(3, 4.303), (4, 3.182), (5, 2.776), (6, 2.571), (7, 2.447), (8, 2.365)])
def test_the_margin_is_students(seeds: int, t: float) -> None:
    wrong = [[0.0, float(each)] for each in range(seeds)]
    found = made([[0.0, 0.0]] * seeds, wrong, 4 * seeds)
    deviation = math.sqrt(sum((each - (seeds - 1) / 2) ** 2 for each in range(seeds)) / (seeds - 1))
    assert found.margin == pytest.approx(t * deviation / math.sqrt(seeds), rel=1e-5)


def test_more_microbatches_than_sequences_are_refused() -> None:
    run = trainings(accumulation_steps=9)
    with pytest.raises(LabError, match="accumulation steps = 9 is outside 1 … 8"):
        next(run)
    with pytest.raises(LabError, match="no rule 'mean'"):
        next(trainings(rule="mean"))


@pytest.mark.parametrize("sequences", [1, 32])
def test_extremes(sequences: int) -> None:
    found = last(updates=10, sequences=sequences, accumulation_steps=sequences, optimizer="Adam", learning_rate=0.1)
    assert found.right.isfinite().all() and found.wrong.isfinite().all()
