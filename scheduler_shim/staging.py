"""The scheduler's side of staged copies: its slab, and the thread that packs and unpacks.

Owns the slab of one pool and, for one registration at a time, the stage ring and its stager. A
stager does what a mover posts, in order, on a stream of its own (`Packer`), and never waits for a
device. Requests come only after the fences of their copy have passed, so pages are written and
targets quiet by then. What a mover asked for before it died may still be carried out: nobody may
let targets of a lost restore go before `settle`, which waits for everything that was posted. A
stager that can pack no more says of every request that it has failed, so that no load waits for it.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from directory.core.errors import LayoutError, TransferError, TreecoredError
from transfer.ipc.memory import MemoryHandle, SharedMapping, SharedMemoryIPC
from transfer.ipc.stage_ring import (
    ENTRIES,
    StageRequest,
    StageRing,
    check_request,
    wake,
)
from transfer.layout import PoolLayout

SETTLE_POLL_S: Final = 50e-6
SETTLE_S_MAX: Final = 0.5
"""Longer than all that can be open takes; the scheduler's own thread waits."""
CLOSE_S_MAX: Final = 0.5
"""So long a registration, or the end, waits for the last stager, on the scheduler's thread."""
REST_EVERY_S: Final = 0.05
"""A stager that has broken asks so often whether what it had queued is over."""
PATIENCE_MS: Final = 1_000

log = logging.getLogger("treecored.staging")


class Packer(Protocol):
    """Moves bytes between a pool and its slab, within the scheduler's own device.

    Used by one thread, after `begin` in that thread.
    """

    def begin(self) -> None:
        """This thread is the one from now on."""
        ...

    def move(self, request: StageRequest) -> None:
        """Queue what a request asks for. Raises `TransferError`; nothing of it counts then."""
        ...

    def signal(self, ring: StageRing, number: int) -> None:
        """Let the ring's `done` reach a number once everything queued so far is done."""
        ...

    def finish(self) -> None:
        """Wait for everything queued: nothing of it touches a page any more. Repeatable.

        Raises `TransferError` where that is not known.
        """
        ...

    def close(self) -> None:
        """Let go of the ring; after `finish`. Repeatable."""
        ...


