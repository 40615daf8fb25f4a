"""The headline as a picture: what a prompt costs on a replica, by where its prefix is.

Owns one SVG of bars, drawn from the result of the group `rows`: cold is what the other replica pays
without a shared cache. Pure but for the file. Letters are grey: pages are light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any, Final

BARS: Final = (
    ("cold", "computed anew, as a second replica does today", "#8a8a8a"),
    ("HiCache L2", "HiCache, own host tier (L2)", "#c7803a"),
    ("host", "treecored, host tier, computed by the other", "#2f7fb8"),
    ("peer", "treecored, the other replica's pool, same GPU", "#2f9c6a"),
    ("peer, other GPU", "treecored, the other replica's pool, over NVLink", "#7fb04a"),
    ("HiCache L1", "HiCache, own pool (L1)", "#c7a83a"),
    ("own", "treecored, own pool", "#5a6fc0"),
)
"""Column, what the bar says, colour; in the order of the bars."""
WIDTH: Final = 860
ROW: Final = 24
LEFT: Final = 330
RIGHT: Final = 90
TOP: Final = 34
STEPS: Final = (1, 2, 5)
"""Of each power of ten, that have a line."""
LINE: Final = 'stroke="#777" stroke-opacity="0.3"'


def svg(result: Mapping[str, Any]) -> str:
    """A group of bars a prompt length, on one logarithmic scale of milliseconds."""
    lengths = {int(length): row for length, row in result["rows"].items()}
    shown = {
        length: [
            (text, row[name]["median_ms"], colour) for name, text, colour in BARS if name in row
        ]
        for length, row in sorted(lengths.items())
    }
    values = [ms for bars in shown.values() for _, ms, _ in bars]
    low, high = math.log10(min(values) / 2), math.log10(max(values))
    height = sum(TOP + ROW * len(bars) for bars in shown.values())

    def across(ms: float) -> float:
        return (math.log10(ms) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    parts = [
        line
        for ms in (step * 10**power for power in range(1, 6) for step in STEPS)
        if low < math.log10(ms) < high
        for line in (
            f'<path d="M{LEFT + across(ms):.1f} {TOP - 8}V{height}" {LINE}/>',
            _text(LEFT + across(ms), height + 14, f"{ms:,} ms", anchor="middle"),
        )
    ]
    y = 0
    for length, bars in shown.items():
        y += TOP
        parts.append(_text(8, y - 10, f"{length:,} tokens", bold=True))
        for text, ms, colour in bars:
            width = across(ms)
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW - 6}" fill="{colour}"/>'
            )
            parts.append(_text(LEFT - 8, y + 13, text, anchor="end"))
            parts.append(_text(LEFT + width + 6, y + 13, f"{ms:,.0f} ms"))
            y += ROW
    about = "Time to the first token, medians, logarithmic scale"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 46}" role="img">'
    return "\n".join(
        [head, f"<title>{about}</title>", *parts, _text(8, y + 36, about), "</svg>", ""]
    )


def _text(x: float, y: float, text: str, *, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="bold"' if bold else ""
    style = f'font-family="sans-serif" font-size="12" fill="#777"{weight} text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(text)}</text>'
