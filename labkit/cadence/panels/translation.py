"""A schedule translated into samples, and what that leaves untranslated."""

from __future__ import annotations

import itertools
import math

import torch

from labkit.cached_runs import cache_runs
from labkit.cadence import translation
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.wording import three

MOST = 1e6  # a ratio beyond it is a training that is lost


class Translated(Experiment[translation.Translated]):
    """The base batch, and a large one with more and more translated."""

    title = "Is translating enough?"
    question = "Schedule in samples, large batch: how many times the base batch's loss at the end?"
    unit = "times"
    note = (
        "Measured: noisy least squares, the same samples in all trainings; lines are means over the seeds. Loss above "
        "that of the true weights, in closed form."
    )
    run = staticmethod(cache_runs(translation.translated))
    shown = (translation.sgd, translation.adamw, translation.training)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("samples", "loss above the least", log="y", moving="xy")
        canvas.frame(self.axes, x=(0, 14000), y=(0.01, 10))
        styles = (("right", "-", 3.0), *(("wrong", style, 1.8) for style in ("-", "--", "-.", ":")))
        self.lines = [
            canvas.line(self.axes, role, marker="", linestyle=style, linewidth=width) for role, style, width in styles
        ]
        self.words = [canvas.text(self.axes, va="center", ha="left", size=0.9) for _ in styles]

    def draw(self, canvas: Canvas, result: translation.Translated) -> None:
        samples, curves = result.samples.tolist(), result.losses.mean(1)
        curves = torch.where(curves.isfinite() & (curves > 0), curves, math.nan)
        known = curves[curves.isfinite()]
        low, high = float(known.min()), min(float(known.max()), 1000 * float(curves[0, 0]))
        ends = curves[:, result.reached].nan_to_num(high).clamp(low, high).log()
        places = _apart(ends.tolist(), 1.1 / canvas.lines * (math.log(high / low) + 0.8))
        top = 1.5 * max(high, math.exp(max(places)))
        canvas.frame(self.axes, x=(0, samples[-1] * 1.75), y=(low / 1.5, top), xticks=[0, samples[-1]])
        for line, words, name, curve, place in zip(
            self.lines, self.words, result.names, curves.tolist(), places, strict=True
        ):
            line.set_data(samples, curve)
            words.set(text=name if result.reached else "", position=(samples[-1] * 1.03, math.exp(place)))

    def answer(self, result: translation.Translated) -> float:
        base, large = (float(result.losses[at, :, result.reached].mean()) for at in (0, 2))
        return min(large / base, MOST) if math.isfinite(large) else MOST

    def headline(self, result: translation.Translated) -> str:
        if result.progress < 1:
            return f"{int(result.samples[result.reached]):,} of {int(result.samples[-1]):,} samples"
        ratio = self.answer(result)
        return f"{result.factor} times the batch, schedule in samples: {three(ratio)} times the loss at the end"

    def describe(self, result: translation.Translated) -> str:
        return result.verdict


def _apart(places: list[float], least: float) -> list[float]:
    """The places moved up as far as needed so that no two are nearer than `least`, in the same order."""
    moved = list(places)
    order = sorted(range(len(places)), key=places.__getitem__)
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + least)
    return moved
