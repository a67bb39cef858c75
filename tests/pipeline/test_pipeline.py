"""Real pipelines against the full batch: every loss, both settings of scale_grads, all schedules."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from labkit import LabError, pipeline
from labkit.nets import IGNORE
from labkit.pipeline.stages import (
    COUNTS,
    LOSSES,
    SCHEDULES,
    accepts,
    admit,
    data,
    enough,
    model,
    pad,
    rows_per_microbatch,
    share_of_mean,
    token_mean,
    token_sum,
)
from labkit.pipeline.step import run_pipeline, sums
from tests.lab_in_browser import ROOT

torch.set_num_threads(1)


def full_batch(ranks: int, rows: int, seed: int, reduction: str = "mean") -> torch.Tensor:
    """The whole batch in one pass, by torch's own mean."""
    whole, (tokens, targets) = model(ranks, seed), data(rows, seed)
    F.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction=reduction).backward()
    return torch.cat([p.grad.flatten() for p in whole.parameters() if p.grad is not None])


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_each_way_is_off_by_what_algebra_says(loss: str, scale_grads: bool, equal: bool) -> None:
    found = pipeline.losses(loss=loss, scale_grads=scale_grads, equal=equal)
    n = [12] * 4 if equal else [1, 12, 3, 7]
    N, M = sum(n), 4
    by = {"mean": [N / each for each in n], "sum": [N] * 4, "sum / N": [1] * 4}[loss]
    weights = [each / (M if scale_grads else 1) for each in by]
    assert found.counts.tolist() == n and found.weights.tolist() == pytest.approx(weights)
    assert found.predicted.tolist() == pytest.approx(weights) and found.residual < 1e-12
    assert found.relative_error == pytest.approx(found.predicted_error, abs=found.tolerance.value)
    right = all(weight == pytest.approx(1) for weight in weights)
    assert found.equal == right == (not scale_grads if loss == "sum / N" else loss == "mean" and scale_grads and equal)
    if len(set(weights)) == 1:
        assert found.relative_error == pytest.approx(abs(weights[0] - 1), abs=1e-9)
        assert found.norm_ratio == pytest.approx(weights[0]) and found.cosine == pytest.approx(1)


def test_the_table_of_six() -> None:
    found = pipeline.ways(seed=0)
    errors = {(way.loss, way.scale_grads): way.error for way in found.ways}
    assert errors["sum / N", True] == pytest.approx(1 - 1 / 4) and errors["sum / N", False] <= found.bound
    assert errors["sum", True] == pytest.approx(23 / 4 - 1) and errors["sum", False] == pytest.approx(22)
    assert 0.5 < errors["mean", True] < 1 < errors["mean", False]
    assert found.right == 1 and [way.right for way in found.ways] == [False] * 5 + [True]
    assert all(way.predicted == pytest.approx(way.error, abs=1e-9) for way in found.ways)
    assert list(errors) == [(loss, scaled) for loss in ("mean", "sum", "sum / N") for scaled in (True, False)]


def test_a_healthy_norm_hides_the_mean_of_means() -> None:
    found = pipeline.losses()
    assert abs(found.norm_ratio - 1) < 0.1 and found.relative_error > 0.7


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule_leaves_the_gradient_of_one_pass(ranks: int) -> None:
    left = {}
    for schedule in SCHEDULES:
        stages = ranks * (2 if schedule == "Interleaved" else 1)
        for loss, scaled, reduction in (("sum / N", False, "mean"), ("sum", True, "sum")):
            (found,) = run_pipeline([data(4, 3)], ranks, 4, schedule, loss, scaled, 3)
            right = full_batch(stages, 4, 3, reduction) / (4 if scaled else 1)
            assert (found - right).norm() / right.norm() < 1e-13
            left[schedule, loss] = found
    assert torch.equal(left["GPipe", "sum / N"], left["1F1B", "sum / N"])


def test_the_same_call_gives_the_same_result_and_leaves_torchs_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    one, two = (pipeline.losses(seed=5) for _ in range(2))
    assert one.relative_error == two.relative_error and torch.equal(one.weights, two.weights)
    assert torch.equal(before, torch.get_rng_state())
    assert pipeline.losses(seed=6).relative_error != one.relative_error


def test_the_sums_are_those_of_the_rows() -> None:
    rows, (_, targets) = sums(model(2, 0), *data(4, 0)), data(4, 0)
    assert torch.allclose(rows.sum(0), full_batch(2, 4, 0, "sum"))
    assert torch.allclose(rows.sum(0) / (targets != IGNORE).sum(), full_batch(2, 4, 0))


