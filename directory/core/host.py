"""Host-tier slots: which page-sized pieces of the host memory are free.

Owns the slot numbers, quarantined ones too, and nothing of the tree. Memory is cut into segments; a
segment is given to one page size on first need and cut into slots. slot = segment << 16 | index
within it. All or nothing: a reservation that cannot be met takes nothing.
"""

from __future__ import annotations

from directory.core import limits
from directory.core.errors import InternalError
from directory.core.tokens import pack_pages, unpack_pages


class HostSlots:
    """The allocator of the host tier.

    `total_bytes` is cut into segments of `segment_bytes` (the last one may be shorter).
    """

    def __init__(self, total_bytes: int, segment_bytes: int) -> None:
        if segment_bytes <= 0 or total_bytes < 0:
            raise ValueError("the host tier needs segment_bytes > 0 and total_bytes >= 0")
        count = -(-total_bytes // segment_bytes)
        if count > limits.SEGMENTS_MAX:
            raise ValueError(
                f"{total_bytes} bytes make {count} segments of {segment_bytes} bytes, at most "
                f"{limits.SEGMENTS_MAX}; choose larger segments"
            )
        self.total_bytes = total_bytes
        self.segment_bytes = segment_bytes
        self.page_bytes_of: dict[int, int] = {}
        self.damaged: set[int] = set()
        self._spare = list(range(count - 1, -1, -1))
        self._segment_count = count
        self._free: dict[int, list[int]] = {}
        self._capacity: dict[int, int] = {}

    def reserve(self, page_bytes: int, count: int) -> bytes | None:
        """Take `count` slots for pages of `page_bytes`; packed slot ids, or None if short."""
        free = self._free.setdefault(page_bytes, [])
        if not self.could_hold(page_bytes, count):
            return None
        while len(free) < count and self._grow(page_bytes, free):
            pass
        if len(free) < count:
            return None
        taken = free[len(free) - count :]
        del free[len(free) - count :]
        taken.reverse()
        return pack_pages(taken)

    def release(self, page_bytes: int, slots: bytes) -> None:
        """Give slots back; damaged ones are not handed out again."""
        free = self._free[page_bytes]
        back = unpack_pages(slots).tolist()
        back.reverse()
        if self.damaged:
            back = [slot for slot in back if slot not in self.damaged]
        free.extend(back)
        if len(free) > self._capacity[page_bytes]:
            raise InternalError(f"more host slots of {page_bytes} bytes are free than exist")

    def quarantine(self, slot: int) -> bool:
        """Never hand a slot out again, whether it is free or held now.

        False for one that is not in use by any page size, or known to be damaged already.
        """
        size = self.page_bytes_of.get(slot >> 16)
        index = slot & 0xFFFF
        if size is None or slot in self.damaged or index >= self.slots_in(size, slot >> 16):
            return False
        self.damaged.add(slot)
        free = self._free[size]
        if slot in free:
            free.remove(slot)
        return True

    def could_hold(self, page_bytes: int, count: int) -> bool:
        """Whether `count` pages of this size fit at all, everything evictable being evicted."""
        most = self._capacity.get(page_bytes, 0) - len(self.damaged_slots(page_bytes))
        if self._spare:
            # All spare segments are full-sized, but the last one of the tier may be shorter.
            last = self._segment_count - 1
            short = self._spare[0] == last
            most += (len(self._spare) - short) * self.slots_in(page_bytes, 0)
            most += self.slots_in(page_bytes, last) if short else 0
        return count <= most

    def free_count(self, page_bytes: int) -> int:
        """Free slots of this page size in segments already given to it."""
        return len(self._free.get(page_bytes, ()))

    def capacity(self, page_bytes: int) -> int:
        """Slots of this page size in segments already given to it."""
        return self._capacity.get(page_bytes, 0)

    def free_slots(self, page_bytes: int) -> list[int]:
        """The free slot ids of this page size (for checks)."""
        return list(self._free.get(page_bytes, ()))

    def damaged_slots(self, page_bytes: int) -> list[int]:
        """The quarantined slot ids of this page size, those still held included."""
        return [slot for slot in self.damaged if self.page_bytes_of[slot >> 16] == page_bytes]

    @property
    def page_sizes(self) -> list[int]:
        """Page sizes in bytes that have segments."""
        return sorted(self._capacity)

    def slots_in(self, page_bytes: int, segment: int) -> int:
        """Slots of a segment, were it given to this page size."""
        size = min(self.segment_bytes, self.total_bytes - segment * self.segment_bytes)
        return min(size // page_bytes, limits.SLOTS_PER_SEGMENT_MAX)

    def adopt(self, segment: int, page_bytes: int, taken: list[int]) -> None:
        """Give a spare segment to a page size, with these slots of it taken already."""
        self._spare.remove(segment)
        self.page_bytes_of[segment] = page_bytes
        count = self.slots_in(page_bytes, segment)
        self._capacity[page_bytes] = self._capacity.get(page_bytes, 0) + count
        held = bytearray(count)
        base = segment << 16
        for slot in taken:
            held[slot - base] = 1
        free = self._free.setdefault(page_bytes, [])
        free[:0] = [base + index for index in range(count - 1, -1, -1) if not held[index]]

    def _grow(self, page_bytes: int, free: list[int]) -> bool:
        if not self._spare:
            return False
        segment = self._spare[-1]
        count = self.slots_in(page_bytes, segment)
        if not count:
            return False
        self._spare.pop()
        self.page_bytes_of[segment] = page_bytes
        self._capacity[page_bytes] = self._capacity.get(page_bytes, 0) + count
        base = segment << 16
        free[:0] = range(base + count - 1, base - 1, -1)
        return True
