"""Slot marks: which span slots something is true of, in memory that never moves.

Owns one byte a slot, in blocks that come when a slot of theirs is marked. A Python set is looked up
as fast, but now and then makes its table anew: with 5,000 slots that is a third of a millisecond of
fresh memory in the middle of a step that is to take a tenth.
"""

from __future__ import annotations

from typing import Final

BLOCK_SLOTS: Final = 4_096
"""A block is a page of memory."""


class SlotMarks:
    """A set of slots (numbers from 0 on)."""

    __slots__ = ("_blocks", "_count")

    def __init__(self) -> None:
        self._blocks: dict[int, bytearray] = {}
        self._count = 0

    def add(self, slot: int) -> None:
        """Mark one. Repeatable."""
        number, at = divmod(slot, BLOCK_SLOTS)
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = bytearray(BLOCK_SLOTS)
        self._count += not block[at]
        block[at] = 1

    def discard(self, slot: int) -> None:
        """Take the mark off one, if it has any."""
        number, at = divmod(slot, BLOCK_SLOTS)
        block = self._blocks.get(number)
        if block is not None and block[at]:
            block[at] = 0
            self._count -= 1

    def clear(self) -> None:
        """Take every mark off."""
        self._blocks.clear()
        self._count = 0

    def __contains__(self, slot: int) -> bool:
        block = self._blocks.get(slot // BLOCK_SLOTS)
        return block is not None and block[slot % BLOCK_SLOTS] == 1

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<SlotMarks {self._count} slots>"