def test_the_batch_has_the_counts_that_are_said() -> None:
    for equal in (False, True):
        tokens, targets = data(6, 1, equal)
        counts = (targets != IGNORE).sum(1).tolist()
        assert counts == ([12] * 6 if equal else [*COUNTS, *COUNTS[:2]]) and tokens.shape == targets.shape
    assert (data(6, 1, True)[1][:, :-1] == data(6, 1, True)[0][:, 1:]).all()  # the target is the next token
    assert (targets[0, 0] != IGNORE) and not torch.equal(tokens[0], tokens[1])


@pytest.mark.parametrize(
    ("loss", "right"),
    [
        (token_mean, lambda each, N: each.mean()),
        (token_sum, lambda each, N: each.sum()),
        (share_of_mean, lambda each, N: each.sum() / N),
    ],
)
def test_a_loss_by_hand(loss: Any, right: Any) -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, IGNORE, 4], [0, 2, IGNORE]])
    each = torch.stack(
        [logits[i, t].logsumexp(0) - logits[i, t, k] for i, t, k in ((0, 0, 1), (0, 2, 4), (1, 0, 0), (1, 1, 2))]
    )
    assert float(loss(logits, targets, 7)) == pytest.approx(float(right(each, 7)))


# What the schedules take.


@given(st.sampled_from(SCHEDULES), st.integers(2, 4), st.integers(1, 16))
def test_what_a_schedule_takes_is_said_and_its_remedy_is_taken(schedule: str, ranks: int, microbatches: int) -> None:
    if schedule == "GPipe":
        assert accepts(schedule, ranks, microbatches)
    if accepts(schedule, ranks, microbatches):
        admit(schedule, ranks, microbatches)
        return
    with pytest.raises(LabError, match=rf"^microbatches = {microbatches} .*: try \d+$") as error:
        admit(schedule, ranks, microbatches)
    assert accepts(schedule, ranks, int(str(error.value).rpartition("try ")[2]))


def test_the_library_refuses_what_is_refused_here_and_takes_the_rest() -> None:
    for schedule, microbatches in (
        ("1F1B", 1),
        ("1F1B", 2),
        ("Interleaved", 1),
        ("Interleaved", 3),
        ("Interleaved", 5),
    ):
        if accepts(schedule, 2, microbatches):
            assert pipeline.losses(
                schedule=schedule, microbatches=microbatches, loss="sum / N", scale_grads=False
            ).equal
            continue
        with pytest.raises(LabError, match=r"rank [01].*[Nn]umber of microbatches"):
            run_pipeline([data(microbatches, 0)], 2, microbatches, schedule, "sum", False, 0)
        with pytest.raises(LabError, match=f"microbatches = {microbatches} "):
            pipeline.losses(schedule=schedule, microbatches=microbatches)


@given(st.integers(1, 40), st.integers(1, 8))
def test_rows_divide_or_the_remedy_does(rows: int, microbatches: int) -> None:
    more = enough(rows, microbatches)
    assert more % microbatches == 0 and 0 <= more - rows < microbatches
    if rows % microbatches == 0:
        assert rows_per_microbatch(rows, microbatches) * microbatches == rows
        return
    with pytest.raises(LabError, match=f"rows = {rows} .* add {more - rows} ignored") as error:
        rows_per_microbatch(rows, microbatches)
    assert rows_per_microbatch(int(str(error.value).rpartition("try ")[2]), microbatches)


def test_padding_adds_ignored_rows_and_nothing_else() -> None:
    tokens, targets = data(3, 0)
    more, aims = pad(tokens, targets, 5)
    assert torch.equal(more[:3], tokens) and torch.equal(aims[:3], targets)
    assert (aims[3:] == IGNORE).all() and more.shape == aims.shape == (5, 12)
    assert all(torch.equal(a, b) for a, b in zip(pad(tokens, targets, 3), (tokens, targets), strict=True))


# The same functions under torchrun.

SCRIPT = """
import json, os
from labkit import pipeline
found, tail = pipeline.losses(), pipeline.indivisible(treatment="padded")
line = pipeline.timeline(schedule="1F1B", microbatches=2, forward=2.0)
if os.environ["RANK"] == "1":
    print("found", json.dumps([found.weights.tolist(), found.relative_error, tail.errors, line.kept]), flush=True)
"""


def test_torchrun_gives_the_same_result(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "same.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("found ")] or [done.stderr]
    found, tail = pipeline.losses(), pipeline.indivisible(treatment="padded")
    weights, error, errors, kept = json.loads(said.removeprefix("found "))
    assert weights == found.weights.tolist() and error == found.relative_error
    assert tuple(errors) == tail.errors and kept == [2, 1] and math.isfinite(error)
