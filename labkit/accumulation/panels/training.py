"""Two trainings that differ in nothing but the way to accumulate."""

from __future__ import annotations

import torch

from labkit.accumulation import training
from labkit.cached_runs import cache_runs
from labkit.frame.canvas import Canvas, polyline
from labkit.frame.experiment import Experiment


class Trainings(Experiment[training.Trainings]):
    """Two trainings that differ in nothing else."""

    title = "Two trainings"
    question = "After the last update: how much higher is the rule's loss?"
    unit = "nat per token"
    note = (
        "Measured: held-out loss per token. Thin: every seed. Thick: their mean. Same text, same weights at the start."
    )
    run = staticmethod(cache_runs(training.trainings))
    shown = (training.training,)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer steps", "held-out loss (nat per token)", whole="x", moving="xy")
        canvas.frame(self.axes, x=(0, 200), y=(2, 6))
        self.thin = [canvas.line(self.axes, "reference", colour=role, linewidth=0.8) for role in ("right", "wrong")]
        self.thick = [canvas.line(self.axes, role, marker="", linewidth=2.5) for role in ("right", "wrong")]
        self.words = [canvas.text(self.axes, ha="right") for _ in self.thick]

    def draw(self, canvas: Canvas, result: training.Trainings) -> None:
        updates = result.updates.tolist()
        known = torch.stack([result.right, result.wrong])
        finite = known[known.isfinite()]
        low, high = float(finite.min()), float(finite.max())
        pad = 0.16 * (high - low) + 0.01
        canvas.frame(self.axes, x=(0, updates[-1]), y=(low - pad, high + pad), xticks=[0, updates[-1]])
        self._name(canvas, result, 0.03 * (high - low))
        for at, losses in enumerate((result.right, result.wrong)):
            self.thin[at].set_data(*polyline(zip(updates, row, strict=True) for row in losses.tolist()))
            self.thick[at].set_data(updates, losses.mean(0).tolist())

    def _name(self, canvas: Canvas, result: training.Trainings, spare: float) -> None:
        """Put one word above all losses that stand where it stands, and the other below them."""
        end, last = int(result.updates[-1]), result.reached
        known = torch.stack([result.right, result.wrong])
        crossed = bool(known[0, :, last].mean() > known[1, :, last].mean())
        for words, word, above in zip(self.words, ("token-mean", result.rule), (crossed, not crossed), strict=True):
            wide = end * min(0.9, 0.6 * len(word) / canvas.columns)
            edge = max(0.98 * int(result.updates[last]), wide)
            there = known[..., (result.updates >= edge - wide) & (result.updates <= edge + 0.1 * end)]
            there = there[there.isfinite()] if there.isfinite().any() else known[..., 0]
            height = there.max() + spare if above else there.min() - spare
            words.set(text=word if last else "", position=(edge, float(height)), va="bottom" if above else "top")

    def answer(self, result: training.Trainings) -> float:
        return float(result.gaps.mean())

    def headline(self, result: training.Trainings) -> str:
        if result.progress < 1:
            return f"{int(result.updates[result.reached])} of {int(result.updates[-1])} updates"
        if result.diverged:
            return "A training diverges"
        return "More than the seeds explain" if result.differ else "No more than the seeds explain"

    def describe(self, result: training.Trainings) -> str:
        return result.verdict