class SlabMemory(Protocol):
    """A slab as it is registered, and what packs it."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    @property
    def handle(self) -> MemoryHandle:
        """What the mover imports."""
        ...

    @property
    def fds(self) -> Sequence[int]:
        """Its descriptor, where its kind has one."""
        ...

    def packer(self, ring: StageRing) -> Packer:
        """What moves bytes for the requests of a ring."""
        ...

    def close(self) -> None:
        """Give the memory back. Repeatable."""
        ...


class Staging:
    """One pool's slab, and the stager of its present registration."""

    def __init__(self, layout: PoolLayout, memory: SlabMemory) -> None:
        """Take the slab over. `layout`: the pool's, without it."""
        self._layout = layout
        self._memory = memory
        self._ipc = SharedMemoryIPC()
        self._stager: Stager | None = None
        self._of_the_last = False
        """Whether that is an earlier registration's, which has not ended."""
        self._earlier = 0

    def begin(self, below_bytes: int) -> bool:
        """Make a ring for a registration that is to come, if chunks are smaller than so many bytes
        (says whether they are); whatever served the last registration is over. Where that does not
        end in time, this one has no slab: rows and pages are the last one's still. Nor has it one
        where this process has no memory, descriptor or thread left for it."""
        self._of_the_last = not self._end_stager()
        if self._of_the_last:
            return False
        if min(buffer.chunk_bytes for buffer in self._layout.buffers) >= below_bytes:
            return False
        try:
            self._stager = self._make_stager()
        except (TreecoredError, OSError, RuntimeError) as error:
            log.warning("small pages are not staged: %s", error)
            return False
        return True

    @property
    def layout(self) -> PoolLayout:
        """The pool's layout with the slab behind its allocations."""
        layout = self._layout
        sizes = (*layout.allocation_bytes, self._memory.nbytes)
        return PoolLayout(layout.page_size, layout.page_count, layout.buffers, sizes)

    @property
    def handle(self) -> MemoryHandle:
        """Of the slab."""
        return self._memory.handle

    @property
    def slab_fds(self) -> Sequence[int]:
        """Of the slab; behind those of the pool's allocations."""
        return self._memory.fds

    @property
    def fds(self) -> list[int]:
        """Of ring and event, at the end of a registration's."""
        return self._stager.fds if self._stager is not None else []

    @property
    def requests(self) -> int:
        """So many have been carried out."""
        return self._earlier + (self._stager.taken if self._stager is not None else 0)

    @property
    def at_rest(self) -> bool:
        """Whether `settle` would not wait."""
        return self._stager is None or self._stager.at_rest

    def settle(self) -> None:
        """Return once everything that movers of this registration have asked for is done. Where the
        last one's stager is still at work they have asked for nothing, for there is no slab; what
        it may yet write into was in use then, and stays out of use until it is `at_rest`."""
        if self._stager is not None and not self._of_the_last:
            self._stager.settle()

    def close(self) -> None:
        """End the stager and give the slab back; a slab that may still be used stays where it is,
        until the process ends. Repeatable."""
        if self._end_stager():
            self._memory.close()

    def _make_stager(self) -> Stager:
        """A ring and who serves it. What it raises leaves nothing open."""
        ring = StageRing.make(self._ipc)
        try:
            packer = self._memory.packer(ring)
            try:
                return Stager(ring, packer)
            except BaseException:
                packer.close()
                raise
        except BaseException:
            ring.close()
            raise

    def _end_stager(self) -> bool:
        """Whether nothing is left of the last registration's; until then `settle` asks it."""
        if self._stager is None:
            return True
        if not self._stager.close():
            log.warning("%r has not ended within %.1f s", self._stager, CLOSE_S_MAX)
            return False
        self._earlier += self._stager.taken
        self._stager = None
        return True

    def __repr__(self) -> str:
        return f"<Staging of {self._memory.nbytes} bytes, {self._stager!r}>"


class Stager:
    """The thread of one ring. It ends with the process, or by `close`."""

    def __init__(self, ring: StageRing, packer: Packer) -> None:
        """Take both over. Raises `OSError` or `RuntimeError` where there is no descriptor or no
        thread left; ring and packer are still yours."""
        self._ring = ring
        self._packer = packer
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = self._closed = False
        self._ended = False
        """Whether the thread has ended and what it had queued is over."""
        self._queues = False  # whether anything was ever queued
        self.taken = ring.head
        self._thread = threading.Thread(target=self._run, name="stager", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._event)
            raise

    @property
    def fds(self) -> list[int]:
        """The ring, and what wakes this thread."""
        return [self._ring.fd, self._event]

    @property
    def at_rest(self) -> bool:
        """Whether everything posted until now is done. Never waits."""
        if self._closed or self._ring.done >= self._wanted:
            return True
        wake(self._event)  # a mover that died may have posted and not said so
        return self._ended

    def settle(self) -> None:
        """Return once everything posted until now is done. One that has ended does nothing more.
        Raises `TransferError` when that takes too long: then it is not known what is still
        written."""
        if self._closed:
            return
        wanted = self._wanted
        wake(self._event)  # a mover that died may have posted and not said so
        give_up = time.monotonic() + SETTLE_S_MAX
        while self._ring.done < wanted and not self._ended:
            if time.monotonic() > give_up:
                raise TransferError(f"the stager is at {self._ring.done} of {wanted} requests")
            time.sleep(SETTLE_POLL_S)

    def close(self) -> bool:
        """End the thread, wait for what it has queued, and let go of the ring. Says whether that
        is done; if not, ask again. Repeatable."""
        if self._closed:
            return True
        self._closing = True
        wake(self._event)
        self._thread.join(CLOSE_S_MAX)
        if self._thread.is_alive() or not self._ended:
            return False
        self._closed = True
        self._packer.close()
        os.close(self._event)
        self._ring.close()
        return True

    @property
    def _wanted(self) -> int:
        return min(self._ring.head, self._ring.done + ENTRIES)  # head is the mover's to write

    def _run(self) -> None:
        try:
            self._packer.begin()
            self._serve(self._carry_out)
        except Exception:
            # Whatever it is: a load that waits for this thread would wait until the session ends.
            log.exception("%r can pack no more, and says so of every request", self)
            if self._comes_to_rest():
                self._serve(self._refuse)
        if self._comes_to_rest():
            self._ended = True

    def _serve(self, each: Callable[[int], None]) -> None:
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        while not self._closing:
            while self.taken < self._ring.head and not self._closing:
                each(self.taken + 1)
                self.taken += 1
            if poller.poll(PATIENCE_MS):
                os.eventfd_read(self._event)

    def _carry_out(self, number: int) -> None:
        self._queues = True
        try:
            self._packer.move(self._ring.taken(number))
        except TreecoredError as error:
            log.warning("stage request %d cannot be carried out: %s", number, error)
            self._ring.fail(number)
        self._packer.signal(self._ring, number)

    def _refuse(self, number: int) -> None:
        """Nothing is queued any more, so no stream writes `done` beside this."""
        self._ring.fail(number)
        self._ring.finish(number)

    def _comes_to_rest(self) -> bool:
        """Wait until nothing that was queued is still to come. False: not known, and this process
        is asked to close."""
        while self._queues:
            try:
                self._packer.finish()
            except TreecoredError as error:
                if self._closing:
                    log.warning("what is packed last is not known to be over: %s", error)
                    return False
                time.sleep(REST_EVERY_S)
            else:
                return True
        return True

    def __repr__(self) -> str:
        return f"<Stager at {self.taken}, {self._ring!r}>"


