"""The picture of a gradient's direction: the correct one and this one as arrows in the plane that holds both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from labkit.direction import Direction
from labkit.frame.canvas import Canvas
from labkit.wording import percent

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, right, low, high
LETTER, LINE = 0.58, 1.25  # width of a letter and height of a line, in units of the page's text
MOST = 9  # contributions that carry their labels


class Arrows:
    """Two arrows, each over the chain of its contributions; the error is the dotted line between their tips.

    `labels` name the contributions, as many as the chains have links.
    """

    def __init__(self, canvas: Canvas, position: Any = 111) -> None:
        self.canvas = canvas
        self.axes = canvas.axes("", "", position=position, moving="xy")
        self.axes.spines[:].set_visible(False)
        for axis in (self.axes.xaxis, self.axes.yaxis):
            axis.set_visible(False)
        self.roles = ("right", "wrong")
        self.shafts = [canvas.line(self.axes, role, marker="", linewidth=3.2) for role in self.roles]
        self.heads = [canvas.line(self.axes, role, linestyle="none", markersize=13) for role in self.roles]
        self.chains = [canvas.line(self.axes, role, linewidth=1.3, marker="o", markersize=4) for role in self.roles]
        self.error = canvas.line(self.axes, "reference", colour="muted", linestyle=":", linewidth=2)
        self.names = [canvas.text(self.axes, role=role, ha="center", va="center") for role in (*self.roles, "text")]
        self.links = [
            [canvas.text(self.axes, role=role, size=0.88, ha="center", va="center") for _ in range(MOST)]
            for role in self.roles
        ]

    def draw(
        self, plane: Direction, labels: Sequence[str] = (), names: Sequence[str] = ("correct", "this loop")
    ) -> None:
        """Show a plane; where the two gradients are one, there is one arrow."""
        tips = [_points([each])[0] for each in (plane.reference, plane.gradient)]
        chains = [_points(each) for each in (plane.reference_chain, plane.chain)]
        scale = self._frame([*tips, *chains[0], *chains[1]])
        for at in range(2):
            hidden = at == 1 and plane.equal
            self._arrow(at, (0, 0) if hidden else tips[at])
            linked = len(chains[at]) > 2 and not hidden
            self.chains[at].set_data(*zip(*chains[at], strict=True) if linked else ([], []))
        self.error.set_data(*zip(*tips, strict=True) if not plane.equal else ([], []))
        words = [*names, f"error {percent(plane.relative_error)}"]
        if plane.equal:
            words = [f"{names[1]} = {names[0]},\nwithin rounding", "", ""]
        self._label(plane, tips, chains, labels, words, scale)

    def _arrow(self, at: int, tip: Point) -> None:
        self.shafts[at].set_data([0, tip[0]], [0, tip[1]])
        self.heads[at].set_data(*([[tip[0]], [tip[1]]] if tip != (0, 0) else ([], [])))
        self.heads[at].set_marker((3, 0, math.degrees(math.atan2(tip[1], tip[0])) - 90))  # type: ignore[arg-type]

    def _frame(self, points: Sequence[Point]) -> float:
        """Limits with one scale on both axes and room for words; returns the width of a letter's em in data."""
        box, em = self.axes.get_position(), self.canvas.page.font
        width, height = box.width * self.canvas.page.width, box.height * self.canvas.height
        xs, ys = zip(*points, (0.0, 0.0), strict=True)
        wide, high = max(xs) - min(xs), max(ys) - min(ys)
        scale = max(wide / max(width - 11 * em, em), high / max(height - 6 * em, em), 1e-9)
        x, y = (max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2
        self.canvas.frame(self.axes, x=(x - scale * width / 2, x + scale * width / 2))
        self.canvas.frame(self.axes, y=(y - scale * height / 2, y + scale * height / 2))
        return float(scale * em)

    def _label(
        self,
        plane: Direction,
        tips: Sequence[Point],
        chains: Sequence[Sequence[Point]],
        labels: Sequence[str],
        words: Sequence[str],
        em: float,
    ) -> None:
        """Put every word beside what it names, where it covers neither a line nor another word."""
        lines = [((0.0, 0.0), tip) for tip in tips] + [tuple(tips)] if not plane.equal else [((0.0, 0.0), tips[0])]
        lines += [pair for chain in chains for pair in itertools.pairwise(chain)]
        taken: list[Box] = []
        middle = (sum(x for x, _ in tips) / 2, sum(y for _, y in tips) / 2)
        for text, word, at in zip(self.names, words, (*tips, middle), strict=True):
            self._place(text, word, at, lines, taken, em, size=1.0)
        for each, chain in enumerate(chains):
            hidden = (each == 1 and plane.equal) or len(chain) <= 2 or len(chain) - 1 > MOST
            for text, word, pair in itertools.zip_longest(self.links[each], labels, itertools.pairwise(chain)):
                if text is None:
                    break
                shown = "" if hidden or pair is None or word is None else word
                (x, y), (u, v) = pair or ((0.0, 0.0), (0.0, 0.0))
                self._place(text, shown, ((x + u) / 2, (y + v) / 2), lines, taken, em, size=0.88)

    def _place(
        self, text: Any, word: str, at: Point, lines: Iterable[Any], taken: list[Box], em: float, size: float
    ) -> None:
        text.set_text(word)
        if not word:
            return
        rows = word.split("\n")
        half = (LETTER * size * em * max(map(len, rows)) / 2, LINE * size * em * len(rows) / 2)
        (left, right), (low, high) = self.axes.get_xlim(), self.axes.get_ylim()
        best, cost = at, math.inf
        for ring, turn in itertools.product((1.0, 1.7, 2.6), range(12)):
            angle = math.pi * turn / 6 + math.pi / 2
            x = at[0] + math.cos(angle) * (half[0] + 0.35 * em) * (1 + 0.5 * (ring - 1))
            y = at[1] + math.sin(angle) * (half[1] + 0.35 * em) * ring
            box = (x - half[0], x + half[0], y - half[1], y + half[1])
            out = max(left - box[0], box[1] - right, low - box[2], box[3] - high, 0.0)
            here = 6.0 * sum(_overlap(box, other) for other in taken) + sum(_crosses(box, line) for line in lines)
            here += 100 * out / em + 0.4 * ring
            if here < cost:
                best, cost, chosen = (x, y), here, box
        text.set_position(best)
        taken.append(chosen)


def _points(rows: Any) -> list[Point]:
    return [(float(x), float(y)) for x, y in rows]


def _overlap(one: Box, other: Box) -> float:
    """The share of the first box that lies in the other."""
    wide = min(one[1], other[1]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[2], other[2])
    return max(wide, 0.0) * max(high, 0.0) / ((one[1] - one[0]) * (one[3] - one[2]))


def _crosses(box: Box, line: tuple[Point, Point]) -> bool:
    """Whether a line runs through a box, by 25 points on it."""
    (x, y), (u, v) = line
    steps = [k / 24 for k in range(25)]
    return any(box[0] <= x + k * (u - x) <= box[1] and box[2] <= y + k * (v - y) <= box[3] for k in steps)
