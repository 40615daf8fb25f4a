"""Staged copies: small chunks go through a slab that the pool's own scheduler packs and unpacks.

Small chunks starve the copy engines. For them the mover copies rows of a slab (a row is what a page
has of the layers at hand, in one piece), and asks the scheduler by the stage ring to gather pages
into rows or to spread rows over pages. Owns a slab's parts, of which a slice holds one from its
first touch to its last, and what is open at the scheduler. A part is given to another slice only
when neither device nor scheduler touches it any more; after a mover's death, only when everything
that the dead one had asked for is done.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from directory.core.actions import CopyPart
from directory.core.ids import HOST, PoolId
from transfer.device.protocol import Ticket
from transfer.ipc.stage_ring import (
    ENTRIES,
    PART_ALIGNMENT,
    STAGE_BELOW_BYTES,
    StageRequest,
    StageRing,
    wake,
)
from transfer.layout import PoolLayout
from transfer.pages import PageBatch, Pattern
from transfer.plan import Chunk, RangeBatch, fused

PATTERNS_MAX = 4_096
HEADS = 2
"""Slices behind which the bus has enough to do for the rest to be put in order meanwhile."""
PARTS_WANTED = 8
LOADS_SHARE = 4
"""One of so many parts is kept for loads. Backups that have few of them let the bus stand still: a
part of theirs is taken from before its rows are packed until the bus has carried them."""
POSTS_AT_ONCE = 2
PACKED_WITHIN_US = 3_000
"""A scheduler that lives has packed a slice in less, and the mover has looked, unless it is
busy."""


class Piece(NamedTuple):
    """One slice on its way: its part of the slab, and what the scheduler is asked for."""

    part: int
    request: StageRequest
    batches: list[PageBatch]
    """Between the rows and the host tier."""


class Slab:
    """One pool's slab: its parts and its ring. Mutated by the engine's staged copies."""

    def __init__(
        self,
        pool: PoolId,
        allocation: int,
        nbytes: int,
        ring: StageRing,
        wake_fd: int,
        head: int,
    ) -> None:
        """Take ring and descriptor over. `allocation`: number of the slab among the pool's;
        `head`: of the ring, as it was checked."""
        self.pool = pool
        self.allocation = allocation
        self.nbytes = nbytes
        self.ring = ring
        self._posted = self.left_over = head
        """What an earlier mover asked for: until it is done no row may be touched."""
        self.moved_us = 0
        """When the scheduler was last seen to have done something."""
        self._wake_fd = wake_fd
        self._awaited: set[int] = set()  # requests that some copy is still to look at
        self._failed: set[int] = set()  # of those, failed ones whose entries others have now
        self._orphans: dict[int, int] = {}  # parts by request that nobody waits for any more
        self._patterns: dict[tuple[Pattern, int], Pattern] = {}
        self.part_bytes = self._count = 0
        self._spare: list[int] = []

    def divide(self, part_bytes: int) -> None:
        """Make parts of about so many bytes, or of half as many if there would be few of them;
        before the first use."""
        wanted = min(part_bytes, max(part_bytes // 2, self.nbytes // PARTS_WANTED, 1))
        count = min(ENTRIES, max(2, self.nbytes // wanted))
        self.part_bytes = self.nbytes // count // PART_ALIGNMENT * PART_ALIGNMENT
        self._count = count
        self._spare = list(range(count))

    def fits(self, layout: PoolLayout) -> bool:
        """Whether the pool's chunks are small, and a page goes into a part."""
        smallest = min(buffer.chunk_bytes for buffer in layout.buffers)
        return smallest < STAGE_BELOW_BYTES and layout.page_bytes <= self.part_bytes

    def take(self, *, pack: bool) -> int | None:
        """A part that nobody touches, if there is one; the last ones are kept for loads."""
        done = self.ring.done
        for number in [n for n in self._orphans if n <= done]:
            self._spare.append(self._orphans.pop(number))
        kept = max(1, self._count // LOADS_SHARE) if pack else 0
        return None if done < self.left_over or len(self._spare) <= kept else self._spare.pop()

    def give(self, part: int) -> None:
        """Neither device nor scheduler touches a part any more."""
        self._spare.append(part)

    def leave(self, number: int, part: int) -> None:
        """Nobody waits for a request any more; its part is spare once it is done."""
        self._orphans[number] = part
        self._awaited.discard(number)
        self._failed.discard(number)

    def post(self, request: StageRequest) -> int:
        """Ask the scheduler; returns the request's number."""
        self._posted += 1
        earlier = self._posted - ENTRIES  # done, as there was a part for this one
        if earlier in self._awaited and self.ring.failed(earlier):
            self._failed.add(earlier)  # whoever waits for it looks only after this
        self._awaited.add(self._posted)
        self.ring.post(self._posted, request)
        wake(self._wake_fd)
        return self._posted

    def failed(self, number: int) -> bool:
        """Whether a request that is done was not carried out; asked once."""
        self._awaited.discard(number)
        if number in self._failed:
            self._failed.remove(number)
            return True
        return number + ENTRIES > self._posted and self.ring.failed(number)

    def piece(self, part: int, batches: Sequence[PageBatch]) -> Piece:
        """A slice between pool and host tier, by way of a part. All have one pattern."""
        pattern = batches[0].pattern
        pack = batches[0].target == HOST
        rows = self._rows(pattern, part, pack=pack)
        moved: list[PageBatch] = []
        pages: list[int] = []
        for batch in batches:
            place, onto, segment, _, starts, stops = batch
            first = len(pages)
            pages += starts if pack else stops
            numbers = range(first, len(pages))
            if pack:
                moved.append(PageBatch(place, onto, segment, rows, numbers, stops))
            else:
                moved.append(PageBatch(place, onto, segment, rows, starts, numbers))
        first, layers = pattern.layers
        offset = part * self.part_bytes
        return Piece(part, StageRequest(pack, first, layers, offset, pattern.nbytes, pages), moved)

    def _rows(self, pattern: Pattern, part: int, *, pack: bool) -> Pattern:
        """The pattern with rows of a part in the place of the pool's pages."""
        known = self._patterns.get((pattern, part))
        if known is None:
            if len(self._patterns) >= PATTERNS_MAX:
                self._patterns.clear()
            start, row = part * self.part_bytes, pattern.nbytes
            begins = accumulate((c.nbytes for c in pattern.chunks), initial=start)
            chunks = [
                Chunk(self.allocation, at, row, *c[3:])
                if pack
                else Chunk(*c[:3], self.allocation, at, row, c.nbytes)
                for c, at in zip(pattern.chunks, begins, strict=False)
            ]
            known = self._patterns[pattern, part] = Pattern(fused(chunks))
        return known

    def close(self) -> None:
        """Let go of the ring. Repeatable."""
        self.ring.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def __repr__(self) -> str:
        return f"<Slab of pool {self.pool}, {len(self._spare)} parts spare, {self.ring!r}>"


class StagedCopy:
    """A copy whose pages go through a slab: backups pack before, loads unpack behind.

    Mutated by the engine. `slices`: of whole pages, each of one pattern; those that are not between
    the slab's pool and the host tier go as they are.
    """

    def __init__(self, slab: Slab, slices: Iterator[list[PageBatch]], *, whole_pages: bool) -> None:
        self.slab = slab
        self.error = ""
        """Why a request was not carried out."""
        self._slices = slices
        self._whole_pages = whole_pages
        self._held: list[PageBatch] | None = None  # taken, but there was no part for it
        self._since_us = 0  # since when nothing of it has moved
        self._parked = False
        self._posted = self._sent = 0  # slices to be packed, slices submitted
        self._all_taken = False
        self._lost = False
        self._packed: deque[Piece] = deque()
        self._given: Piece | None = None  # given last and not submitted; None: a plain slice
        self._moving: dict[Ticket, Piece | None] = {}
        self._open: dict[int, tuple[Piece, Ticket]] = {}  # with the scheduler, by request

    @property
    def waits(self) -> bool:
        """Whether the scheduler is still to carry something out."""
        return bool(self._open)

    @property
    def willing(self) -> bool:
        """Whether it may have more packed or moved at once, as far as is known."""
        held = self._held is not None or self._begins
        return not (self._lost or self._all_taken or held)

    @property
    def _begins(self) -> bool:
        """Whether its first slices are being packed: the bus waits for them, and is not to wait for
        the rest to be put in order."""
        return self._posted >= HEADS > self._sent and bool(self._open)

    def packs(self, now_us: int) -> bool:
        """Whether its scheduler is packing, as one does that lives."""
        fresh = not self._since_us or now_us - self._since_us < PACKED_WITHIN_US
        return bool(self._open) and fresh

    @property
    def over(self) -> bool:
        """Whether nothing is to be submitted any more, nor to be waited for at the scheduler."""
        all_gone = self._all_taken and self._held is None and not self._packed
        return (all_gone or self._lost) and not self._open

    def next_slice(self) -> list[PageBatch] | list[RangeBatch] | None:
        """The next slice that can go to the device; None: none can now, or none is left.

        Has a few more packed on its way, not all that there is room for: others wait meanwhile.
        """
        for _ in range(POSTS_AT_ONCE):
            if self._lost:
                return None
            if self._packed:
                return self._give(self._packed.popleft())
            batches = None if self._begins else self._take()
            if batches is None:
                return None
            if not self._through(batches[0]):
                self._given = None
                return batches if self._whole_pages else ranges_of(batches)
            part = self.slab.take(pack=batches[0].target == HOST)
            if part is None:
                self._held = batches
                return None
            piece = self.slab.piece(part, batches)
            if not piece.request.pack:
                return self._give(piece)
            self._open[self.slab.post(piece.request)] = piece, 0
            self._posted += 1
        return None

    def submitted(self, ticket: Ticket) -> None:
        """The slice given last is with the device."""
        self._moving[ticket], self._given = self._given, None
        self._sent += 1

    def moved(self, ticket: Ticket, error: str) -> bool:
        """The device is done with a slice; says whether it has landed with that."""
        piece = self._moving.pop(ticket)
        if piece is None:
            return not error
        if piece.request.pack or error or self._lost:
            self.slab.give(piece.part)
            return not error
        self._open[self.slab.post(piece.request)] = piece, ticket
        return False

    def look(self, now_us: int, *, parked: bool) -> tuple[bool, list[Ticket]]:
        """Whether the scheduler has done anything, and the slices that have landed with that.

        `parked`: nothing of it is at the device or waits to be.
        """
        if not parked or not self._since_us:
            self._since_us = now_us
        self._parked = parked and not self.over
        if not self._open:
            return False, []
        done = self.slab.ring.done
        ended = [number for number in self._open if number <= done]
        landed: list[Ticket] = []
        for number in ended:
            piece, ticket = self._open.pop(number)
            failed = self.slab.failed(number)
            if failed:
                self.error = f"{self.slab!r} could not carry out {number}"
            if piece.request.pack and not failed and not self._lost:
                self._packed.append(piece)
                continue
            self.slab.give(piece.part)
            if not failed:
                landed.append(ticket)
        if ended:
            self._since_us = self.slab.moved_us = now_us
        return bool(ended), landed

    def waited_us(self, now_us: int) -> int:
        """How long it has been waiting for a scheduler that does nothing."""
        return now_us - max(self._since_us, self.slab.moved_us) if self._parked else 0

    def lose(self) -> None:
        """Nothing more is to be submitted."""
        self._lost = True
        for piece in (*self._packed, self._given):
            if piece is not None:
                self.slab.give(piece.part)
        self._packed.clear()
        self._given = None

    def abandon(self) -> None:
        """Wait for the scheduler no longer; only of a copy that is lost."""
        for number, (piece, _) in self._open.items():
            self.slab.leave(number, piece.part)
        self._open.clear()

    def _take(self) -> list[PageBatch] | None:
        held, self._held = self._held, None
        if held is None:
            held = next(self._slices, None)
            self._all_taken = held is None
        return held

    def _through(self, batch: PageBatch) -> bool:
        return {batch.source, batch.target} == {HOST, self.slab.pool}

    def _give(self, piece: Piece) -> list[PageBatch] | list[RangeBatch]:
        self._given = piece
        return piece.batches if self._whole_pages else ranges_of(piece.batches)

    def __repr__(self) -> str:
        return f"<StagedCopy, {len(self._open)} open, {len(self._packed)} packed>"


def ranges_of(batches: Sequence[PageBatch]) -> list[RangeBatch]:
    """Whole pages range by range, for a device that takes those."""
    return [piece for batch in batches for piece in batch.ranges()]


def moved_chunks(parts: Sequence[CopyPart], layout: PoolLayout) -> int:
    """Chunks that a copy moves between a pool and the host tier."""
    pages = sum(len(part.source_pages) // 4 for part in parts if HOST in (part.source, part.target))
    return pages * len(layout.buffers)
