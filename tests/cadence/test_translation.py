"""Trainings side by side against each alone, their loss against fresh examples, and verdicts by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labkit.accumulation.training import STUDENT
from labkit.cadence.schedule import warmup_cosine
from labkit.cadence.translation import BATCH, OPTIMIZERS, POWER, TRUE, Translated, draw_examples, excess, translated

torch.set_num_threads(1)

NAN, INF = math.nan, math.inf


def last(**values: Any) -> Translated:
    *_, result = translated(**values)
    return result


def alone(seed: int, N: int, batch: int, optimizer: str, rate: float, end: float, horizon: int) -> float:
    """One training of one seed by torch's own layers, and its loss above the least in closed form."""
    x, y = draw_examples(1_000_003 + seed, N)
    layer = nn.Linear(16, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(layer.weight)
    base = {"SGD with momentum": 0.8, "AdamW": 0.08}[optimizer] * rate
    momentum = 0.9**horizon
    opt: torch.optim.Optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=momentum)
    if optimizer == "AdamW":
        opt = torch.optim.AdamW(layer.parameters(), lr=1.0, betas=(momentum, 0.999**horizon))
    else:
        base *= 1 - momentum
    for step in range(N // batch):
        opt.param_groups[0]["lr"] = base * warmup_cosine(end / 10, end)(step)
        rows = slice(step * batch, (step + 1) * batch)
        opt.zero_grad()
        (nn.functional.mse_loss(layer(x[rows])[:, 0], y[rows]) / 2).backward()
        opt.step()
    away = layer.weight[0].detach() - TRUE
    return float((away**2 * torch.logspace(0, -2, 16, dtype=torch.float64)).sum() / 2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_training_is_what_it_is_alone(optimizer: str) -> None:
    K, N = 4, 2048
    final = last(optimizer=optimizer, factor=K, samples=N, learning_rate=0.5, seeds=3)
    U, scale = N // 8, {"SGD with momentum": 4.0, "AdamW": 2.0}[optimizer]
    plans: list[tuple[int, float, float, int]] = [
        (8, 0.5, U, 1),
        (8 * K, 0.5, U, 1),
        (8 * K, 0.5, U / K, 1),
        (8 * K, 0.5 * scale, U / K, 1),
        (8 * K, 0.5 * scale, U / K, K),
    ]
    assert len(final.names) == 5 and final.names[0] == "base batch" and final.samples[-1] == N
    for at, (batch, rate, end, horizon) in enumerate(plans):
        for seed in range(3):
            expected = alone(seed, N, batch, optimizer, rate, end, horizon)
            assert float(final.losses[at, seed, -1]) == pytest.approx(expected, rel=1e-9)


def test_the_loss_is_the_expectation_over_fresh_examples() -> None:
    w = TRUE + torch.linspace(-1, 2, 16, dtype=torch.float64)
    x, y = draw_examples(11, 400_000)
    least, found = ((x @ TRUE - y) ** 2).mean() / 2, ((x @ w - y) ** 2).mean() / 2
    assert float(found - least) == pytest.approx(float(excess(w)), rel=0.02) and float(least) == pytest.approx(
        0.5, rel=0.01
    )
    assert excess(TRUE) == 0 and excess(torch.full((16,), NAN)) == INF
    assert (x[:, -1].var() / x[:, 0].var()).item() == pytest.approx(0.01, rel=0.02)


def test_the_seeds_are_independent_and_stay_themselves() -> None:
    three, four = last(samples=2048, seeds=3, seed=5), last(samples=2048, seeds=4, seed=5)
    assert torch.allclose(three.losses, four.losses[:, :3], rtol=1e-9)
    assert len(set(four.losses[0, :, -1].tolist())) == 4
    assert torch.equal(three.losses[:, :, 0], torch.full((5, 3), 8.0, dtype=torch.float64))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_base_learning_rate_suits_the_base_batch(optimizer: str) -> None:
    found = {
        rate: float(last(optimizer=optimizer, learning_rate=rate).losses[0, :, -1].mean())
        for rate in (0.25, 0.5, 1.0, 2.0, 4.0)
    }
    assert found[1.0] < 1.5 * min(found.values()) and found[0.25] > 4 * found[1.0]


def test_translating_is_no_cure_by_itself() -> None:
    final = last()
    assert torch.equal(final.gaps, torch.stack([each - final.losses[0, :, -1] for each in final.losses[1:, :, -1]]))
    assert (final.gaps[:2].mean(1) > final.margins[:2]).all()  # neither in updates nor in samples
    assert final.gaps[2].mean() < 0.1 * final.gaps[1].mean()  # the learning rate matters more
    assert final.verdict.count("more than the seeds explain") == int((final.gaps.mean(1).abs() > final.margins).sum())
    lost = last(optimizer="SGD with momentum")
    assert lost.diverged.tolist() == [False] * 4 + [True] and "horizons too: diverges" in lost.verdict
    kept = last(optimizer="SGD with momentum", factor=4)
    assert (
        not kept.diverged.any() and "horizons too: higher by" in kept.verdict and "no difference seen" in kept.verdict
    )


def test_results_come_one_by_one_and_stop_where_one_stops() -> None:
    run = translated(samples=2048)
    results = [next(run) for _ in range(8)]
    assert [each.measured for each in results] == list(range(1, 9))
    assert [each.progress for each in results] == pytest.approx([n / 85 for n in range(1, 9)])
    assert results[0].losses.isnan().sum() == 5 * 3 * 17 - 3 and "Not every training" in results[3].verdict
    assert results[4].reached == 0 == results[7].reached and "After 0 samples" in results[7].verdict
    assert not results[7].losses[:3, :, 1].isnan().any() and results[7].losses[3:, :, 1].isnan().all()
    *_, found = run
    assert found.progress == 1 and found.reached == 16 and not found.losses.isnan().any()


@pytest.mark.parametrize("factor", range(2, 17))
def test_all_trainings_see_the_same_samples(factor: int) -> None:
    first = next(translated(factor=factor, samples=5000))
    steps = first.samples.diff()
    assert (steps == steps[0]).all() and steps[0] % (BATCH * factor) == 0 and len(first.samples) == 17
    assert abs(int(first.samples[-1]) - 5000) <= BATCH * factor * 8


def made(base: list[float], other: list[float], start: float = 8.0, measured: int = 4) -> Translated:
    losses = torch.tensor([[[start, each] for each in base], [[start, each] for each in other]], dtype=torch.float64)
    return Translated(8, "AdamW", ("base batch", "large"), torch.tensor([0, 100]), losses, measured)


def test_the_verdict_by_hand() -> None:
    apart = made([1.0, 2.0, 3.0], [1.17, 2.13, 3.15])
    assert apart.gaps.tolist() == [pytest.approx([0.17, 0.13, 0.15])]
    assert apart.margins.tolist() == pytest.approx([4.303 * 0.02 / math.sqrt(3)])  # t of 2 degrees of freedom
    assert "After 100 samples the base batch is 2 above the least loss. A batch 8 times as large" in apart.verdict
    assert "by AdamW: large: higher by 0.15 ± 0.0497, more than the seeds explain" in apart.verdict
    assert "3 seeds" in apart.verdict and "nothing here proves a rule" in apart.verdict
    below = made([1.0, 2.0, 3.0], [0.83, 1.87, 2.85])
    assert "lower by 0.15 ± 0.0497, more than the seeds explain" in below.verdict
    alike = made([1.0, 2.0, 3.0], [1.3, 2.0, 3.15])
    assert "higher by 0.15 ± 0.373, no difference seen" in alike.verdict
    for bad in (9.0, INF):
        lost = made([1.0, 2.0, 3.0], [1.0, bad, 3.0])
        assert lost.diverged.tolist() == [False, True] and "large: diverges" in lost.verdict
    assert "Not every training" in made([1.0, 2.0, 3.0], [NAN] * 3, measured=1).verdict


@pytest.mark.parametrize("seeds", range(3, 9))
def test_the_margin_is_students(seeds: int) -> None:
    result = made([0.0] * seeds, [float(each) for each in range(seeds)])
    deviation = math.sqrt(sum((each - (seeds - 1) / 2) ** 2 for each in range(seeds)) / (seeds - 1))
    assert result.margins.tolist() == pytest.approx([STUDENT[seeds - 3] * deviation / math.sqrt(seeds)])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("factor", "rate"), [(2, 0.25), (16, 4.0)])
def test_extremes(optimizer: str, factor: int, rate: float) -> None:
    seed = torch.get_rng_state()
    values: dict[str, Any] = {
        "optimizer": optimizer,
        "factor": factor,
        "learning_rate": rate,
        "samples": 2048,
        "seeds": 8,
    }
    found, again = last(**values), last(**values)
    assert (
        not found.losses.isnan().any() and found.verdict == again.verdict and torch.equal(seed, torch.get_rng_state())
    )
    finite: Tensor = found.losses[0].isfinite()
    assert finite.all() and set(POWER) == set(OPTIMIZERS)
