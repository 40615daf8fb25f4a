"""Fences and words as pure questions: may a copy start, and does it count?

Owns nothing; the counters are read through the function that is handed in. Never waits.
"""

from collections.abc import Callable, Iterable

from directory.core.actions import Fence, Word
from directory.core.ids import POOL_WORD, PoolId

ReadCounter = Callable[[PoolId, int], int]
"""(pool, index) -> value of a timeline, or of a word. Errors of the table pass through."""


def pending(fences: Iterable[Fence], read: ReadCounter) -> tuple[Fence, ...]:
    """Fences that have not passed; each is passed once its timeline has reached its value."""
    return tuple(f for f in fences if read(f.pool, f.timeline) < f.value)


def passed(fences: Iterable[Fence], read: ReadCounter) -> bool:
    """Whether every fence has passed (true of none)."""
    return all(read(f.pool, f.timeline) >= f.value for f in fences)


def mismatched(words: Iterable[Word], read: ReadCounter) -> tuple[Word, ...]:
    """Words that no longer have the reported value: their owner gave pages of the span up."""
    return tuple(w for w in words if read(w.pool, w.slot) != w.value)


def describe_fence(fence: Fence, value: int) -> str:
    """Say where a fence stands, for a log line or the detail of a failed copy."""
    name = {0: "forward", 1: "current"}.get(fence.timeline, str(fence.timeline))
    return f"pool {fence.pool} {name} timeline at {value}, needs {fence.value}"


def describe_word(word: Word, value: int) -> str:
    """Say which word moved on, for the detail of a void copy."""
    name = "pool word" if word.slot == POOL_WORD else f"span word {word.slot}"
    return f"pool {word.pool} {name} is {value}, was reported as {word.value}"
