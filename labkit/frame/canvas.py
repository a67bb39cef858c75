"""A figure that lives as long as its panel: artists move, and only changed rectangles leave the kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, NullLocator

from labkit.device import Spread
from labkit.frame.style import MARKS, Page
from labkit.frame.ticks import Rounded, Ticks, linear, logarithmic
from labkit.wording import show

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
A = TypeVar("A", bound=Artist)
Point = tuple[float, float]
Interval = tuple[float, float, float]  # low, middle, high


def quartiles(spread: Spread, factor: float = 1.0) -> Interval:
    """Lower quartile, median and upper quartile, in another unit where a factor says so.

    >>> quartiles(Spread.of([1, 2, 3]), 10)
    (15.0, 20.0, 25.0)
    """
    return factor * spread.lower, factor * spread.median, factor * spread.upper


def polyline(segments: Iterable[Iterable[Point]]) -> tuple[list[float], list[float]]:
    """Segments, each a list of (x, y), as the data of one line with gaps between them.

    >>> polyline([[(0, 1), (2, 1)], [(3, 4), (5, 4)]])
    ([0, 2, nan, 3, 5, nan], [1, 1, nan, 4, 4, nan])
    """
    points = [point for segment in segments for point in (*segment, (math.nan, math.nan))]
    return [x for x, _ in points], [y for _, y in points]


@dataclasses.dataclass(frozen=True)
class Dots:
    """Medians and the bars that go with them."""

    bars: Line2D
    dots: Line2D

    def put(self, x: Sequence[float], intervals: Sequence[Interval]) -> None:
        """Upright, one at each x."""
        self.dots.set_data(x, [middle for _, middle, _ in intervals])
        self.bars.set_data(*polyline([(at, low), (at, high)] for at, (low, _, high) in zip(x, intervals, strict=True)))

    def lay(self, rows: Sequence[float], intervals: Sequence[Interval]) -> None:
        """Lying down, one a row."""
        self.dots.set_data([middle for _, middle, _ in intervals], rows)
        self.bars.set_data(
            *polyline([(low, row), (high, row)] for row, (low, _, high) in zip(rows, intervals, strict=True))
        )


@dataclasses.dataclass(frozen=True)
class Patch:
    """A rectangle of the picture in device pixels, from its upper left corner, row by row as runs of one colour.

    `colours`: red, green, blue and opacity of each run, a byte each; `lengths`: its pixels, as uint32.
    """

    x: int
    y: int
    width: int
    height: int
    colours: bytes
    lengths: bytes


class Canvas:
    """What an experiment draws on.

    `layout` makes the artists once, through `axes`, `line` and `text`; `draw` moves them. Every artist made here
    is drawn over a kept background; whatever else changes (a title that a teacher sets) makes that anew.
    """

    def __init__(self, page: Page, aspect: float = 0.6) -> None:
        self.aspect = aspect
        self.figure = Figure()
        self._agg: Any = FigureCanvasAgg(self.figure)
        self._roles: list[tuple[Artist, str, float]] = []
        self._moving: list[Artist] = []
        self._axis: list[Axis] = []
        self._questions: dict[Axes, Text] = {}
        self._gap = 0.0  # between axes side by side, in units of the page's text
        self._base: Any = None  # what stands still
        self._background: Any = None  # the same with the axes that move
        self._pixels: Pixels | None = None
        self.restyle(page)

    # what experiments call -----------------------------------------------------------------------------------------

    def axes(
        self, x: str, y: str, *, position: Any = 111, log: str = "", log2: str = "", whole: str = "", moving: str = "y"
    ) -> Axes:
        """Axes with a label and unit on each axis.

        `log`, `log2`, `whole` and `moving` name the axes that are logarithmic, with powers of ten or of two as ticks,
        that count, and that move.
        """
        axes = self.figure.add_subplot(position)
        axes.set(xlabel=x, ylabel=y, **{f"{name}scale": "log" for name in log + log2})
        axes.spines[["top", "right"]].set_visible(False)
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            choose = functools.partial(linear, whole=name in whole)
            if name in log + log2:
                choose = functools.partial(logarithmic, base=2 if name in log2 else 10)
            axis.set_minor_locator(NullLocator())
            axis.set_major_locator(Rounded(choose, functools.partial(self._apart, axes, name)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
            axis.set_animated(name in moving)
            if name in moving:
                self._axis.append(axis)
        self._dress(axes)
        return axes

    def beside(self, ratios: Sequence[float], gap: float) -> GridSpec:
        """Places for axes side by side, so far apart in units of the page's text that words fit between them."""
        self._gap = gap
        self._margins()
        return self.figure.add_gridspec(1, len(ratios), width_ratios=ratios)

    def line(self, axes: Axes, role: str, *, colour: str = "", label: str = "", **style: Any) -> Line2D:
        """A line or dots that look as their role does in all labs."""
        (line,) = axes.plot([], [], label=label, **{**MARKS.get(role, {}), **style})
        return self.paint(line, colour or role)

    def spread(self, axes: Axes, role: str = "measured", **style: Any) -> Dots:
        """Measured dots, each with a bar from its lower to its upper quartile."""
        bars = self.line(axes, "reference", colour=role, linewidth=1.6)
        return Dots(bars, self.line(axes, role, **style))

    def bar(self, axes: Axes, role: str, **style: Any) -> Line2D:
        """A horizontal bar: `set_data([low, high], [row, row])`."""
        striped = {"linestyle": (0, (0.5, 0.2)), "dash_capstyle": "butt"} if role == "wrong" else {}
        return self.line(
            axes, "reference", colour=role, **{"linewidth": 16, "solid_capstyle": "butt", **striped, **style}
        )

    def text(self, axes: Axes, words: str = "", *, role: str = "text", size: float = 1.0, **style: Any) -> Text:
        """Words at a place in data coordinates; `size` in units of the page's text."""
        return self.paint(axes.text(0, 0, words, **style), role, size)

    def label(self, axes: Axes, x: float, y: float, words: str, **style: Any) -> Text:
        """Words that never change, at a place in shares of the axes: they cost nothing when the rest moves."""
        label = axes.text(x, y, words, transform=axes.transAxes, **style)
        self._roles.append((label, "text", 1.0))
        self._colour(label, "text", 1.0)
        return label

    def paint(self, artist: A, role: str, size: float = 1.0) -> A:
        """Give an artist the colour of its role (words their size too), now and on every page, and let it move."""
        self._roles.append((artist, role, size))
        self._colour(artist, role, size)
        return self.move(artist)

    def move(self, artist: A) -> A:
        """Let an artist move that has colours of its own."""
        artist.set_animated(True)
        self._moving.append(artist)
        return artist

    def frame(
        self,
        axes: Axes,
        *,
        x: Point | None = None,
        y: Point | None = None,
        xticks: Sequence[float] = (),
        yticks: Sequence[float] = (),
    ) -> None:
        """Move the limits, and with them the ticks, which are round numbers; on an axis that moves it costs little.

        `xticks` and `yticks`: what has to be among the ticks, as a ceiling has, the weightiest first. Of two or more
        the outermost are the ends of the ticks.
        """
        for name, limits, among in (("x", x, xticks), ("y", y, yticks)):
            locator = _axis(axes, name).get_major_locator()
            if limits and isinstance(locator, Rounded):
                self._tick(axes, name, locator, tuple(map(_short, among)), None)
            if limits and tuple(getattr(axes, f"get_{name}lim")()) != limits:
                with self._quiet(axes, name):
                    getattr(axes, f"set_{name}lim")(*limits)

    def ticks(self, axes: Axes, *, x: Sequence[float] | None = None, y: Sequence[float] | None = None) -> None:
        """These ticks and no others until the limits move: for places that the result itself names."""
        for name, only in (("x", x), ("y", y)):
            locator = _axis(axes, name).get_major_locator()
            if only is not None and isinstance(locator, Rounded):
                self._tick(axes, name, locator, (), tuple(map(float, only)))

    def _tick(self, axes: Axes, name: str, locator: Rounded, among: Ticks, only: Ticks | None) -> None:
        if (locator.among, locator.only) != (among, only):
            with self._quiet(axes, name):
                locator.among, locator.only = among, only
                _axis(axes, name).stale = True

    def hide(self, axes: Axes, x: float, y: float) -> None:
        """Hide every artist and put a grey question mark where the answer will appear."""
        if axes not in self._questions:
            style = {"ha": "center", "va": "center", "fontweight": "bold"}
            self._questions[axes] = self.text(axes, "?", role="muted", size=1.9, **style)
        for artist in self._moving:
            artist.set_visible(False)
        self._questions[axes].set(position=(x, y), visible=True)

    def only(self, artist: Artist) -> None:
        """Hide every artist but one."""
        for each in self._moving:
            each.set_visible(each is artist)

    def show(self) -> None:
        """Make every artist visible again, and take the question marks away."""
        for artist in self._moving:
            artist.set_visible(artist not in self._questions.values())

    # what the lab calls --------------------------------------------------------------------------------------------

    def restyle(self, page: Page) -> None:
        """Follow the page: its width, pixel ratio, text size and colours."""
        self.page = page
        self.figure.set_dpi(96 * page.ratio)
        self.figure.set_size_inches(page.width / 96, self.height / 96)
        self.figure.set_facecolor(page.background)
        self._margins()
        for axes in self.figure.axes:
            self._dress(axes)
        for artist, role, size in self._roles:
            self._colour(artist, role, size)
        self._base = self._pixels = None

    @property
    def height(self) -> int:
        """CSS pixels."""
        return max(260, min(round(self.page.width * self.aspect), self.page.height))

    @property
    def columns(self) -> float:
        """The width between the margins, in units of the page's text."""
        return self.page.width / self.page.font - 7.6

    @property
    def lines(self) -> float:
        """The height between the margins, in units of the page's text."""
        return self.height / self.page.font - 4.8

    def points(self, width: float) -> float:
        """The size of words of which the longest, `width` times as wide as the page's text, has to fit in."""
        return self.page.points * min(1.0, self.page.width / (width * self.page.font))

    def clear(self) -> None:
        """An empty figure, for the next experiment."""
        self.figure.clear()
        self._roles.clear()
        self._moving.clear()
        self._axis.clear()
        self._questions.clear()
        self._gap = 0.0
        self._base = self._pixels = None

    def draw(self) -> Pixels:
        """Draw, and return the picture as (rows, columns, 4) bytes."""
        renderer = self._agg.get_renderer()
        if self._base is None or self.figure.stale:
            self._margins()
            self._agg.draw()
            self._base, self._background = self._agg.copy_from_bbox(self.figure.bbox), None
        self._agg.restore_region(self._background or self._base)
        if self._background is None:
            for axis in self._axis:
                axis.draw(renderer)
            self._background = self._agg.copy_from_bbox(self.figure.bbox)
        for artist in self._over():
            artist.draw(renderer)
        self.figure.stale = False  # drawing is no styling
        return np.asarray(self._agg.buffer_rgba())

    def patches(self) -> list[Patch]:
        """Draw, and return what changed since the last call."""
        pixels = self.draw()
        boxes = changed(self._pixels, pixels)
        self._pixels = pixels.copy()
        return [encode(pixels, *box) for box in boxes]

    def forget(self) -> None:
        """The next patches are the whole picture."""
        self._pixels = None

    # inside --------------------------------------------------------------------------------------------------------

    def _over(self) -> list[Artist]:
        """What is drawn over the background: artists that move, then the frame, which an image would cover."""
        frames: list[Artist] = [spine for axes in self.figure.axes for spine in axes.spines.values()]
        return sorted([*self._moving, *frames], key=lambda artist: artist.get_zorder())

    def _colour(self, artist: Any, role: str, size: float) -> None:
        artist.set_color(self.page.colour(role))
        if isinstance(artist, Text):
            artist.set_fontsize(self.page.points * size)

    def _margins(self) -> None:
        """Room for the labels, in units of the page's text; for a title only where somebody set one."""
        em, width, height = self.page.font, self.page.width, self.height
        titled = any(axes.get_title(loc) for axes in self.figure.axes for loc in ("left", "center", "right"))
        gap = self._gap * em
        self.figure.subplots_adjust(
            left=5.4 * em / width,
            right=1 - 2.2 * em / width,
            bottom=3.6 * em / height,
            top=1 - (2.2 if titled else 1.2) * em / height,
            wspace=2 * gap / (width - 7.6 * em - gap) if gap else None,
        )

    def _dress(self, axes: Axes) -> None:
        """Colours and sizes of everything that matplotlib made for the axes."""
        ink, muted, size = self.page.text, self.page.colour("muted"), self.page.points
        axes.set_facecolor(self.page.background)
        axes.tick_params(colors=muted, labelcolor=ink, labelsize=size)
        axes.spines[:].set_color(muted)
        for title in (axes.title, axes._left_title, axes._right_title):  # type: ignore[attr-defined]
            title.set(color=ink, fontsize=size * 1.07)
        axes.xaxis.label.set(color=ink, fontsize=size)
        axes.yaxis.label.set(color=ink, fontsize=size)
        box = axes.get_position()
        axes.xaxis.set_label_coords(0.5, -2.4 * self.page.font / (box.height * self.height))
        axes.yaxis.set_label_coords(-4.1 * self.page.font / (box.width * self.page.width), 0.5)

    def _apart(self, axes: Axes, name: str) -> float:
        """How near two ticks can be, as a share of the axis, so that their numbers can be read."""
        box, em = axes.get_position(), self.page.font
        return 3.4 * em / (box.width * self.page.width) if name == "x" else 1.4 * em / (box.height * self.height)

    @contextlib.contextmanager
    def _quiet(self, axes: Axes, name: str) -> Iterator[None]:
        """Changes of an axis that moves leave what stands still as it is."""
        before = axes.stale, self.figure.stale
        yield
        if _axis(axes, name) in self._axis:
            self._background = None
            axes.stale, self.figure.stale = before


