"""Numbers for people: the same words on the page, in pictures and in tables.

Owns the wording. It must never round a figure that is used any further.
"""

from __future__ import annotations

from typing import Final

BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
NBSP: Final = "\u00a0"
"""Between a number and its unit, so that no line breaks there."""
COUNT_UNITS: Final = ("", "k", "M", "G", "T")


def size(nbytes: float) -> str:
    """Bytes: `12.3 MiB`, `64 GiB`."""
    at = 0
    while abs(nbytes) >= 1024 and at < len(BYTE_UNITS) - 1:
        nbytes /= 1024
        at += 1
    return f"{_short(nbytes)}{NBSP}{BYTE_UNITS[at]}"


def count(number: float) -> str:
    """A count in three figures: `183 k`, `2.4 M`; exact below a thousand."""
    at = 0
    while abs(number) >= 999.5 and at < len(COUNT_UNITS) - 1:
        number /= 1000
        at += 1
    unit = f"{NBSP}{COUNT_UNITS[at]}" if COUNT_UNITS[at] else ""
    return f"{_short(number)}{unit}"


def percent(ratio: float, *, places: int = 1) -> str:
    """A fraction as a percentage: `36.6 %`."""
    return f"{100 * ratio:.{places}f}{NBSP}%"


def duration(seconds: float) -> str:
    """A length of time in its two largest units: `59 min`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 60:
        return f"{_short(seconds)}{NBSP}s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}{NBSP}min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}{NBSP}h {minutes}{NBSP}min" if minutes else f"{hours}{NBSP}h"
    days, hours = divmod(hours, 24)
    return f"{days}{NBSP}d {hours}{NBSP}h" if hours else f"{days}{NBSP}d"


def capacity(pages: int, page_bytes: int | None) -> str:
    """A cache's size: in bytes where they are known, in pages where not."""
    return named(pages, "page") if page_bytes is None else size(pages * page_bytes)


def named(number: int, noun: str) -> str:
    """A count with its noun: `1 request`, `12 k requests`."""
    return f"{count(number)}{NBSP}{noun}{'' if number == 1 else 's'}"


def _short(number: float) -> str:
    """Three figures at most, without trailing zeros."""
    if number == int(number) or abs(number) >= 100:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}".rstrip("0").rstrip(".")
