"""The stage ring: what a mover asks a scheduler to pack into its staging slab, or to unpack.

Owns the layout of the ring (u64 words over shared memory) and what a request says. The mover posts,
the scheduler carries out in order, on one stream of its own context, and that stream lets `done`
reach the request's number. A request names rows of the slab, layers and pages; whatever it says is
checked by whoever carries it out. A mover that takes a ring over from a dead one must not touch
the slab before everything that was posted earlier is done (`left_over`).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

from directory.core.errors import ImportFailed, LayoutError
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import COUNTER_BYTES, CounterTable
from transfer.layout import BufferLayout, PoolLayout

STAGE_BELOW_BYTES: Final = 64 * 1024
"""Chunks from this size on are moved as they lie."""
ENTRIES: Final = 16
"""Requests that may be open at once."""
NUMBER_MAX: Final = 1 << 62
PAGES_MAX: Final = 2_048
"""Pages of one request."""
PART_ALIGNMENT: Final = 512
"""Where rows begin: a kernel that is given any other address ends its whole context."""
HEAD, DONE, ENTRIES_AT = 0, 1, 2
NUMBER, PACK, LAYERS, OFFSET, ROW_BYTES, COUNT, FAILED, PAGES_AT = range(8)
ENTRY_WORDS: Final = PAGES_AT + PAGES_MAX * 4 // COUNTER_BYTES
EVENTFD: Final = "anon_inode:[eventfd]"


class StageRequest(NamedTuple):
    """Pages between a pool and consecutive rows of its slab.

    `pack`: pool to slab, else back. `first_layer`, `layers`: of the layers in ascending order
    (`layers` 0: all buffers in the layout's order); `offset`: of the first row; `row_bytes`: from
    row to row, which is what the layers have of a page.
    """

    pack: bool
    first_layer: int
    layers: int
    offset: int
    row_bytes: int
    pages: Sequence[int]


class StageRing(CounterTable):
    """The ring. One mover posts, one scheduler carries out."""

    what = "stage ring"

    @classmethod
    def make(cls, ipc: SharedMemoryIPC, name: str = "treecored-stage") -> Self:
        """A ring without requests."""
        return cls.create(ipc, name, ENTRIES_AT + ENTRIES * ENTRY_WORDS)

    @classmethod
    def take_over(cls, ipc: SharedMemoryIPC, fd: int) -> Self:
        """Map a ring of a scheduler; raises `ImportFailed`."""
        return cls.open(ipc, fd, ENTRIES_AT + ENTRIES * ENTRY_WORDS)

    @property
    def head(self) -> int:
        """Number of the request that was posted last, as the scheduler sees it. A mover looks only
        once, in `check`: it counts by itself, whatever is written here."""
        return self.read(HEAD)

    @property
    def done(self) -> int:
        """Every request up to this number is carried out, or has failed."""
        return self.read(DONE)

    def check(self) -> int:
        """The head, to be counted on from; raises `ImportFailed` for counters that no ring has.

        Whoever takes the ring over goes by the number that was checked: its scheduler can write
        another one at any moment.
        """
        head, done = self.head, self.done
        if not done <= head <= min(done + ENTRIES, NUMBER_MAX):
            raise ImportFailed(f"{self!r} has {head} requests, {done} of them done")
        return head

    # The mover's side.

    def post(self, number: int, request: StageRequest) -> None:
        """Ask for something by the next number; no more than `ENTRIES` may be open."""
        assert 0 < len(request.pages) <= PAGES_MAX, "slices are cut so that they fit"
        at = self._at(number)
        layers = request.first_layer | request.layers << 32
        fields = (request.pack, layers, request.offset, request.row_bytes, len(request.pages), 0)
        self._counters[at + PACK : at + PAGES_AT] = memoryview(array("Q", fields))
        start = (at + PAGES_AT) * COUNTER_BYTES
        packed = array("I", request.pages).tobytes()
        self.mapping.view[start : start + len(packed)] = packed
        self._counters[at + NUMBER] = number
        self._store(HEAD, number)  # behind a barrier: whoever sees the number sees the request

    def failed(self, number: int) -> bool:
        """Whether a request that is done was not carried out."""
        return bool(self._counters[self._at(number) + FAILED])

    # The scheduler's side.

    def taken(self, number: int) -> StageRequest:
        """A request that was posted and is not done. Raises `LayoutError` for one that is none."""
        at = self._at(number)
        words = self._counters[at : at + PAGES_AT].tolist()
        if words[NUMBER] != number or not 0 < words[COUNT] <= PAGES_MAX:
            raise LayoutError(f"stage request {number} is {words[NUMBER]}, {words[COUNT]} pages")
        start = (at + PAGES_AT) * COUNTER_BYTES
        pages = array("I", bytes(self.mapping.view[start : start + 4 * words[COUNT]]))
        first, layers = words[LAYERS] & 0xFFFF_FFFF, words[LAYERS] >> 32
        row_bytes = words[ROW_BYTES]
        return StageRequest(bool(words[PACK]), first, layers, words[OFFSET], row_bytes, pages)

    def fail(self, number: int) -> None:
        """Say that a request cannot be carried out; before `done` reaches it."""
        self._store(self._at(number) + FAILED, 1)

    def finish(self, number: int) -> None:
        """Let `done` reach a number, where no stream does."""
        self._store(DONE, number)

    def _at(self, number: int) -> int:
        return ENTRIES_AT + number % ENTRIES * ENTRY_WORDS


def staged_buffers(layout: PoolLayout, first_layer: int, layers: int) -> list[BufferLayout]:
    """The buffers of a request's rows, in the order in which they lie in a row.

    Raises `LayoutError` for layers that the pool does not have.
    """
    if not layers:
        return list(layout.buffers)
    numbers = layout.layers()
    wanted = numbers[first_layer : first_layer + layers]
    if len(wanted) != layers:
        raise LayoutError(f"layers {first_layer} to {first_layer + layers} of {len(numbers)}")
    return [b for layer in wanted for b in layout.buffers if b.layer == layer]


def check_request(request: StageRequest, layout: PoolLayout, slab_bytes: int) -> list[BufferLayout]:
    """The buffers of a request whose rows and pages all exist; else raises `LayoutError`."""
    buffers = staged_buffers(layout, request.first_layer, request.layers)
    if request.row_bytes != sum(buffer.chunk_bytes for buffer in buffers):
        raise LayoutError(f"rows of {request.row_bytes} bytes are not what these layers have")
    if request.offset % PART_ALIGNMENT:
        raise LayoutError(f"rows from byte {request.offset}, not a multiple of {PART_ALIGNMENT}")
    end = request.offset + request.row_bytes * len(request.pages)
    if end > slab_bytes:
        raise LayoutError(f"rows up to byte {end} of a slab of {slab_bytes}")
    if max(request.pages) >= layout.page_count:
        raise LayoutError(f"page {max(request.pages)} of {layout.page_count}")
    return buffers


def check_wake(fd: int) -> int:
    """A duplicate of an event descriptor by which a scheduler is woken; raises `ImportFailed`.

    Whatever else it might be could hold a mover up that writes to it. That it never blocks is set
    for the scheduler, too: one that takes it back, and fills the counter, stops a
    mover, which is found out and replaced as any that hangs with copies to do.
    """
    if os.readlink(f"/proc/self/fd/{fd}") != EVENTFD:
        raise ImportFailed("the descriptor behind the stage ring is no event descriptor")
    os.set_blocking(fd, False)
    return os.dup(fd)


def wake(fd: int) -> None:
    """Wake the scheduler's stager. A full event descriptor wakes it, too."""
    try:
        os.eventfd_write(fd, 1)
    except BlockingIOError:
        pass
