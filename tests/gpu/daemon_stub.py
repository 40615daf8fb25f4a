"""The daemon's mover supervision with a directory that only remembers: for deaths of movers."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from directory.core.actions import CopyKind, CopyPart, SubmitCopy
from directory.core.events import CopyDone, Event, MoverLost
from directory.core.limits import MOVER_SILENCE_MS_MAX
from directory.daemon import movers
from directory.daemon.clock import now_us
from directory.daemon.loop import Loop
from directory.daemon.registration import Registration
from directory.protocol.messages import Register
from tests.gpu import peer_messages as m
from tests.gpu.support import DEADLINE_S, SEGMENT_BYTES, TIER_BYTES, packed
from transfer.host_tier import HostTierMemory


class DaemonStub:
    """Implements `MoverHost`; the test turns the loop."""

    def __init__(self, device: str, *, silence_ms_max: int = MOVER_SILENCE_MS_MAX) -> None:
        self._loop = Loop()
        self.tier = HostTierMemory.create(TIER_BYTES, SEGMENT_BYTES)
        self.movers = movers.Movers(
            self._loop, self, device, self.tier, silence_ms_max, Counter[str]()
        )
        self.done: dict[int, CopyDone] = {}
        self.lost: list[MoverLost] = []
        self.imported: set[int] = set()
        self.serving = False
        self._last_op = 0

    def __enter__(self) -> Self:
        self.movers.start()
        self.turn_until(lambda: self.serving)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.movers.close()
        self._loop.close()

    # MoverHost.

    def tell(self, event: Event) -> None:
        """Remember what the directory would be told."""
        if isinstance(event, CopyDone):
            self.done[event.op] = event
        elif isinstance(event, MoverLost):
            self.lost.append(event)
            self.imported.clear()
            self.serving = False

    def on_imported(self, pool: int, ok: bool, code: str, detail: str) -> None:
        """Remember a pool."""
        assert ok, f"{code}: {detail}"
        self.imported.add(pool)

    def on_unmapped(self, pool: int) -> None:
        """A released pool is let go; nothing here waits for that."""

    def on_serving(self) -> None:
        """Remember that a mover serves."""
        self.serving = True

    # The test's side.

    def import_pool(self, number: int, pool: m.Pool, fds: Sequence[int]) -> None:
        """Import a pool and wait for it."""
        message = Register("peer", b"x", "mirrored", b"", b"")
        self.movers.import_pool(number, Registration(message, pool.layout, pool.handles, fds))
        self.turn_until(lambda: number in self.imported)

    def submit(
        self, kind: CopyKind, source: int, pages: Iterable[int], target: int, onto: Iterable[int]
    ) -> int:
        """Hand a copy over; returns its number."""
        self._last_op += 1
        part = CopyPart(source, packed(pages), target, packed(onto))
        self.movers.submit(SubmitCopy(self._last_op, kind, (part,), (), ()))
        return self._last_op

    def copy(
        self, kind: CopyKind, source: int, pages: Iterable[int], target: int, onto: Iterable[int]
    ) -> CopyDone:
        """Hand a copy over and wait for its end."""
        op = self.submit(kind, source, pages, target, onto)
        self.turn_until(lambda: op in self.done)
        return self.done[op]

    def turn_until(self, condition: Callable[[], bool]) -> None:
        """Turn the loop until a condition holds."""
        give_up = now_us() + int(DEADLINE_S * 1e6)
        while not condition():
            assert now_us() < give_up, f"still waiting: {self.movers!r}"
            due = self.movers.due_us()
            wait_s = 0.2 if due is None else max(0.0, min(0.2, (due - now_us()) / 1e6))
            self._loop.turn(wait_s)
            self.movers.on_time(now_us())

    def host_page(self, slot: int, page_bytes: int) -> bytes:
        """The bytes of a slot."""
        view = self.tier.page(slot, page_bytes)
        try:
            return bytes(view)
        finally:
            view.release()
