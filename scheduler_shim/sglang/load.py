"""One layer-wise load: what is being brought, for whom, and how far it is.

Owns the record; layerwise.py decides. It must never say that a layer has landed once anything of
the load was given up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Protocol

from directory.core.actions import AnyReply, Restored
from scheduler_shim.fills import Fill
from scheduler_shim.landings import Landing
from scheduler_shim.request import Request
from scheduler_shim.sglang.offers import LookUps
from scheduler_shim.sglang.waiting import Around


class Load:
    """A load from its beginning on; mutated by `Layerwise` alone.

    `req`: SGLang's request, for whose life the record lasts at most. `in_row`: its targets count as
    that request's. `unproven`: no output that was computed from it has been used yet.
    """

    __slots__ = (
        "_wait",
        "answered",
        "complete",
        "fill",
        "in_row",
        "landed",
        "landing",
        "launched",
        "lost",
        "orphan",
        "req",
        "request",
        "rid",
        "row",
        "settled",
        "unproven",
        "waited",
    )

    def __init__(
        self,
        req: Any,
        request: Request,
        fill: Fill,
        landing: Landing,
        wait: Callable[[Load, int], bool],
    ) -> None:
        self.rid: str = req.rid
        self.req = req
        self.request = request
        self.fill = fill
        self.landing = landing
        self.row = Request(0, request.name, request.key, b"", b"", request.page_key)
        self.row.row = fill.targets
        self.in_row = True
        self.launched = False
        self.complete = False  # every layer was in place before anything was lost
        self.lost = ""  # why what was computed from it does not count
        self.answered = False  # no mover writes into the targets
        self.landed = False  # and they hold what they must, by the daemon's word
        self.settled = False  # its targets are pages of the row like others
        self.orphan = False  # no answer will come, and a mover may still write
        self.unproven = True
        self.waited: set[int] = set()  # layers that a stream waits for
        self._wait = wait

    def wait(self, layer: int) -> bool:
        """Wait for a layer; False: nothing more is to be waited for."""
        return self._wait(self, layer)

    @property
    def targets(self) -> bytes:
        """Packed names of the pages that are being loaded."""
        return self.fill.targets.tobytes()

    def look(self) -> bool:
        """Whether every layer is in place, and nothing was given up before."""
        if not self.lost and self.landing.landed_layers >= self.landing.layers:
            self.complete = True
        return self.complete

    def wants(self, layer: int) -> bool:
        """Whether a layer is to be waited for: it is not in place, and may still come."""
        return not self.lost and not self.look() and self.landing.landed_layers <= layer

    def __repr__(self) -> str:
        state = "settled" if self.settled else "answered" if self.answered else "under way"
        return f"<Load of {self.rid}, {state}, {self.lost or self.landing!r}>"


class LoadLookUps(LookUps, Protocol):
    """What is asked of the look-ups (held.py) besides offers."""

    def wait_for(self, rid: str) -> None:
        """Hold a request back for the fill that it has joined."""
        ...

    def hand_over(self, rid: str) -> None:
        """A request is admitted with its load: forget it, lease and all."""
        ...

    def wake(self, fill: Fill, *, landed: bool) -> None:
        """Whoever waits for a fill may go on: what landed is in the tree, or it did not."""
        ...


class AroundLoads(Around, Protocol):
    """What loads need of the shim around them."""

    def peek(self, wait_us: int) -> Iterable[tuple[int, AnyReply | None]]:
        """Answers that have come and were not taken yet; waits a moment for the next one."""
        ...

    def take_answers(self) -> None:
        """Take what has come."""
        ...


def count_bytes(around: Around, reply: Restored) -> None:
    """Count what has landed, by where it came from."""
    page_bytes = around.pool.page_bytes
    around.count("bytes_restored_host", reply.host_pages * page_bytes)
    around.count("bytes_restored_peer", reply.peer_pages * page_bytes)


def end_request(req: Any, why: str) -> None:
    """Have SGLang end a request with status 503 as soon as it looks at its output."""
    if not req.finished():
        reasons = importlib.import_module("sglang.srt.managers.schedule_batch")
        req.to_finish = reasons.FINISH_ABORT(
            why, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"
        )


def without(
    ranges: list[tuple[int, int]], pages: tuple[int, int] | None, page_size: int
) -> list[tuple[int, int]]:
    """Ranges of a row in tokens, less those of some pages [first, last)."""
    if pages is None:
        return ranges
    first, last = pages[0] * page_size, pages[1] * page_size
    pieces = [
        piece
        for start, end in ranges
        for piece in ((start, min(end, first)), (max(start, last), end))
    ]
    return [(start, end) for start, end in pieces if start < end]
