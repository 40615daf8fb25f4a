"""Charts as text: axes, scales and marks of inline SVG. No script, no font, no outside request.

Owns the geometry. Colours are names of CSS variables, so that the page decides about light and
dark. A chart is drawn once for a wide page and once for a phone, because letters that are scaled
down with a picture cannot be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

CHAR_PX: Final = 6.4
"""Width of a letter of the charts' 12 px type, about."""
BOLD_CHAR_PX: Final = 8.0
"""The same of what is flagged, which is bold: more than it takes, for it must not be cut off."""
FLAG_PX: Final = 17
"""Height of a row of words above a plot."""


class Canvas(NamedTuple):
    """Size of a drawing and the margins around its plot, in px."""

    width: int
    height: int
    left: int = 48
    right: int = 16
    top: int = 24
    bottom: int = 44

    @property
    def narrow(self) -> bool:
        """Whether it is for a phone."""
        return self.width < 500

    @property
    def plot_width(self) -> int:
        """Px between the y axis and the right margin."""
        return self.width - self.left - self.right

    @property
    def floor(self) -> int:
        """The x axis."""
        return self.height - self.bottom


WIDE: Final = Canvas(860, 320)
NARROW: Final = Canvas(358, 270, left=48, right=12)


class Scale(NamedTuple):
    """Values low..high on px first..last, evenly or (`log`) by factors."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The px of a value, held inside the scale."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.0
        return self.first + share * (self.last - self.first)


def ticks(high: float, about: int) -> list[float]:
    """Round steps from 0 to `high` at most, about so many."""
    if high <= 0:
        return [0.0]
    rough = high / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [step * at for at in range(int(high / step * 1.000001) + 1)]


def log_ticks(low: float, high: float, about: int, base: int) -> list[float]:
    """Powers of `base` from low to high, thinned to about so many."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    stride = max(1, -(-(last - first + 1) // max(1, about)))
    return [float(base**power) for power in range(first, last + 1, stride)]


def text(
    x: float, y: float, words: str, *, anchor: str = "middle", css: str = "axis", fill: str = ""
) -> str:
    """Words at a point; anchor: start, middle, end."""
    style = f' style="fill:var({fill})"' if fill else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}"{style}>'
        f"{escape(words)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def path(points: Sequence[tuple[float, float]], colour: str, *, dash: str = "") -> str:
    """A line through points."""
    steps = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{steps}" class="line" style="stroke:var({colour})"{dashes}/>'


def area(
    upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], colour: str
) -> str:
    """The area between two lines over the same x."""
    steps = "L".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
    return f'<path d="M{steps}Z" class="area" style="fill:var({colour})"/>'


def bar(x: float, y: float, width: float, height: float, colour: str, hint: str) -> str:
    """A bar that says its numbers when it is pointed at."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.5, width):.1f}" '
        f'height="{max(0.0, height):.1f}" style="fill:var({colour})">'
        f"<title>{escape(hint)}</title></rect>"
    )


def dot(x: float, y: float, colour: str, hint: str) -> str:
    """A point that says its numbers when it is pointed at."""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="dot" style="fill:var({colour})">'
        f"<title>{escape(hint)}</title></circle>"
    )


def y_axis(canvas: Canvas, scale: Scale, at: Sequence[float], names: Sequence[str]) -> str:
    """Grid lines with their values."""
    parts = []
    for value, name in zip(at, names, strict=True):
        y = scale(value)
        parts.append(line(canvas.left, y, canvas.width - canvas.right, y, "grid"))
        parts.append(text(canvas.left - 8, y + 4, name, anchor="end"))
    return "".join(parts)


def x_axis(
    canvas: Canvas, at: Sequence[tuple[float, str]], title: str, *, marks: bool = True
) -> str:
    """The axis with values at px, those left out that would run into another or out of the box."""
    parts = [line(canvas.left, canvas.floor, canvas.width - canvas.right, canvas.floor, "base")]
    free = -math.inf
    for x, name in at:
        half = len(name) * CHAR_PX / 2
        if marks:
            parts.append(line(x, canvas.floor, x, canvas.floor + 4, "base"))
        x = min(max(x, half), canvas.width - half - 1)
        if x - half < free:
            continue
        parts.append(text(x, canvas.floor + 18, name))
        free = x + half + CHAR_PX
    parts.append(text(canvas.left + canvas.plot_width / 2, canvas.height - 6, title, css="title"))
    return "".join(parts)


def flag(canvas: Canvas, x: float, words: str, *, row: int = 0) -> str:
    """A vertical line with words above the plot, on the side that has room; rows from 0 down."""
    width = len(words) * BOLD_CHAR_PX
    if x + 6 + width <= canvas.width:
        at, anchor = x + 6, "start"
    elif width <= x - 6:
        at, anchor = x - 6, "end"
    else:  # as far to the right as it goes
        at, anchor = max(0.0, canvas.width - width), "start"
    y = FLAG_PX * (row + 1) - 2
    return line(x, y - 10, x, canvas.floor, "flag") + text(
        at, y, words, anchor=anchor, css="flagged"
    )


def picture(canvas: Canvas, name: str, title: str, summary: str, parts: Sequence[str]) -> str:
    """A whole drawing. name: its id on the page; title and summary: what a screen reader says."""
    css = "narrow" if canvas.narrow else "wide"
    key = f"{name}-{css}"
    return (
        f'<svg class="{css}" viewBox="0 0 {canvas.width} {canvas.height}" role="img" '
        f'aria-labelledby="{key}-title {key}-text" preserveAspectRatio="xMinYMin meet">'
        f'<title id="{key}-title">{escape(title)}</title>'
        f'<desc id="{key}-text">{escape(summary)}</desc>'
        f"{''.join(parts)}</svg>"
    )