def _short(number: float) -> float:
    """Three digits of what is measured, all of what is counted."""
    return number if isinstance(number, int) else float(f"{number:.3g}")


def _axis(axes: Axes, name: str) -> Axis:
    return axes.xaxis if name == "x" else axes.yaxis


def encode(pixels: Pixels, top: int, bottom: int, left: int, right: int) -> Patch:
    """A rectangle of the picture as runs of one colour.

    Ten times faster to make than PNG, and the page paints them at once, where PNG is decoded some frames later; for
    that they are two to three times as many bytes.
    """
    part = np.ascontiguousarray(pixels[top:bottom, left:right]).view(np.uint32)[..., 0]
    words = part.ravel()
    starts = np.flatnonzero(np.concatenate([[True], words[1:] != words[:-1]]))
    lengths = np.diff(starts, append=words.size).astype(np.uint32)
    return Patch(left, top, right - left, bottom - top, words[starts].tobytes(), lengths.tobytes())


def changed(old: Pixels | None, new: Pixels, gap: int = 24) -> list[tuple[int, int, int, int]]:
    """The rectangles (top, bottom, left, right) in which two pictures differ; all of it where there is no old one."""
    if old is None or old.shape != new.shape:
        return [(0, new.shape[0], 0, new.shape[1])]
    differs = old.view(np.uint32)[..., 0] != new.view(np.uint32)[..., 0]
    return [
        (top, bottom, left, right)
        for top, bottom in _runs(differs.any(axis=1), gap)
        for left, right in _runs(differs[top:bottom].any(axis=0), gap)
    ]


def _runs(flags: np.ndarray[Any, np.dtype[np.bool_]], gap: int) -> list[tuple[int, int]]:
    """Stretches of True, as (first, last + 1); those closer than `gap` count as one."""
    places = np.flatnonzero(flags)
    if not places.size:
        return []
    cuts = np.flatnonzero(np.diff(places) > gap)
    firsts = [places[0], *places[cuts + 1]]
    lasts = [*places[cuts], places[-1]]
    return [(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]
