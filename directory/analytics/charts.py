"""The charts of a report: which figures, how drawn, and what each says in one sentence.

Owns the choice of marks and colours. Every chart comes in a wide and a narrow drawing, of which
the page shows one, and with a sentence that says what is to be seen without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from directory.analytics import svg
from directory.analytics.figures import CurvePoint, Extra, Figures, Mark, TimeBucket
from directory.analytics.svg import NARROW, WIDE, Canvas, Scale
from directory.analytics.totals import SOURCES
from directory.analytics.words import NBSP, capacity, count, duration, percent

SOURCE_NAMES: Final = {
    "own": "own pool",
    "host": "host tier",
    "peer": "other pool",
    "store": "store",
    "simulated": "hit",
}
SOURCE_COLOURS: Final = {name: f"--{name}" for name in SOURCES}
COMPUTED: Final = "computed"
EVER_SHOWN_FACTOR: Final = 3
CURVE_SPAN: Final = 4096
"""How many times smaller than the largest useful cache the curve begins."""


class Chart(NamedTuple):
    """A drawing in both widths, its heading, its sentence and its legend (name, colour)."""

    name: str
    heading: str
    sentence: str
    drawings: str
    legend: tuple[tuple[str, str], ...]


def all_charts(figures: Figures) -> list[Chart]:
    """Those of a report, in order; one for which there is nothing is left out."""
    makers = (over_time, miss_ratio, reuse_distance, working_set)
    return [chart for maker in makers if (chart := maker(figures)) is not None]


def used_sources(figures: Figures) -> list[str]:
    """The sources that had hits, in their fixed order."""
    return [source for source in SOURCES if getattr(figures.hit_tokens, source)]


def over_time(figures: Figures) -> Chart | None:
    """Where prompt tokens came from, as shares of each stretch of time."""
    buckets = figures.over_time
    if len(buckets) < 2:
        return None
    sources = used_sources(figures)
    ratios = sorted(bucket.token_hit_ratio for bucket in buckets if bucket.requests)
    middle = ratios[len(ratios) // 2]
    sentence = (
        f"{percent(figures.token_hit_ratio)} of all prompt tokens were hits; in half of the "
        f"stretches of {duration(figures.bucket_s)} at least {percent(middle)}."
    )

    def draw(canvas: Canvas) -> list[str]:
        end = buckets[-1].at_s + figures.bucket_s
        across = Scale(0, end, canvas.left, canvas.width - canvas.right)
        up = Scale(0, 1, canvas.floor, canvas.top)
        shares = svg.ticks(1, 4 if canvas.narrow else 5)
        parts = []
        for bucket in buckets:
            parts += _column(bucket, figures, sources, across, up)
        parts.append(svg.y_axis(canvas, up, shares, [percent(s, places=0) for s in shares]))
        at = [(across(s), name) for s, name in _time_ticks(end, canvas)]
        return [*parts, svg.x_axis(canvas, at, "time since the first request")]

    legend = [(SOURCE_NAMES[source], SOURCE_COLOURS[source]) for source in sources]
    return Chart(
        "over-time",
        "Hits by source over time",
        sentence,
        _both("over-time", "Share of prompt tokens by source over time", sentence, draw),
        (*legend, (COMPUTED, "--computed")),
    )


def _column(
    bucket: TimeBucket, figures: Figures, sources: list[str], across: Scale, up: Scale
) -> list[str]:
    if not bucket.prompt_tokens:
        return []
    left, right = across(bucket.at_s), across(bucket.at_s + figures.bucket_s)
    # Columns touch, or a hair of the ground would make stripes of them.
    width = right - left + 0.3
    hint = f"{duration(bucket.at_s)}: {count(bucket.prompt_tokens)} tokens, " + ", ".join(
        f"{SOURCE_NAMES[s]} {percent(getattr(bucket.hit_tokens, s) / bucket.prompt_tokens)}"
        for s in sources
    )
    parts, below = [], 0.0
    for source in sources:
        share = getattr(bucket.hit_tokens, source) / bucket.prompt_tokens
        y = up(below + share)
        parts.append(svg.bar(left, y, width, up(below) - y, SOURCE_COLOURS[source], hint))
        below += share
    return [*parts, svg.bar(left, up(1), width, up(below) - up(1), "--computed", hint)]


def miss_ratio(figures: Figures) -> Chart | None:
    """Hit ratio of one LRU cache over its capacity, with what is there now."""
    if not figures.curve:
        return None
    points = shown_points(figures)
    low, largest = points[0].pages, points[-1].pages
    size = figures.page_bytes
    enough = capacity(figures.pages_for_95_percent, size)
    sentence = (
        f"A cache that never evicts would hit {percent(figures.block_hit_ratio_max)} of all "
        f"blocks; {enough} are enough for 95 % of those hits."
    )
    for mark in figures.present[-1:]:
        sentence += (
            f" At the {mark.label} of {capacity(mark.pages, size)} the curve is at "
            f"{percent(mark.block_hit_ratio)}."
        )
    unit = size or 1
    over = svg.FLAG_PX * max(1, len(figures.present)) + 8
    canvases = (
        WIDE._replace(top=over, height=WIDE.height + over),
        NARROW._replace(top=over, height=NARROW.height + over),
    )

    def draw(canvas: Canvas) -> list[str]:
        across = Scale(
            low * unit, largest * unit, canvas.left, canvas.width - canvas.right, log=True
        )
        high = max(0.01, figures.block_hit_ratio_max) * 1.08
        up = Scale(0, min(1.0, high), canvas.floor, canvas.top)
        shares = svg.ticks(min(1.0, high), 5)
        places = 0 if shares[-1] >= 0.05 else 1
        parts = [svg.y_axis(canvas, up, shares, [percent(s, places=places) for s in shares])]
        line = [(across(p.pages * unit), up(p.block_hit_ratio)) for p in points]
        ground = [(x, canvas.floor) for x, _ in line]
        parts.append(svg.area(line, ground, "--curve-fill"))
        parts.append(svg.path(line, "--curve"))
        about = 4 if canvas.narrow else 8
        at = [
            (across(value), capacity(round(value / unit), size).removesuffix(f"{NBSP}pages"))
            for value in svg.log_ticks(low * unit, largest * unit, about, 2 if size else 10)
        ]
        for row, mark in enumerate(figures.present):
            x = across(mark.pages * unit)
            words = f"{mark.label} {capacity(mark.pages, size)}"
            parts.append(svg.flag(canvas, x, words, row=row))
            parts.append(svg.dot(x, up(mark.block_hit_ratio), "--mark", _hint(mark, size)))
        parts += [
            svg.dot(across(e.pages * unit), up(e.block_hit_ratio), "--curve", _hint(e, size))
            for e in figures.more
        ]
        title = "capacity" if size else f"capacity, pages of {figures.page_tokens} tokens"
        return [*parts, svg.x_axis(canvas, at, f"{title} (logarithmic)")]

    return Chart(
        "miss-ratio",
        "Would more memory help?",
        sentence,
        _both(
            "miss-ratio", "Block hit ratio of an LRU cache by capacity", sentence, draw, canvases
        ),
        (),
    )


def _hint(point: Mark | Extra, size: int | None) -> str:
    return f"{capacity(point.pages, size)}: {percent(point.block_hit_ratio)}"


def reuse_distance(figures: Figures) -> Chart | None:
    """How many other pages were used between two uses of a page."""
    buckets = figures.reuse_distance
    reused = sum(bucket.pages for bucket in buckets)
    if not reused:
        return None
    present = figures.present[-1].pages if figures.present else None
    middle = _median(figures, reused)
    sentence = f"Half of all reuse comes back within {count(middle)} different pages"
    if present is None:
        sentence += f" ({capacity(middle, figures.page_bytes)})." if figures.page_bytes else "."
        legend: tuple[tuple[str, str], ...] = ()
    else:
        mark = figures.present[-1]
        within = mark.block_hit_ratio / figures.block_hit_ratio_max
        sentence += f"; {percent(within)} of it fits into the {mark.label}."
        legend = ((f"fits into the {mark.label}", "--curve"), ("needs more", "--computed-strong"))

    def draw(canvas: Canvas) -> list[str]:
        top = max(bucket.pages for bucket in buckets) / reused
        up = Scale(0, top * 1.05, canvas.floor, canvas.top)
        shares = svg.ticks(top * 1.05, 4)
        places = 0 if shares[-1] >= 0.05 else 1
        parts = [svg.y_axis(canvas, up, shares, [percent(s, places=places) for s in shares])]
        step = canvas.plot_width / len(buckets)
        at = []
        for number, bucket in enumerate(buckets):
            x = canvas.left + step * number
            fits = present is None or bucket.last <= present
            share = bucket.pages / reused
            hint = f"{count(bucket.first)} to {count(bucket.last)} pages: {percent(share)} of reuse"
            colour = "--curve" if fits else "--computed-strong"
            y = up(share)
            parts.append(svg.bar(x + 1, y, step - 2, canvas.floor - y, colour, hint))
            at.append((x + step / 2, edge(bucket.last)))
        return [
            *parts,
            svg.x_axis(canvas, at, "reuse distance: up to so many different pages", marks=False),
        ]

    return Chart(
        "reuse-distance",
        "How soon do pages come back?",
        sentence,
        _both("reuse-distance", "Reused pages by reuse distance", sentence, draw),
        legend,
    )


def edge(pages: int) -> str:
    """A power of two in two figures: `64`, `8.2k`, `131k`."""
    if pages < 1000:
        return str(pages)
    unit, name = (1e6, "M") if pages >= 1e6 else (1e3, "k")
    return f"{pages / unit:.0f}{name}" if pages >= 10 * unit else f"{pages / unit:.2g}{name}"


def _median(figures: Figures, reused: int) -> int:
    """Upper end of the bucket in which the middle reuse lies."""
    below = 0
    for bucket in figures.reuse_distance:
        below += bucket.pages
        if 2 * below >= reused:
            return bucket.last
    raise AssertionError("the buckets hold all reuse")


def working_set(figures: Figures) -> Chart | None:
    """Different pages in use in the last minutes."""
    samples = figures.working_set
    if len(samples) < 2:
        return None
    span = figures.span_s
    peaks = {name: max(sample.pages[name] for sample in samples) for name in samples[0].pages}
    names = shown_windows(figures)
    windows = [name for name in names if name != "ever"]
    size = figures.page_bytes
    said = [f"{capacity(peaks[name], size)} within {name}" for name in windows]
    sentence = (
        f"At most {', '.join(said)}; " if said else ""
    ) + f"{capacity(peaks['ever'], size)} were used at all."
    colours = dict(zip(("ever", *windows), ("--computed-strong", *_LINES), strict=False))
    legend = tuple((name if name == "ever" else f"last {name}", colours[name]) for name in names)
    unit = size or 1

    def draw(canvas: Canvas) -> list[str]:
        highest = max(peaks[name] for name in names)
        present = figures.present[-1].pages if figures.present else 0
        top = 1.08 * (present if highest < present <= 3 * highest else highest)
        up = Scale(0, top * unit, canvas.floor, canvas.top)
        across = Scale(0, max(span, 1e-6), canvas.left, canvas.width - canvas.right)
        values = _size_ticks(top * unit, 4) if size else svg.ticks(top, 4)
        names_y = [capacity(round(v / unit), size).removesuffix(f"{NBSP}pages") for v in values]
        parts = [svg.y_axis(canvas, up, values, names_y)]
        for name in names:
            line = [(across(s.at_s), up(s.pages[name] * unit)) for s in samples]
            dash = "5 4" if name == "ever" else ""
            parts.append(svg.path(line, colours[name], dash=dash))
        for mark in figures.present[-1:]:
            if mark.pages <= top:
                y = up(mark.pages * unit)
                parts.append(svg.line(canvas.left, y, canvas.width - canvas.right, y, "flag"))
                parts.append(
                    svg.text(canvas.left + 6, y - 6, mark.label, anchor="start", css="flagged")
                )
        at = [(across(s), name) for s, name in _time_ticks(span, canvas)]
        return [*parts, svg.x_axis(canvas, at, "time since the first request")]

    canvases = (WIDE._replace(left=64), NARROW._replace(left=58))
    return Chart(
        "working-set",
        "Working set",
        sentence,
        _both("working-set", "Different pages in use over time", sentence, draw, canvases),
        legend,
    )


def shown_points(figures: Figures) -> list[CurvePoint]:
    """The part of the curve that is drawn: not the long flat beginning."""
    low = max(1, figures.curve[-1].pages // CURVE_SPAN)
    return [point for point in figures.curve if point.pages >= low]


def shown_windows(figures: Figures) -> list[str]:
    """The windows of working sets that are drawn: those shorter than the whole."""
    samples = figures.working_set
    peaks = {name: max(sample.pages[name] for sample in samples) for name in samples[0].pages}
    windows = [name for name in peaks if name != "ever" and _seconds(name) < figures.span_s]
    # What was ever used only grows; where it dwarfs the windows the sentence has it alone.
    ever = not windows or peaks["ever"] <= EVER_SHOWN_FACTOR * max(peaks[w] for w in windows)
    return [*windows, "ever"] if ever else windows


_LINES: Final = ("--own", "--host", "--peer")


def _both(
    name: str,
    title: str,
    sentence: str,
    draw: Callable[[Canvas], list[str]],
    canvases: tuple[Canvas, Canvas] = (WIDE, NARROW),
) -> str:
    return "".join(svg.picture(canvas, name, title, sentence, draw(canvas)) for canvas in canvases)


def _time_ticks(end_s: float, canvas: Canvas) -> list[tuple[float, str]]:
    """Round times up to the end."""
    about = 4 if canvas.narrow else 8
    steps = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10800, 21600, 43200, 86400, 604800)
    step = next((s for s in steps if s * about >= end_s), steps[-1])
    while end_s / step > 2 * about:
        step *= 2
    return [(at * step, duration(at * step) if at else "0") for at in range(int(end_s / step) + 1)]


def _size_ticks(high: float, about: int) -> list[float]:
    """Round binary sizes from 0 up."""
    step = 1.0
    while high / step > about * 1.5:
        step *= 2
    return [step * at for at in range(int(high / step) + 1)]


def _seconds(window: str) -> int:
    number, unit = window.split()
    return int(number) * (3600 if unit == "h" else 60)
