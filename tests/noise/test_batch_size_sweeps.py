"""Races against trainings by torch's own optimizers, and what is read off them, by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labkit.cadence.translation import CURVATURE, TRUE
from labkit.noise import batch_size_sweeps
from labkit.noise.batch_size_sweeps import (
    CHUNK,
    OPTIMIZERS,
    RATES,
    Batches,
    Rates,
    batches,
    examples,
    good,
    race,
    rates,
)

torch.set_num_threads(1)

NAN, INF = math.nan, math.inf
QUICK: dict[str, Any] = {"noise": 1.0, "target": 2.0, "largest": 128, "seeds": 4}


def last(run: Any, **values: Any) -> Any:
    *_, result = run(**values)
    return result


def alone(batch: int, optimizer: str, rate: float, seed: int, noise: float, target: float, most: int) -> float:
    """One training of one seed by torch's own layers and optimizer: its steps to the target."""
    generator = torch.Generator().manual_seed(1_000_003 + seed)
    layer = nn.Linear(16, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(layer.weight)
    make = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[optimizer]
    opt = make(layer.parameters(), lr=rate)
    chunk = max(1, min(64, CHUNK // batch))
    for step in range(most):
        if step % chunk == 0:
            drawn = torch.randn(chunk, batch, 17, generator=generator, dtype=torch.float64)
        x = drawn[step % chunk, :, :16] * CURVATURE.sqrt()
        y = x @ TRUE + noise * drawn[step % chunk, :, 16]
        opt.zero_grad()
        (nn.functional.mse_loss(layer(x)[:, 0], y) / 2).backward()
        opt.step()
        if float(((layer.weight[0].detach() - TRUE) ** 2 * CURVATURE).sum() / 2) <= target:
            return step + 1
    return INF


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch", [1, 8, 100])
def test_every_training_of_a_race_is_what_it_is_alone(optimizer: str, batch: int) -> None:
    steps = last(race, batch=batch, optimizer=optimizer, noise=2.0, target=2.0, seeds=4, seed=0)
    end = 2 * int(steps[:, steps.isfinite().all(0)].amax(0).min())
    for rate, seed in itertools.product((10, 12, 15, 17, 20), (0, 3)):
        expected = alone(batch, optimizer, float(RATES[rate]), seed, 2.0, 2.0, end)
        assert float(steps[seed, rate]) == expected, (rate, seed)


def test_the_race_ends_after_twice_the_steps_of_the_first_rate_that_is_through() -> None:
    steps = last(race, batch=4, optimizer="SGD", noise=1.0, target=2.0, seeds=4, seed=0)
    through = steps.isfinite().all(0)
    assert float(steps[steps.isfinite()].max()) <= 2 * float(steps[:, through].amax(0).min())
    assert steps[:, 0].isinf().all() and steps[:, -1].isinf().all()  # too slow, and lost


def test_seeds_stay_themselves_and_differ() -> None:
    few = last(race, batch=8, optimizer="SGD", noise=1.0, target=2.0, seeds=4, seed=7)
    more = last(race, batch=8, optimizer="SGD", noise=1.0, target=2.0, seeds=6, seed=7)
    both = few.isfinite() & more[:4].isfinite()
    assert torch.equal(few[both], more[:4][both]) and both.sum() > 12
    best = int(more.mean(0).argmin())
    assert len(set(more[:, best].tolist())) > 1
    other = last(race, batch=8, optimizer="SGD", noise=1.0, target=2.0, seeds=4, seed=8)
    assert not torch.equal(few, other)


def test_the_examples_are_as_declared() -> None:
    x, error = (torch.cat(each) for each in zip(*examples([torch.Generator()], 1024, 3.0), strict=True))
    assert x.shape == (4, 1024, 16) and float(error.std()) == pytest.approx(3, rel=0.03)
    assert (x.flatten(0, 1).var(0) / CURVATURE).tolist() == pytest.approx([1] * 16, rel=0.12)
    assert sum(1 for _ in examples([torch.Generator()], 1, 1.0)) == 64
    assert sum(1 for _ in examples([torch.Generator()], CHUNK * 2, 1.0)) == 1


def test_a_race_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size_sweeps, "LIMIT", 5)
    steps = last(race, batch=1, optimizer="SGD", noise=8.0, target=0.4, seeds=4, seed=99)
    assert steps.isinf().all()


# The results.


def made_batches(sizes: list[int], steps: list[float]) -> Batches:
    known = torch.tensor(steps, dtype=torch.float64)
    b = torch.tensor(sizes)
    done = int((~known.isnan()).sum())
    return Batches("SGD", 53.0, b, done, done / len(sizes), known, known, known, known * b, known)


def test_the_fit_gives_back_the_law_it_is_made_of() -> None:
    sizes = [1, 2, 4, 8, 16, 32, 64]
    found = made_batches(sizes, [25 * (1 + 50 / b) for b in sizes])
    assert found.fit == pytest.approx((25, 50)) and found.residual < 1e-12
    assert found.fewer == pytest.approx(51 / (1 + 50 / 64))
    bent = made_batches([1, 2, 4], [100.0, 50.0, 50.0])
    S, B = bent.fit
    off = [S * (1 + B / b) / steps - 1 for b, steps in zip((1, 2, 4), (100, 50, 50), strict=True)]
    assert bent.residual == pytest.approx(max(map(abs, off)))
    for dS, dB in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):  # no neighbour is nearer
        near = [S * dS * (1 + B * dB / b) / steps - 1 for b, steps in zip((1, 2, 4), (100, 50, 50), strict=True)]
        assert sum(e * e for e in near) > sum(e * e for e in off)
    halfway = made_batches(sizes, [25 * (1 + 50 / b) for b in sizes[:4]] + [NAN] * 3)
    assert halfway.fit == pytest.approx((25, 50)) and halfway.progress == pytest.approx(4 / 7)
    assert halfway.fewer == pytest.approx(51 / (1 + 50 / 8))


def test_batches_are_read_off_their_races() -> None:
    found = last(batches, **QUICK)
    for at, size in enumerate((1, 2, 4, 8, 16, 32, 64, 128)):
        steps = last(race, batch=size, optimizer="SGD", noise=1.0, target=2.0, seeds=4, seed=0)
        fastest = min(range(35), key=lambda rate: float(steps[:, rate].mean()))
        mine = sorted(steps[:, fastest].tolist())
        assert float(found.steps[at]) == pytest.approx(sum(mine) / 4) and found.rate[at] == RATES[fastest]
        assert float(found.samples[at]) == pytest.approx(size * sum(mine) / 4)
        assert mine[0] <= float(found.lower[at]) == pytest.approx(mine[0] + 0.75 * (mine[1] - mine[0]))
        assert float(found.upper[at]) == pytest.approx(mine[2] + 0.25 * (mine[3] - mine[2]))
    assert found.noise_scale == 18 and found.progress == 1


def test_steps_have_diminishing_returns_and_the_critical_batch_is_near_the_noise_scale() -> None:
    found = last(batches)
    assert (found.steps.diff() < 0).all() and (found.samples.diff() > 0).all()
    assert float(found.steps[0] / found.steps[1]) > 1.7 and float(found.steps[-2] / found.steps[-1]) < 1.2
    assert found.residual < 0.12 and 40 < found.fit[1] < 60 and found.noise_scale == 53
    calm = last(batches, noise=1.0)
    assert calm.fit[1] < 0.3 * found.fit[1]  # less noise, a smaller critical batch


def test_results_come_as_the_races_end() -> None:
    results = list(batches(**{**QUICK, "seed": 11}))
    assert [each.measured for each in results] == sorted(each.measured for each in results)
    progress = [each.progress for each in results]
    assert progress == sorted(set(progress)) and progress[0] == pytest.approx(1 / 9 / 8) and progress[-1] == 1
    assert all(each.measured / 8 <= each.progress < (each.measured + 1) / 8 for each in results)
    assert results[0].measured == 0 and results[0].steps.isnan().all()
    one = next(each for each in results if each.measured == 1)
    assert not one.steps[0].isnan() and one.steps[1:].isnan().all()
    assert len(list(batches(**{**QUICK, "seed": 11}))) == 9  # remembered: each race at once


def test_what_is_as_good_as_the_best() -> None:
    steps = torch.tensor([[30.0, 20.0, 21.0, INF], [30.0, 20.0, 23.0, 20.0]])
    assert good(steps).tolist() == [False, True, True, False]


def test_rates_are_read_off_their_races() -> None:
    values = {**QUICK, "base": 3, "seed": 2}
    found = last(rates, **values)
    assert found.sizes.tolist() == [3, 6, 12, 24, 48, 96]
    table = [last(race, batch=b, optimizer="SGD", noise=1.0, target=2.0, seeds=4, seed=2).mean(0) for b in found.sizes]
    start = min(float(RATES[at]) for at in range(35) if table[0][at] <= 1.1 * table[0].min())
    for at, (b, means) in enumerate(zip((3, 6, 12, 24, 48, 96), table, strict=True)):
        near = [float(RATES[rate]) for rate in range(35) if means[rate] <= 1.1 * means.min()]
        assert (float(found.low[at]), float(found.high[at])) == (min(near), max(near))
        assert float(found.best[at]) == float(RATES[means.argmin()])
        for said, cost, rate in (
            (found.linear, found.linear_cost, start * b / 3),
            (found.root, found.root_cost, start * math.sqrt(b / 3)),
        ):
            assert float(said[at]) == pytest.approx(rate)
            nearest = min(range(35), key=lambda at: abs(float(RATES[at]) - rate))
            assert float(cost[at]) == pytest.approx(float(means[nearest] / means.min()))


def made_rates(linear: list[float], root: list[float]) -> Rates:
    n = len(linear)
    sizes = torch.tensor([2 * 2**k for k in range(n)])
    nothing = torch.full((n,), NAN)
    return Rates("SGD", sizes, n, 1.0, *[nothing] * 5, torch.tensor(linear), torch.tensor(root))


def test_a_rule_holds_up_to_where_it_first_costs_more_than_a_tenth() -> None:
    found = made_rates([1.0, 1.09, 1.11, 1.0], [1.0, 1.05, INF, 1.0])
    assert found.linear_holds == 4 and found.root_holds == 4
    found = made_rates([1.0, 1.2, 1.0, 1.0], [1.0, 1.0, 1.05, 1.1])
    assert found.linear_holds == 2 and found.root_holds == 16
    assert made_rates([1.0, 1.0, NAN, NAN], [1.0] * 4).linear_holds == 4


def test_the_linear_rule_suits_sgd_far_below_the_critical_batch_and_breaks_above() -> None:
    found, critical = last(rates), last(batches).fit[1]
    assert 4 <= found.linear_holds < critical and found.root_holds < found.linear_holds
    assert found.linear_cost[-4:].isinf().all()  # above it: never there
    assert found.root_cost[3:7].min() > 1.25  # the root is too slow below it


def test_the_square_root_suits_adam() -> None:
    found = last(rates, optimizer="Adam")
    assert found.root_holds >= 16 > found.linear_holds
    assert found.linear_cost[3:].isinf().all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("noise", "target"), [(0.1, 0.4), (0.1, 2.0), (8.0, 2.0), (8.0, 0.4)])
def test_extremes(optimizer: str, noise: float, target: float) -> None:
    state = torch.get_rng_state()
    values: dict[str, Any] = {"optimizer": optimizer, "noise": noise, "target": target, "seeds": 4}
    found: Batches = last(batches, **values)
    assert found.steps.isfinite().all() and found.fit[1] > 1
    for base in (1, 16):
        rule: Rates = last(rates, **values, base=base)
        assert rule.progress == 1 and base <= rule.linear_holds <= 512 and not rule.linear_cost.isnan().any()
        assert (rule.low <= rule.best).all() and (rule.best <= rule.high).all()
    assert torch.equal(state, torch.get_rng_state())


def test_the_same_parameters_give_the_same_race() -> None:
    kept: Tensor = last(race, batch=8, optimizer="Adam", noise=1.0, target=2.0, seeds=4, seed=3)
    *_, again = race.__wrapped__(8, "Adam", 1.0, 2.0, 4, 3)  # type: ignore[attr-defined]
    assert torch.equal(kept, again)
