"""The charts of a report as one PNG, drawn with matplotlib where that is installed.

Owns the layout of the picture. Figures come from `figures.py`, and are the page's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from directory.analytics.charts import (
    SOURCE_NAMES,
    all_charts,
    edge,
    shown_points,
    shown_windows,
    used_sources,
)
from directory.analytics.figures import Figures
from directory.analytics.words import capacity, count, duration, percent

COLOURS: Final = {
    "own": "#2563c9",
    "host": "#0f8a6d",
    "peer": "#d97706",
    "store": "#8b4fd0",
    "simulated": "#2563c9",
}
COMPUTED: Final = "#dde1e7"
BEYOND: Final = "#a4acb9"
INK, SOFT, MARK = "#1b1f26", "#59616e", "#c2410c"
LINES: Final = (COLOURS["own"], COLOURS["host"], COLOURS["peer"], BEYOND)


class NoPictures(Exception):
    """matplotlib is not installed; the message says how to get it."""


def draw(figures: Figures, target: Path) -> None:
    """Write the PNG. Raises `NoPictures` and `OSError`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise NoPictures(
            "a PNG needs matplotlib: pip install 'treecored[analytics]' (the HTML report needs "
            "nothing)"
        ) from None
    sheet = Figure(figsize=(13, 9), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(sheet)
    axes = sheet.subplots(2, 2)
    sheet.suptitle(
        f"{Path(figures.file).name}: block hit ratio {percent(figures.block_hit_ratio)}, token hit "
        f"ratio {percent(figures.token_hit_ratio)}, {count(figures.requests)} requests over "
        f"{duration(figures.span_s)}",
        color=INK,
    )
    headings = {chart.name: chart.heading for chart in all_charts(figures)}
    drawings = (
        ("over-time", _over_time),
        ("miss-ratio", _curve),
        ("reuse-distance", _distances),
        ("working-set", _working_set),
    )
    for axis, (name, drawing) in zip(axes.flat, drawings, strict=True):
        axis.tick_params(colors=SOFT)
        axis.spines[["top", "right"]].set_visible(False)
        if name not in headings:
            axis.set_axis_off()
            continue
        axis.set_title(headings[name], loc="left", color=INK, fontsize=12)
        drawing(axis, figures)
    sheet.savefig(target, format="png")


def _over_time(axis: Any, figures: Figures) -> None:
    minutes = [bucket.at_s / 60 for bucket in figures.over_time]
    below = [0.0] * len(minutes)
    width = figures.bucket_s / 60
    for source in used_sources(figures):
        shares = [
            100 * getattr(b.hit_tokens, source) / max(1, b.prompt_tokens) for b in figures.over_time
        ]
        axis.bar(
            minutes, shares, width, below, align="edge", color=COLOURS[source],
            label=SOURCE_NAMES[source],
        )  # fmt: skip
        below = [a + b for a, b in zip(below, shares, strict=True)]
    rest = [
        100 - b if bucket.prompt_tokens else 0.0
        for b, bucket in zip(below, figures.over_time, strict=True)
    ]
    axis.bar(minutes, rest, width, below, align="edge", color=COMPUTED, label="computed")
    axis.set_ylim(0, 100)
    axis.set_xlabel("minutes since the first request", color=SOFT)
    axis.set_ylabel("% of prompt tokens", color=SOFT)
    axis.legend(loc="upper right", fontsize=9)


def _curve(axis: Any, figures: Figures) -> None:
    size = figures.page_bytes
    unit, points = size or 1, shown_points(figures)
    axis.plot(
        [point.pages * unit for point in points],
        [100 * point.block_hit_ratio for point in points],
        color=COLOURS["own"],
    )
    axis.set_xscale("log", base=2 if size else 10)
    axis.set_ylim(bottom=0)
    for mark, style in zip(figures.present, ("--", ":"), strict=False):
        axis.axvline(
            mark.pages * unit, color=MARK, linestyle=style,
            label=f"{mark.label} {capacity(mark.pages, size)}: {percent(mark.block_hit_ratio)}",
        )  # fmt: skip
    if figures.present:
        axis.legend(loc="upper left", fontsize=9)
    _name_ticks(axis.xaxis, size)
    axis.set_xlabel(f"capacity, pages of {figures.page_tokens} tokens (logarithmic)", color=SOFT)
    axis.set_ylabel("block hit ratio, %", color=SOFT)


def _distances(axis: Any, figures: Figures) -> None:
    reused = sum(bucket.pages for bucket in figures.reuse_distance)
    present = figures.present[-1].pages if figures.present else None
    for number, bucket in enumerate(figures.reuse_distance):
        fits = present is None or bucket.last <= present
        colour = COLOURS["own"] if fits else BEYOND
        axis.bar(number, 100 * bucket.pages / reused, color=colour)
    stride = -(-len(figures.reuse_distance) // 12)
    places = range(0, len(figures.reuse_distance), stride)
    axis.set_xticks(places, [edge(figures.reuse_distance[at].last) for at in places])
    axis.set_xlabel("reuse distance: up to so many different pages", color=SOFT)
    axis.set_ylabel("% of reused pages", color=SOFT)


def _working_set(axis: Any, figures: Figures) -> None:
    size = figures.page_bytes
    minutes = [sample.at_s / 60 for sample in figures.working_set]
    for name, colour in zip(shown_windows(figures), LINES, strict=False):
        pages = [sample.pages[name] * (size or 1) for sample in figures.working_set]
        label = name if name == "ever" else f"last {name}"
        style = "--" if name == "ever" else "-"
        axis.plot(minutes, pages, label=label, linestyle=style, color=colour)
    axis.set_ylim(bottom=0)
    _name_ticks(axis.yaxis, size)
    axis.set_xlabel("minutes since the first request", color=SOFT)
    axis.set_ylabel("different pages in use", color=SOFT)
    axis.legend(fontsize=9)


def _name_ticks(axis: Any, page_bytes: int | None) -> None:
    """Values in bytes or pages, in words."""
    from matplotlib.ticker import FuncFormatter

    unit = page_bytes or 1
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: capacity(round(value / unit), page_bytes))
    )
