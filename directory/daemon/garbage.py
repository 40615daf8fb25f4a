"""When the control process looks for garbage: never where it would have to walk a whole tree.

Owns Python's collector in this process. What the directory lets go of is in no cycle, so that
counting references frees it; only a directory that is thrown away whole is nothing but cycles.
"""

from __future__ import annotations

import gc
from typing import Final

YOUNG: Final = 250
"""New objects between two looks at them: 50 microseconds. (Python's own is 700.)"""
MIDDLE: Final = 1
"""Such looks before one at what they left over: 150 microseconds. (Python's is 10, and 2 ms.)"""
NEVER: Final = 1 << 30


def settle() -> None:
    """Once everything is there that stays: young objects are looked at, few at a time, old ones
    never."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


def sweep() -> None:
    """A directory was thrown away: find it."""
    gc.collect()
