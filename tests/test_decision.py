"""Three verdicts from made timings, an interval that is counted, and how often it errs, by simulation."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.decision import arrangements, decide
from labkit.errors import LabError

RATES = st.lists(st.floats(1e-3, 1e9), min_size=3, max_size=7)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "ends"),
    [
        ((100, 101, 99), (110, 112, 108), "faster", (108 / 101, 112 / 99)),
        ((100, 101, 99), (104, 104.1, 104), "cannot tell", (104 / 101, 104.1 / 99)),  # the low end is within 3 %
        ((100, 101, 99), (101, 100, 102), "cannot tell", (100 / 101, 102 / 99)),
        ((100, 101, 100), (101, 100, 102), "not faster", (100 / 101, 102 / 100)),
        ((100, 101, 99), (80, 81, 82), "not faster", (80 / 101, 82 / 99)),
        ((100, 150, 70), (110, 90, 160), "cannot tell", (90 / 150, 160 / 70)),
    ],
)
def test_made_throughputs_of_all_three_kinds(
    before: tuple[float, ...], after: tuple[float, ...], verdict: str, ends: tuple[float, float]
) -> None:
    decision = decide(before, after)
    assert decision.verdict == verdict and (decision.low, decision.high) == pytest.approx(ends)
    assert decision.explain().startswith(f"{verdict}: {decision.ratio:.3g} times the throughput, 90 % interval")
    assert decision.explain().endswith(".") and f"{decision.low:.3g} … {decision.high:.3g}" in decision.explain()


def test_a_sentence_says_what_the_bar_is() -> None:
    assert "cannot tell: 1.1 times" in decide([100, 150, 70], [110, 90, 160]).explain()
    assert "and 1.05 lies inside: more runs or less noise" in decide([100, 150, 70], [110, 90, 160], 0.05).explain()
    assert "none of it above 1.03." in decide([100, 101, 99], [80, 81, 82]).explain()


def test_a_gain_of_the_margin_does_not_count_and_one_beyond_does() -> None:
    assert decide([100] * 3, [125] * 3, margin=0.25).verdict == "not faster"
    assert decide([100] * 3, [125.01] * 3, margin=0.25).verdict == "faster"
    assert decide([100] * 3, [100] * 3, margin=0).verdict == "not faster"
    assert decide([100] * 3, [102] * 3).verdict == "not faster"
    assert decide([100] * 3, [102] * 3, margin=0.01).verdict == "faster"


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 3), (2, 5), (5, 2), (4, 4), (3, 6)])
def test_the_null_distribution_is_that_of_all_orders(n: int, m: int) -> None:
    counts = [0] * (n * m + 1)
    for places in itertools.combinations(range(n + m), n):
        counts[sum(places) - n * (n - 1) // 2] += 1
    assert arrangements(n, m) == counts


@pytest.mark.parametrize(("n", "m"), [(3, 3), (3, 9), (5, 5), (9, 9)])
def test_as_many_ratios_are_left_out_as_one_in_twenty_allows(n: int, m: int) -> None:
    rates = torch.rand(n + m, generator=torch.Generator().manual_seed(n), dtype=torch.float64) + 1
    before, after = rates[:n].tolist(), rates[n:].tolist()
    found, ratios = decide(before, after), sorted(b / a for a in before for b in after)
    out = ratios.index(found.low)
    assert ratios.index(found.high) == len(ratios) - 1 - out
    share = [Fraction(sum(arrangements(n, m)[: k + 1]), math.comb(n + m, n)) for k in (out, out + 1)]
    assert share[0] <= Fraction(1, 20) < share[1]


def verdicts(noise: float, gain: float, runs: int, cases: int = 3000) -> list[str]:
    generator = torch.Generator().manual_seed(1)
    made = 1 + noise * torch.randn(cases, 2, runs, generator=generator, dtype=torch.float64)
    made[:, 1] *= gain
    return [decide(before, after).verdict for before, after in made.clamp(min=1e-3).tolist()]


def share(found: list[str], verdict: str) -> float:
    return found.count(verdict) / len(found)


@pytest.mark.parametrize(("noise", "rate"), [(0.01, 0.0), (0.03, 0.003), (0.1, 0.027), (0.3, 0.042)])
def test_a_truly_equal_pair_is_seldom_called_faster(noise: float, rate: float) -> None:
    result = share(verdicts(noise, 1.0, 3), "faster")
    assert result <= 0.05 and result == pytest.approx(rate, abs=4 * math.sqrt(max(rate, 0.001) / 3000))


@pytest.mark.parametrize("runs", [3, 5, 9])
def test_a_gain_of_just_the_margin_errs_at_the_level_on_either_side(runs: int) -> None:
    found = verdicts(0.05, 1.03, runs)
    level = {3: 1 / 20, 5: 7 / 126, 9: 0.05}[runs]
    for wrong in ("faster", "not faster"):
        assert share(found, wrong) < min(level, 0.05) + 3 * math.sqrt(0.05 / 3000)
        assert share(found, wrong) > 0.02


def test_a_large_gain_is_seen_through_small_noise_and_more_runs_tell_more() -> None:
    assert share(verdicts(0.01, 1.1, 3), "faster") > 0.99
    three, nine = (share(verdicts(0.05, 1.1, runs), "faster") for runs in (3, 9))
    assert three < 0.5 < 0.75 < nine


@given(RATES, RATES, st.floats(0, 1))
def test_the_interval_holds_the_ratio_and_no_unit_matters(before: Any, after: Any, margin: float) -> None:
    decision = decide(before, after, margin)
    assert decision.low <= decision.ratio <= decision.high and decision.margin == margin
    scaled = decide([1024 * each for each in before], [1024 * each for each in reversed(after)], margin)
    assert scaled == decision


def test_many_runs_whose_medians_lie_outside_widen_the_interval() -> None:
    before, after = [1.0] * 20 + [2.0] * 21, [1.0] * 21 + [2.0] * 20
    decision = decide(before, after)
    assert decision.ratio == 0.5 == decision.low and decision.high >= 1


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    assert decide(numpy.array([1.0, 1, 1]), numpy.array([2.0, 2, 2])).verdict == "faster"  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, None, True, "1", 1e200, 1j])
@pytest.mark.parametrize("at", [0, 1])
def test_what_is_no_throughput_is_refused(bad: Any, at: int) -> None:
    given = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    given[at][2] = bad
    with pytest.raises(LabError, match=f"^{('before', 'after')[at]} = .* in one run, and a throughput is positive"):
        decide(*given)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_runs_are_refused(count: int) -> None:
    with pytest.raises(LabError, match=f"before = {count} runs, and 3 are the fewest that can tell: try 3 runs"):
        decide([1.0] * count, [1.0] * 3)
    with pytest.raises(LabError, match=f"after = {count} runs"):
        decide([1.0] * 3, [1.0] * count)


@pytest.mark.parametrize("margin", [-0.01, 1.5, math.nan, None, "3 %"])
def test_a_margin_out_of_range_is_refused(margin: Any) -> None:
    with pytest.raises(LabError, match=r"^margin = "):
        decide([1.0] * 3, [1.0] * 3, margin)