class SharedSlab:
    """A slab in shared memory, for pools that are. Implements `SlabMemory`."""

    def __init__(
        self, ipc: SharedMemoryIPC, layout: PoolLayout, pool: Sequence[SharedMapping], nbytes: int
    ) -> None:
        """`pool`: the pool's allocations. Raises `LayoutError` where not one page fits."""
        if nbytes < layout.page_bytes:
            raise LayoutError(f"a slab of {nbytes} bytes has no room for {layout.page_bytes}")
        self._ipc = ipc
        self._layout = layout
        self._pool = list(pool)
        self._slab = ipc.create("treecored-slab", nbytes)
        self.nbytes = nbytes

    @property
    def handle(self) -> MemoryHandle:
        """What the mover imports."""
        return self._ipc.export(self._slab)[0]

    @property
    def fds(self) -> Sequence[int]:
        """Its memfd."""
        return (self._slab.fd,)

    def packer(self, ring: StageRing) -> Packer:
        """Copies in the stager's own thread."""
        del ring
        return HostPacker(self._layout, [m.view for m in self._pool], self._slab.view)

    def close(self) -> None:
        """Give the memory back. Repeatable."""
        if not self._slab.closed:
            self._ipc.close(self._slab)


class HostPacker:
    """Packs pools in host memory; what was called is done. Implements `Packer`."""

    def __init__(self, layout: PoolLayout, pool: Sequence[memoryview], slab: memoryview) -> None:
        self._layout = layout
        self._pool = pool
        self._slab = slab

    def begin(self) -> None:
        """Any thread can."""

    def move(self, request: StageRequest) -> None:
        """Copy now."""
        buffers = check_request(request, self._layout, len(self._slab))
        row = request.offset
        for page in request.pages:
            at = row
            for b in buffers:
                start, nbytes = b.offset + page * b.page_stride, b.chunk_bytes
                chunk = self._pool[b.allocation]
                if request.pack:
                    self._slab[at : at + nbytes] = chunk[start : start + nbytes]
                else:
                    chunk[start : start + nbytes] = self._slab[at : at + nbytes]
                at += nbytes
            row += request.row_bytes

    def signal(self, ring: StageRing, number: int) -> None:
        """It is done."""
        ring.finish(number)

    def finish(self) -> None:
        """It is done."""

    def close(self) -> None:
        """Nothing was taken."""
