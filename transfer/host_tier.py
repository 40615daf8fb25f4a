"""The host tier's memory: segments of shared memory and the address of each slot in them.

Owns the segments in this process. The daemon creates them (memfds, or files that outlive it),
movers open them; which slot holds
what is the Directory's to say, never decided here. Memory is touched only when a page is written.

A slot id is `segment << 16 | index`; its page begins at `index * page_bytes` of the segment.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from directory.core.errors import ImportFailed, LayoutError
from directory.core.limits import SEGMENTS_MAX, SLOTS_PER_SEGMENT_MAX
from transfer.ipc.aligned import aligned_room
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC

SEGMENT_SHIFT = 16
INDEX_MASK = (1 << SEGMENT_SHIFT) - 1
assert SLOTS_PER_SEGMENT_MAX == 1 << SEGMENT_SHIFT


class SlotAddress(NamedTuple):
    """Where a slot's page lies: segment and byte offset in it."""

    segment: int
    offset: int


class TierShape(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of the tier; the last segment holds what is left over and may be shorter."""

    total_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    segment_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]

    @property
    def segment_count(self) -> int:
        """Number of segments."""
        return -(-self.total_bytes // self.segment_bytes)

    def check(self) -> None:
        """Raise `LayoutError` when the sizes make no tier."""
        if self.total_bytes <= 0 or self.segment_bytes <= 0:
            raise LayoutError(f"a host tier needs positive sizes, not {self}")
        if self.segment_count > SEGMENTS_MAX:
            raise LayoutError(
                f"{self.segment_count} segments; at most {SEGMENTS_MAX}: use larger segments"
            )

    def bytes_of(self, segment: int) -> int:
        """Size of a segment."""
        return min(self.segment_bytes, self.total_bytes - segment * self.segment_bytes)

    def slots_of(self, segment: int, page_bytes: int) -> int:
        """Slots of a segment for pages of a size."""
        return min(self.bytes_of(segment) // page_bytes, SLOTS_PER_SEGMENT_MAX)

    def slot_count(self, page_bytes: int) -> int:
        """Slots of the whole tier for pages of a size."""
        last = self.segment_count - 1
        full = self.slots_of(0, page_bytes) if last else 0
        return last * full + self.slots_of(last, page_bytes)

    def locate(self, slot: int, page_bytes: int) -> SlotAddress:
        """Address of a slot; raises `LayoutError` when it is not in the tier."""
        segment, index = slot >> SEGMENT_SHIFT, slot & INDEX_MASK
        if not 0 <= segment < self.segment_count or index >= self.slots_of(segment, page_bytes):
            raise LayoutError(f"slot {segment}:{index} of {page_bytes} bytes is not in the tier")
        return SlotAddress(segment, index * page_bytes)


class HostTierMemory:
    """The tier's segments as mapped in this process."""

    def __init__(
        self, ipc: SharedMemoryIPC, shape: TierShape, segments: Sequence[SharedMapping] = ()
    ) -> None:
        self._ipc = ipc
        self.shape = shape
        self.segments: list[SharedMapping] = list(segments)

    @classmethod
    def create(
        cls, total_bytes: int, segment_bytes: int, ipc: SharedMemoryIPC | None = None
    ) -> "HostTierMemory":
        """Make the tier; raises `LayoutError`, or `ImportFailed` when memory is refused."""
        shape = TierShape(total_bytes, segment_bytes)
        shape.check()
        tier = cls(ipc or SharedMemoryIPC(), shape)
        try:
            for segment in range(shape.segment_count):
                name = f"treecored-host-{segment}"
                with aligned_room(shape.bytes_of(segment)):
                    tier.segments.append(tier._ipc.create(name, shape.bytes_of(segment)))
        except ImportFailed:
            tier.close()
            raise
        return tier

    @classmethod
    def of_files(
        cls, shape: TierShape, fds: Sequence[int], ipc: SharedMemoryIPC | None = None
    ) -> "HostTierMemory":
        """Map a tier whose segments are files of the daemon's own, one descriptor a segment.

        They stay the caller's. Raises `ImportFailed`.
        """
        tier = cls(ipc or SharedMemoryIPC(), shape)
        tier.open_segments(0, fds)
        return tier

    @property
    def fds(self) -> list[int]:
        """Descriptors of the segments in order, to be sent to a mover."""
        return [segment.fd for segment in self.segments]

    @property
    def complete(self) -> bool:
        """Whether every segment is mapped."""
        return len(self.segments) == self.shape.segment_count

    def open_segments(self, first: int, fds: Sequence[int]) -> list[SharedMapping]:
        """Map the next segments of a tier made elsewhere; all of them or none.

        Raises `ImportFailed` when they are not the next ones, or not as large as the shape says.
        """
        if first != len(self.segments) or first + len(fds) > self.shape.segment_count:
            raise ImportFailed(
                f"segments {first}..{first + len(fds) - 1} do not follow the "
                f"{len(self.segments)} of {self.shape.segment_count} that are open"
            )
        opened: list[SharedMapping] = []
        try:
            for number, fd in enumerate(fds, first):
                # The daemon's own: where they are files, no seal keeps them from being shrunk.
                nbytes = self.shape.bytes_of(number)
                with aligned_room(nbytes):
                    opened.append(self._ipc.import_fd(fd, nbytes, sealed=False))
        except ImportFailed:
            for mapping in opened:
                self._ipc.close(mapping)
            raise
        self.segments += opened
        return opened

    def page(self, slot: int, page_bytes: int) -> memoryview:
        """The bytes of a slot's page; release the view before the tier is closed."""
        segment, offset = self.shape.locate(slot, page_bytes)
        return self.segments[segment].view[offset : offset + page_bytes]

    def close(self) -> None:
        """Unmap all segments here. Repeatable; raises `MappingBusy` while pages are in use."""
        while self.segments:
            self._ipc.close(self.segments[-1])
            self.segments.pop()

    def __repr__(self) -> str:
        return f"<HostTierMemory {len(self.segments)}/{self.shape.segment_count} segments>"
