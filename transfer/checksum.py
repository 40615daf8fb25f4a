"""Checksums of host pages: how one is computed, and the table that they are kept in.

Owns the table's layout. It lies in a file or memfd of its own beside the host tier, one 64-bit
entry a *unit* (the page of one rank; without a group the whole page), so it outlives movers and,
where the tier is kept, the daemon. Only movers write it, never the control process, which looks at
no page. An entry is 0 from before a copy into its unit may begin until the copy has landed: so an
entry that is not 0 always speaks of what lies there now. It must never take what it cannot read or
write (no room, a unit beyond the table) for a checksum: such a unit has none.

Entries are read and written by system calls, not through a mapping: where the file system has no
room left, a mapping would end the process.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module, util
from typing import Final, NamedTuple, TypeAlias, cast

from directory.core.actions import CopyPart
from directory.core.errors import TransferError
from directory.core.ids import HOST
from directory.core.limits import SLOTS_PER_SEGMENT_MAX
from transfer.host_tier import INDEX_MASK, SEGMENT_SHIFT, HostTierMemory, TierShape
from transfer.plan import Shard, unpack

NONE: Final = 0
"""The unit has no checksum."""
DAMAGED: Final = 1
"""The unit was found to differ from its checksum; nothing may be read from it."""
ENTRY_BYTES: Final = 8
UNITS_PER_SEGMENT_MAX: Final = SLOTS_PER_SEGMENT_MAX
HEAD_BYTES: Final = 4096
"""Of a segment's part of the table: bytes of a unit and of a slot, then nothing."""
SEGMENT_BYTES: Final = HEAD_BYTES + UNITS_PER_SEGMENT_MAX * ENTRY_BYTES
LIBRARY: Final = "xxhash"

Hash: TypeAlias = Callable[[memoryview, int], int]
"""64 bits of some bytes and a seed."""


class Form(NamedTuple):
    """How a segment is cut: bytes of a unit, and of the slot that it is a part of."""

    unit_bytes: int
    slot_bytes: int


class Units(NamedTuple):
    """Consecutive units of one segment."""

    segment: int
    first: int
    length: int


def available() -> bool:
    """Whether the library that computes checksums is installed; it is not imported."""
    return util.find_spec(LIBRARY) is not None


def load_hash() -> Hash:
    """Return XXH3, 64 bits. Raises `TransferError` where the library is missing."""
    try:
        return cast(Hash, import_module(LIBRARY).xxh3_64_intdigest)
    except ImportError:
        raise TransferError(
            f"checksums need the package {LIBRARY}: pip install 'treecored[checksum]'"
        ) from None


def table_bytes(shape: TierShape) -> int:
    """Size of a tier's table; as a sparse file it takes 8 bytes a unit that was written."""
    return shape.segment_count * SEGMENT_BYTES


