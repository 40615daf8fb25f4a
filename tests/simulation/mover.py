"""A simulated mover process: the real engine over the simulated device, behind a channel.

Owns one engine and device and the two ordered channels to its daemon. When it is killed nothing
of it happens any more; what it had said before can still be read. A mover whose daemon is dead is
an orphan: it goes on for a while with what it had begun, and nobody hears it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable

from directory.core.actions import SubmitCopy
from directory.core.events import CopyDone, PagesDamaged
from directory.core.ids import HOST, OpId, PoolId
from directory.core.tokens import pack_pages, unpack_pages
from tests.simulation.device import SimDevice
from tests.simulation.heap import Heap
from tests.simulation.memory import PoolMemory, SimImport, SimTier
from tests.simulation.options import Options
from transfer.device.protocol import DeviceLost
from transfer.engine import Engine, EngineEvent
from transfer.engine_limits import EngineLimits
from transfer.messages import Imported

Said = EngineEvent | Imported
Take = Callable[[Said], None]


class SimMover:
    """One mover process. `take`: the daemon's ear; `ended`: told when it ends by itself."""

    def __init__(
        self,
        heap: Heap,
        rng: random.Random,
        options: Options,
        take: Take,
        ended: Callable[[], None],
    ) -> None:
        self.alive = True
        self.said: deque[Said] = deque()
        self.device = SimDevice(heap, rng, options, self._wake)
        limits = EngineLimits(
            slice_bytes=options.slice_bytes,
            submissions_max=options.submissions_max,
            fence_deadline_us=options.fence_ms * 1000,
        )
        self.engine = Engine(self.device, heap.clock, limits)
        self._heap = heap
        self._rng = rng
        self._options = options
        self._take = take
        self._ended = ended
        self._heard_us = 0
        self._said_us = 0
        self._awake = False
        self._polling = False
        self._written: dict[int, OpId] = {}

    def open_tier(self, tier: SimTier) -> None:
        """Have the host tier opened."""
        self._tell(lambda: self.engine.open_tier(tier))

    def import_pool(self, pool: PoolId, memory: PoolMemory) -> None:
        """Have a pool imported; answered by `Imported`."""
        self._tell(lambda: self._import(pool, memory))

    def release_pool(self, pool: PoolId) -> None:
        """Have a pool released; answered by `PoolReleased`."""
        self._tell(lambda: self.engine.release_pool(pool))

    def submit(self, copy: SubmitCopy) -> None:
        """Have a copy carried out; answered by `CopyDone`."""
        for part in copy.parts:
            if part.target == HOST:
                self._written.update(dict.fromkeys(unpack_pages(part.target_pages), copy.op))
        self._tell(lambda: self.engine.submit(copy))

    def find_damage(self, slots: Iterable[int]) -> None:
        """Report slots as damaged, but for those that a copy is, or may be, writing into."""
        found = [slot for slot in slots if slot not in self._written]
        if self.alive and found:
            self._say(PagesDamaged(pack_pages(found), "scrub"))

    def kill(self) -> None:
        """End the process now, in the middle of whatever it does."""
        self.alive = False
        self.device.dead = True

    def _tell(self, say: Callable[[], None]) -> None:
        self._heard_us = max(self._heard_us, self._heap.now_us + self._delay_us())
        self._heap.after(self._heard_us - self._heap.now_us, self._hear, say)

    def _hear(self, say: Callable[[], None]) -> None:
        if self.alive:
            say()
            self._turn()

    def _import(self, pool: PoolId, memory: PoolMemory) -> None:
        self.engine.add_pool(SimImport(pool, memory))
        self._say(Imported(pool, True))

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._heap.after(1, self._woken)

    def _woken(self) -> None:
        self._awake = False
        self._turn()

    def _poll(self) -> None:
        self._polling = False
        self._turn()

    def _turn(self) -> None:
        if not self.alive:
            return
        try:
            for event in self.engine.step():
                self._say(event)
        except DeviceLost:
            # A slice that never ends: only the end of the process makes its pages quiet.
            self.kill()
            self._heap.after(1, self._ended)
            return
        if not self.engine.idle and not self._polling:
            self._polling = True
            self._heap.after(self._options.poll_us, self._poll)

    def _say(self, event: Said) -> None:
        if isinstance(event, CopyDone):
            self._written = {slot: op for slot, op in self._written.items() if op != event.op}
        self.said.append(event)
        self._said_us = max(self._said_us, self._heap.now_us + self._delay_us())
        self._heap.after(self._said_us - self._heap.now_us, self._deliver)

    def _deliver(self) -> None:
        if self.said:
            self._take(self.said.popleft())

    def _delay_us(self) -> int:
        return 1 + int(self._rng.expovariate(1.0) * self._options.network_us / 4)
