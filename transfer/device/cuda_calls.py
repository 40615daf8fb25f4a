"""The driver's calls of one submission, made where it is handed in or by a thread beside it.

The call that queues a list of small ranges takes the processor as long as the bus takes their
bytes, or nearly: the loop that prepares the next slice meanwhile is why there is a thread. Owns the
order of calls (copies, then the event behind them; urgent submissions before others, those of one
stream as they were handed over) and what is known of each. An event says nothing before its calls
were made: it may still stand for an earlier submission. It must never let a submission look done,
or undone, that may be under way.
"""

import logging
import sys
import threading
from collections import deque
from queue import SimpleQueue
from typing import Any

from transfer.device.cuda_batch import best_copy
from transfer.device.cuda_kernel import PageKernel
from transfer.device.cuda_tile import Corner, tile_copy
from transfer.device.protocol import DeviceLost
from transfer.device.work import Work
from transfer.ipc.cuda_driver import CudaError, Driver

SWITCH_S = 10e-6
"""So long at most the loop keeps the interpreter from the thread, whose call is over."""
CLOSE_S = 1.0
URGENT_RUN_MAX = 8
"""Urgent submissions before which another one waits; behind so many it is its turn, or calls that
take longer than the bus would hold it up until it looks hung."""

log = logging.getLogger("treecored.device")


class Queued:
    """A submission on its way to the driver. Written by whoever makes its calls, once: `made` last,
    and `error` (why its bytes are lost already) before it."""

    __slots__ = ("error", "event", "made", "stream", "work")

    def __init__(self, work: Work, stream: Any, event: Any) -> None:
        self.work: Work | None = work
        self.stream = stream
        self.event = event
        self.error = ""
        self.made = False


class Calls:
    """Makes calls. Belongs to one thread: what it hands to the driver it uses again."""

    def __init__(self, driver: Driver, *, batched: bool, kernel: PageKernel | None) -> None:
        """`batched`: one call for many ranges, and rectangles, where the driver has them."""
        self._driver = driver
        self._kernel = kernel
        self._copy = best_copy(driver, batched=batched)
        self._tile = tile_copy(driver) if batched else None

    @property
    def can_tile(self) -> bool:
        """Whether rectangles can be copied."""
        return self._tile is not None

    def make(self, queued: Queued) -> None:
        """Queue the copies on their stream, and behind them the event. Raises `DeviceLost`."""
        work, stream = queued.work, queued.stream
        assert work is not None
        assert self._kernel is not None or not work.kernels, "kernels go on the peers' streams"
        try:
            if self._kernel is not None:
                for pages in work.kernels:
                    self._kernel.copy(*pages, stream)
            self._copy_rectangles(work, stream)
            if work.sizes:
                self._copy(work.targets, work.sources, work.sizes, stream)
        except CudaError as failure:
            # Some of it may have been queued. The event behind it tells when that is over; if
            # even that cannot be queued, nobody can tell.
            queued.error = str(failure)
        try:
            self._driver.call("cuEventRecord", queued.event, stream)
        except CudaError as failure:
            lost = queued.error or failure
            raise DeviceLost(f"{self._driver.uuid} is lost: {lost}") from failure
        queued.work = None
        queued.made = True

    def _copy_rectangles(self, work: Work, stream: Any) -> None:
        if self._tile is None:
            return  # and there are no rectangles
        for direction, rectangles in work.rectangles:
            from_host, to_host = direction == "from_host", direction == "to_host"
            for source, source_pitch, target, target_pitch, width, rows in rectangles:
                begin = Corner(source, source_pitch, from_host)
                self._tile(begin, Corner(target, target_pitch, to_host), width, rows, stream)


class Beside:
    """A thread that makes the calls of what is handed over, one after the other, urgent ones first.

    Belongs to the thread that hands over. It is lost with the first call after which nobody can say
    what goes on: those behind it are never made, and never look done.
    """

    def __init__(self, driver: Driver, calls: Calls, ranges_min: int) -> None:
        """Start it. `calls`: its own from now on. `ranges_min`: lists of fewer are not worth it.
        Raises `RuntimeError` without a thread."""
        self._ranges_min = ranges_min
        self._urgent = deque[Queued]()
        self._others = deque[Queued]()
        self._told: SimpleQueue[bool] = SimpleQueue()
        """True behind each submission in either of the two, in the end False."""
        self._last: dict[Any, Queued] = {}  # by stream
        self._lost: DeviceLost | None = None  # written by the thread, once
        self.calling = False
        """Whether the thread is in the driver. Written by it alone."""
        self._switch_s = sys.getswitchinterval()
        self._thread = threading.Thread(
            target=self._run, args=(driver, calls), name="treecored-calls", daemon=True
        )
        self._thread.start()
        sys.setswitchinterval(SWITCH_S)

    def wants(self, work: Work, stream: Any, *, beside: bool) -> bool:
        """Whether a submission is to go this way: it is a long list that may (`beside`), or it
        would overtake one on its stream."""
        if beside and len(work.sizes) >= self._ranges_min and not work.kernels:
            return True
        last = self._last.get(int(stream))
        return last is not None and not last.made

    def hand_over(self, queued: Queued, *, urgent: bool) -> None:
        """Have its calls made. `urgent`: before those that are not; of one stream all are or none
        is, for only among themselves do they keep their order."""
        self._last[int(queued.stream)] = queued
        (self._urgent if urgent else self._others).append(queued)
        self._told.put(True)

    def check(self) -> None:
        """Raise the `DeviceLost` that a call ended in."""
        if self._lost is not None:
            raise self._lost

    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Have made what was handed over, and end. False: a call has not returned by then, and is
        left to the end of this process."""
        self._told.put(False)
        self._thread.join(deadline_s)
        sys.setswitchinterval(self._switch_s)
        if self._thread.is_alive():
            log.warning("a call of the driver has not returned for %.1f s", deadline_s)
        return not self._thread.is_alive()

    def _run(self, driver: Driver, calls: Calls) -> None:
        try:
            driver.make_current()
            run = 0
            while self._told.get():
                others_turn = not self._urgent or (self._others and run >= URGENT_RUN_MAX)
                run = 0 if others_turn else run + 1
                queued = (self._others if others_turn else self._urgent).popleft()
                self.calling = True
                calls.make(queued)
                self.calling = False
        except DeviceLost as lost:
            self._lost = lost
        except Exception as error:
            log.exception("calls cannot be made")
            self._lost = DeviceLost(f"{driver.uuid} is lost: {error!r}")

    def __repr__(self) -> str:
        return f"<Beside, {self._told.qsize()} to be made, {'lost' if self._lost else 'well'}>"