class SumTable:
    """The table of one tier. Takes the descriptor over."""

    def __init__(self, fd: int, shape: TierShape) -> None:
        """Raises `TransferError` where the file is too small."""
        if os.fstat(fd).st_size < table_bytes(shape):
            os.close(fd)
            raise TransferError(f"the table of checksums needs {table_bytes(shape)} bytes")
        self._fd = fd
        self._forms: dict[int, Form] = {}

    def form(self, segment: int) -> Form | None:
        """How a segment was cut when a checksum of it was last written."""
        known = self._forms.get(segment)
        if known is None:
            head = array("Q", os.pread(self._fd, 2 * ENTRY_BYTES, segment * SEGMENT_BYTES))
            if len(head) != 2 or not 0 < head[0] <= head[1]:
                return None
            known = self._forms[segment] = Form(*head)
        return known

    def read(self, units: Units) -> Sequence[int]:
        """Entries of consecutive units."""
        found = array("Q", os.pread(self._fd, units.length * ENTRY_BYTES, _place(units)))
        return found if len(found) == units.length else array("Q", [NONE]) * units.length

    def write(self, units: Units, entries: Sequence[int]) -> bool:
        """Store entries; says whether there was room. Without room the old ones stay."""
        content = array("Q", entries).tobytes()
        try:
            return os.pwrite(self._fd, content, _place(units)) == len(content)
        except OSError:
            return False

    def begin(self, units: Units, form: Form) -> bool:
        """Copies into these units may begin from here on; says whether they will have entries.

        Raises `TransferError` where an old entry cannot be taken away: then nothing may be copied.
        """
        if self.form(units.segment) != form and not self._cut(units.segment, form):
            return False
        if not any(self.read(units)):
            return True
        if not self.write(units, [NONE] * units.length):
            raise TransferError("the table of checksums cannot be written")
        return True

    def _cut(self, segment: int, form: Form) -> bool:
        """Begin anew with a segment, that was cut otherwise or not at all."""
        self._forms.pop(segment, None)
        at = segment * SEGMENT_BYTES
        if self.form(segment) is not None:
            # Its entries speak of other bytes. A page of them that was never written stays away.
            for first in range(0, UNITS_PER_SEGMENT_MAX, HEAD_BYTES // ENTRY_BYTES):
                units = Units(segment, first, HEAD_BYTES // ENTRY_BYTES)
                if any(self.read(units)) and not self.write(units, [NONE] * units.length):
                    raise TransferError("the table of checksums cannot be written")
        self._forms.pop(segment, None)
        try:
            os.pwrite(self._fd, array("Q", form).tobytes(), at)
        except OSError:
            return False
        return self.form(segment) == form

    def close(self) -> None:
        """Close the descriptor. Repeatable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __repr__(self) -> str:
        return f"<SumTable of {len(self._forms)} segments>"


def digest(hash_of: Hash, tier: HostTierMemory, units: Units, form: Form) -> list[int]:
    """Compute the entries of units from what lies in the tier now; never `NONE` or `DAMAGED`.

    The unit's place is its seed, so that a page that lies where another one belongs is seen.
    """
    view = tier.segments[units.segment].view
    size, place = form.unit_bytes, units.segment << 32
    return [
        hash_of(view[unit * size : (unit + 1) * size], place | unit) | 2
        for unit in range(units.first, units.first + units.length)
    ]


def units_of(part: CopyPart, form: Form, offset: int) -> list[Units]:
    """The units of a part's host slots, in runs. Those that no table can have are left out.

    `offset`: where in its slot the unit begins.
    """
    slots = unpack(part.source_pages if part.source == HOST else part.target_pages)
    ranks, uneven = divmod(form.slot_bytes, form.unit_bytes)
    rank, uneven_offset = divmod(offset, form.unit_bytes)
    if uneven or uneven_offset:
        return []
    runs: list[Units] = []
    for slot in slots:
        segment, unit = slot >> SEGMENT_SHIFT, (slot & INDEX_MASK) * ranks + rank
        if unit >= UNITS_PER_SEGMENT_MAX:
            continue
        last = runs[-1] if runs else None
        if last and last.segment == segment and last.first + last.length == unit:
            runs[-1] = Units(segment, last.first, last.length + 1)
        else:
            runs.append(Units(segment, unit, 1))
    return runs


def form_of(shard: Shard, page_bytes: int) -> Form:
    """The form of the slots that a copy of a pool's pages touches."""
    return Form(page_bytes, shard.slot_bytes or page_bytes)


def slot_of(segment: int, unit: int, form: Form) -> int:
    """The slot that a unit is a part of."""
    return segment << SEGMENT_SHIFT | unit * form.unit_bytes // form.slot_bytes


def packed_slots(slots: Sequence[int]) -> bytes:
    """Slots as an event names them: unsigned 32-bit, little endian."""
    packed = array("I", slots)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _place(units: Units) -> int:
    return units.segment * SEGMENT_BYTES + HEAD_BYTES + units.first * ENTRY_BYTES
