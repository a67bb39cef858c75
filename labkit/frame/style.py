"""What every lab looks like: the page it stands on, and one colour, line and marker for each role."""

from __future__ import annotations

import dataclasses
from typing import Any

from matplotlib import colors

# Okabe and Ito's palette, safe for colour blindness; blue is too dark on a dark page, sky blue is not.
# A role also has a line and a marker, so that colour never says anything alone.
COLOURS = {
    "right": ("#0072b2", "#56b4e9"),
    "wrong": ("#d55e00", "#f0843c"),
    "modelled": ("#0072b2", "#56b4e9"),
    "measured": ("#b5651d", "#e69f00"),
}
MARKS: dict[str, dict[str, Any]] = {
    "right": {"linestyle": "-", "marker": "o"},
    "wrong": {"linestyle": "--", "marker": "x", "markeredgewidth": 2},
    "reference": {"linestyle": "-", "linewidth": 1},
    "modelled": {"linestyle": "-", "linewidth": 2.5},
    "measured": {"linestyle": "none", "marker": "o"},
    "guess": {"linestyle": "none", "marker": "o", "markersize": 17, "fillstyle": "none", "markeredgewidth": 1.5},
}


@dataclasses.dataclass(frozen=True)
class Page:
    """The page a picture stands on, as the browser reports it: lengths in CSS pixels, colours as #rrggbb."""

    width: int = 640
    height: int = 10_000  # the highest that a picture may be
    ratio: float = 1.0
    font: float = 14.0
    text: str = "#212121"
    background: str = "#ffffff"

    @property
    def dark(self) -> bool:
        """Whether the background is darker than the text."""
        return _luminance(self.background) < _luminance(self.text)

    @property
    def points(self) -> float:
        """The page's text size in matplotlib's points; the figure's dpi is 96 × ratio."""
        return self.font * 72 / 96

    def colour(self, role: str) -> str:
        """The colour of a role on this page."""
        if role in COLOURS:
            return COLOURS[role][self.dark]
        share = {"muted": 0.66, "faint": 0.25, "paper": 0.0}.get(role, 1.0)
        return mix(self.text, self.background, share)


LIGHT = Page()
DARK = Page(text="#e0e0e0", background="#111111")


def mix(over: str, under: str, share: float) -> str:
    """`share` parts of one colour over the rest of another."""
    red, green, blue = (
        share * a + (1 - share) * b for a, b in zip(colors.to_rgb(over), colors.to_rgb(under), strict=True)
    )
    return colors.to_hex((red, green, blue))


def _luminance(colour: str) -> float:
    red, green, blue = colors.to_rgb(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
