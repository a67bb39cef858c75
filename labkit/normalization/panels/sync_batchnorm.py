"""Ranks of uneven size that synchronise their statistics."""

from __future__ import annotations

import math

from labkit.frame.canvas import Canvas, Interval
from labkit.frame.experiment import Experiment
from labkit.normalization import sync_batchnorm
from labkit.wording import percent, three


def share(error: float) -> str:
    """An error as a percentage, or its power of ten where it is no more than rounding.

    >>> share(0.25), share(2e-16)
    ('25 %', '2e-16')
    """
    return percent(error) if error > 1e-9 else f"{error:.1g}"


def interval(middle: float, deviation: float) -> Interval:
    """A mean, and a standard deviation to each side of it.

    >>> interval(1.0, 0.5)
    (0.5, 1.0, 1.5)
    """
    return middle - deviation, middle, middle + deviation


class Ranks(Experiment[sync_batchnorm.Ranks]):
    """Ranks of uneven size that synchronise their statistics."""

    title = "Uneven ranks"
    question = "How far is the gradient from the one batch's?"
    unit = "%"
    note = (
        "Measured on ranks that walk through the layers in lockstep, in one process. Mean and standard deviation of "
        "one channel at the first normalisation."
    )
    run = staticmethod(sync_batchnorm.ranks)
    shown = (sync_batchnorm.pooled, sync_batchnorm.lockstep)
    aspect = 0.42

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("activation of one channel", "", moving="xy")
        self.axes.yaxis.set_visible(False)
        canvas.frame(self.axes, x=(0, 1), y=(4, 0))
        self.each = canvas.spread(self.axes)
        self.right, self.wrong = (canvas.spread(self.axes, role, linestyle="none") for role in ("right", "wrong"))
        self.words = [canvas.text(self.axes, va="center", ha="left") for _ in range(6)]

    def draw(self, canvas: Canvas, result: sync_batchnorm.Ranks) -> None:
        R = len(result.counts)
        each = [interval(m, math.sqrt(v)) for m, v in zip(result.rank_means, result.rank_variances, strict=True)]
        used = interval(result.mean, math.sqrt(result.variance))
        whole = interval(result.right_mean, math.sqrt(result.right_variance))
        self.each.lay(range(R), each)
        self.right.lay([R, R + 1] if result.equal else [R + 1], [used, whole] if result.equal else [whole])
        self.wrong.lay([] if result.equal else [R], [] if result.equal else [used])
        low, high = min(low for low, _, _ in (*each, used, whole)), max(high for _, _, high in (*each, used, whole))
        wide = high - low
        room = min(0.7, 11.5 / canvas.columns)  # the share of the axes that the words take
        left = low - room / (1 - room) * 1.05 * wide
        canvas.frame(self.axes, x=(left, high + 0.05 * wide), y=(R + 1.6, -0.6), xticks=[low, high])
        names = [f"rank {rank}: {count} images" for rank, count in enumerate(result.counts)]
        for at, words in enumerate(self.words):
            name = [*names, "rank 0 normalises by", "all images"][at] if at < R + 2 else ""
            words.set(text=name, position=(left + 0.02 * wide, at))

    def answer(self, result: sync_batchnorm.Ranks) -> float:
        return 0.0 if result.equal else 100 * result.gradient.relative_error

    def headline(self, result: sync_batchnorm.Ranks) -> str:
        return f"{result.method}: the gradient is {share(result.gradient.relative_error)} off the one batch's"

    def describe(self, result: sync_batchnorm.Ranks) -> str:
        ranks = ", ".join(
            f"rank {rank} ({count} images) {_moments(mean, variance)}"
            for rank, (count, mean, variance) in enumerate(
                zip(result.counts, result.rank_means, result.rank_variances, strict=True)
            )
        )
        return (
            f"Mean and variance of channel {result.channel}: {ranks}. Rank 0 normalises by "
            f"{_moments(result.mean, result.variance)}, all images together have "
            f"{_moments(result.right_mean, result.right_variance)}. Rounding explains {result.tolerance.value:.1g}."
        )


def _moments(mean: float, variance: float) -> str:
    return f"{three(mean)} and {three(variance)}"
