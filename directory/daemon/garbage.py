"""When the control process looks for garbage: never where it would have to walk a whole tree.

Owns Python's collector in this process. What the directory lets go of is in no cycle, so that
counting references frees it; only a directory that is thrown away whole is nothing but cycles.
"""

from __future__ import annotations

import gc
from typing import Final

NEVER: Final = 1 << 30


def settle() -> None:
    """Once everything is there that stays: young objects are looked at as ever, old ones never."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


def sweep() -> None:
    """A directory was thrown away: find it."""
    gc.collect()
