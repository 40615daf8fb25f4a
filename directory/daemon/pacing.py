"""Pacing: when the access log gets to work, and for how long, so that no answer feels it.

Owns the numbers and no clock. What is to be logged waits until there is something to do it for: a
match that comes right after other work finds the processor's caches full of that, and takes
longer, so work is done seldom and much at once, in pieces between which is looked whether somebody
asks. Where nobody ever pauses, it gets a share of the time once it has waited for long, and the
larger a one the fuller the queue is: nothing is dropped as long as half of the daemon's time is
enough for all that there is.
"""

from __future__ import annotations

from typing import Final

BATCH_US: Final = 250_000
"""So long a record may wait for more of its kind..."""
BATCH_FILL: Final = 1 / 8
"""...or until the queue is so full."""
AGAIN_US: Final = 100_000
"""What was broken off for who asks goes on so much later, or with the events, not in the very next
pause, so that less of what is asked comes right after it,..."""
MORE_FILL: Final = 1 / 128
"""...and where the queue is so full, ..."""
SOON_US: Final = 25_000
"""...so much later."""
PRESSED_FILL: Final = 1 / 2
"""A queue so full waits for no quiet moment any more,..."""
LATE_US: Final = 2_000_000
"""...nor does what was worth doing so long ago: it has..."""
SHARE_MIN: Final = 1 / 20
"""...this share of the time, and..."""
FULL: Final = 7 / 8
"""...when it is so full..."""
SHARE_MAX: Final = 1 / 2
"""...this one."""
BURST_US_MIN: Final = 250
"""Less is not begun, so that of many answers few are late and the others not at all."""
BURST_US_MAX: Final = 1_000
"""More is not done at once while somebody asks."""


def share_of(fill: float) -> float:
    """The share of the time that a queue has which is so full (0 to 1), where nobody pauses."""
    if fill < PRESSED_FILL:
        return 0.0
    part = min(1.0, (fill - PRESSED_FILL) / (FULL - PRESSED_FILL))
    return SHARE_MIN + part * (SHARE_MAX - SHARE_MIN)


def is_late(ready_us: int | None, now_us: int) -> bool:
    """Whether what was worth doing from a moment on waits for no quiet moment any more."""
    return ready_us is not None and now_us - ready_us >= LATE_US


def again_us(fill: float) -> int:
    """How long work that was broken off for who asks waits before it goes on."""
    if fill >= BATCH_FILL:
        return 0
    return SOON_US if fill >= MORE_FILL else AGAIN_US


def burst_us(others_us: int, fill: float, *, late: bool = False) -> int:
    """How long it may work now, for others have had the time for so long."""
    share = max(share_of(fill), SHARE_MIN if late else 0.0)
    earned_us = int(others_us * share / (1 - share))
    return min(earned_us, BURST_US_MAX) if earned_us >= BURST_US_MIN else 0
