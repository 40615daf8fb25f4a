"""A forward pass of the scheduler process of GPU tests that uses layers while others still land."""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from scheduler_shim.landings import Landing, Landings
from tests.gpu import peer_messages as m
from transfer.ipc.cuda_driver import Driver
from transfer.ipc.cuda_sync import RegisteredTable, StreamWaiter
from transfer.ipc.sync import TimelineTable
from transfer.layout import PoolLayout


class Forwarding:
    """Forward passes over one pool, one at a time."""

    def __init__(
        self, driver: Driver, table: TimelineTable, registered: RegisteredTable, layout: PoolLayout
    ) -> None:
        self._layout = layout
        self._waiter = StreamWaiter(driver, table, registered)
        self._landings = Landings(table, self._waiter)
        self._stream = torch.cuda.Stream()
        self._landing: Landing | None = None
        self._aside: list[Any] = []
        self._began = 0.0
        self._end: Any = None

    def begin(self, request: m.Forward, views: Sequence[Any]) -> m.Begun:
        """Queue the pass. `views`: (page, byte) of each buffer."""
        rows = torch.frombuffer(bytearray(request.pages), dtype=torch.int32).to("cuda:0")
        # The kernel is loaded before anything waits: loading it waits for what is running.
        self._aside = [view.index_select(0, rows) for view in views]
        torch.cuda.synchronize()
        landing = self._landings.begin(len(self._layout.layers()))
        assert landing is not None, "the last load has not been answered"
        self._landing, self._began = landing, time.monotonic()
        with torch.cuda.stream(self._stream):
            for number, layer in enumerate(self._layout.layers()):
                if request.waits:
                    landing.wait_in_stream(self._stream.cuda_stream, number, request.deadline_s)
                for buffer, view, aside in zip(
                    self._layout.buffers, views, self._aside, strict=True
                ):
                    if buffer.layer == layer:
                        torch.index_select(view, 0, rows, out=aside)
            self._end = torch.cuda.Event()
            self._end.record()
        return m.Begun(*landing.wire)

    def collect(self, request: m.Collect) -> m.Forwarded:
        """Take the restore's answer, wait for the end of the pass, and return what it read."""
        landing = self._landing
        assert landing is not None
        early = bool(self._end.query())
        if request.landed is not None:
            landing.take_answer(landed=request.landed)
        self._stream.synchronize()
        seconds = time.monotonic() - self._began
        lost = tuple(landing.stream_lost(n) for n in range(landing.layers))
        if request.landed is None:
            landing.take_answer(landed=False)
        data = torch.cat(self._aside, dim=1).cpu().numpy().tobytes()
        digest = hashlib.sha256(data).digest()
        return m.Forwarded(digest, data.count(m.POISON), lost, early, seconds)

    def close(self) -> None:
        """Only once no mover has the pool."""
        self._waiter.close()
