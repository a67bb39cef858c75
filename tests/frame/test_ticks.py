"""Ticks: few, inside, readable, and through what matters."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from labkit.frame.ticks import linear, logarithmic
from labkit.labs import Lab
from tests.made import Quick

apart = st.sampled_from([0.03, 0.09, 0.2, 0.4])


@given(st.floats(-10, 100), st.floats(0.01, 1000), st.floats(0, 1), apart, st.booleans())
def test_linear_ticks_are_few_inside_apart_and_hold_a_ceiling(
    low: float, span: float, share: float, apart: float, whole: bool
) -> None:
    ceiling = low + share * span
    for among in ((), (ceiling,), (low, ceiling)):
        ticks = linear(low, low + span, among, apart, whole)
        assert len(ticks) <= 5 and all(low - 1e-9 <= tick <= low + span + 1e-9 for tick in ticks)
        assert all(two - one > 0.999 * apart * span for one, two in itertools.pairwise(ticks))
        assert not among or among[0] in ticks
        assert not whole or all(tick % 1 == 0 for tick in ticks if tick not in among)
    if apart < 0.1 and not whole:
        assert len(linear(low, low + span, (), apart)) >= 3


@given(st.floats(-17, 2), st.floats(0.05, 20), st.floats(0, 1), apart, st.sampled_from([2, 10]))
def test_logarithmic_ticks_too(start: float, decades: float, share: float, apart: float, base: int) -> None:
    low, high = 10**start, 10 ** (start + decades)
    ceiling = low ** (1 - share) * high**share
    for among in ((), (min(max(ceiling, low), high),)):
        ticks = logarithmic(low, high, among, apart, base)
        assert len(ticks) <= 5 and all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)
        assert not among or any(math.isclose(among[0], tick) for tick in ticks)


def test_limits_bring_their_ticks_and_an_experiment_can_name_its_own() -> None:
    lab = Lab([Quick()])
    canvas, axes = lab._canvas, lab.figure.axes[0]
    canvas.frame(axes, y=(0, 1300), yticks=[640])
    assert list(axes.get_yticks()) == [0, 400, 640, 800, 1200]
    canvas.ticks(axes, y=[7, 9])
    assert list(axes.get_yticks()) == [7, 9]
    canvas.frame(axes, y=(0, 50))
    assert list(axes.get_yticks()) == [0, 20, 40]
