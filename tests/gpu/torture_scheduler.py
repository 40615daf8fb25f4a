"""A scheduler that does everything wrong that a correct scheduler may do, as fast as it can.

`python -m tests.gpu.torture_scheduler --fd N --device D --seed S`. It publishes pages that are not
written yet, frees pages whose old kernels are still to run, hands such pages out as targets of
restores, overwrites pages at the moment when others read them, and remakes its pool. It bumps the
word of a span before it frees its pages: that is the one promise that it keeps.
"""

import argparse
import os
import random
import select
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from directory.core.ids import CURRENT, FORWARD
from scheduler_shim.staging import SlabMemory, Staging
from tests.gpu import torture_messages as t
from transfer.ipc.channel import ChannelClosed, FdChannel, close_fds
from transfer.ipc.memory import MemoryHandle
from transfer.ipc.stage_ring import STAGE_BELOW_BYTES
from transfer.ipc.sync import TimelineTable, WordTable
from transfer.layout import PoolLayout, mha_layer_first

PAGES = 512
SPANS = 2048
AHEAD_MAX = 12
"""Signals that the host may be ahead of its lanes."""
GENERATION_S = 2.0
SLAB_BYTES = 2 << 20
LAYOUT = mha_layer_first(
    layers=2, page_size=16, page_count=PAGES, heads=4, head_dim=128, itemsize=2
)


class Pool(Protocol):
    """A pool with two lanes; see torture_cpu.py."""

    layout: PoolLayout
    timelines: TimelineTable
    words: WordTable

    @property
    def handles(self) -> tuple[MemoryHandle, ...]: ...
    @property
    def fds(self) -> list[int]: ...
    def write(
        self, lane: int, pages: Sequence[int], contents: Sequence[int], sleep_us: int
    ) -> None: ...
    def order(self, first: int, then: int) -> None: ...
    def signal(self) -> t.Position: ...
    def check(self, token: int, pages: Sequence[int], contents: Sequence[int]) -> None: ...
    def checked(self) -> list[tuple[int, int, int]]: ...
    def make_slab(self, nbytes: int) -> SlabMemory: ...
    def close(self) -> None: ...


class Span:
    """Published pages. `hot`: freed and overwritten as soon as others may begin to read them."""

    def __init__(self, slot: int, pages: list[int], position: t.Position, *, hot: bool) -> None:
        self.slot = slot
        self.pages = pages
        self.position = position
        self.hot = hot


class Generation:
    """One pool and what is where in it."""

    def __init__(self, number: int, pool: Pool, staging: Staging | None) -> None:
        self.number = number
        self.pool = pool
        self.staging = staging
        self.free = list(range(PAGES))  # the last freed is the first reused
        self.slots = deque(range(1, SPANS))  # the first freed is the last reused
        self.spans: list[Span] = []
        self.targets: dict[int, list[int]] = {}  # of restores under way, by token
        self.checking: dict[int, list[int]] = {}
        self.position: t.Position = (0, 0)
        self.unmapped = False
        self.born = time.monotonic()

    @property
    def behind(self) -> int:
        """Signals that have not passed."""
        return max(self.position[i] - self.pool.timelines.read(i) for i in (FORWARD, CURRENT))


class Scheduler:
    """The loop."""

    def __init__(self, channel: FdChannel, device: str, seed: int, *, staged: bool) -> None:
        self._channel = channel
        self._device = device
        self._staged = staged
        self._rng = random.Random(seed)
        self._next_content = self._rng.getrandbits(62)
        self._old: dict[int, Generation] = {}
        self._now = self._make(1, (0, 0))
        self._stopping = False
        self._counts: Counter[str] = Counter()
        self._decoder = msgspec.msgpack.Decoder(t.ToScheduler)

    def run(self) -> None:
        """Torture until told to stop and everything is over."""
        while True:
            self._receive()
            for generation in [self._now, *self._old.values()]:
                self._collect(generation)
            if self._stopping:
                if not any(g.targets or g.checking for g in (self._now, *self._old.values())):
                    break
                time.sleep(0.0005)
            elif self._now.behind < AHEAD_MAX:
                self._act()
            if self._channel.want_write:
                self._channel.flush()
        self._say(t.Ended(dict(self._counts)))
        self._channel.wait_sent(10)

    def _make(self, number: int, start: t.Position) -> Generation:
        """A pool whose timelines go on where its predecessor's were."""
        pool: Pool
        if self._device == "cpu":
            from tests.gpu.torture_cpu import CpuPool

            pool = CpuPool(LAYOUT, SPANS, start)
        else:
            from tests.gpu.torture_cuda import CudaPool

            pool = CudaPool(LAYOUT, SPANS, start)
        staging = None
        if self._staged:
            staging = Staging(LAYOUT, pool.make_slab(SLAB_BYTES))
            staging.begin(STAGE_BELOW_BYTES)
            handles = *pool.handles, staging.handle
            fds = [*pool.fds[:-2], *staging.slab_fds, *pool.fds[-2:], *staging.fds]
            self._say(t.Registered(number, staging.layout, handles, staged=True), fds)
        else:
            self._say(t.Registered(number, LAYOUT, pool.handles), pool.fds)
        generation = Generation(number, pool, staging)
        generation.position = start
        return generation

    # What it does by itself.

    def _act(self) -> None:
        now = self._now
        for span in [s for s in now.spans if s.hot and self._readable(now, s)]:
            # Others may have begun to read this very moment, or are about to.
            self._free_span(now, span, overwrite=True)
        if time.monotonic() - now.born > GENERATION_S:
            self._regenerate()
            return
        match self._rng.choices(("publish", "abort", "free", "rest"), (5, 3, 3, 1))[0]:
            case "publish":
                self._publish(now)
            case "abort":
                self._abort(now)
            case "free" if now.spans:
                span = self._rng.choice(now.spans)
                self._free_span(now, span, overwrite=self._rng.random() < 0.5)
            case _:
                time.sleep(self._rng.random() * 0.001)

    def _publish(self, now: Generation) -> None:
        count = self._rng.choice((1, 2, 4, 8, 16, 48, 96))
        if len(now.free) < count or not now.slots:
            return
        pages = self._allocate(now, count)
        contents = [self._content() for _ in pages]
        self._write(now, pages, contents, self._sleep_us())
        now.position = now.pool.signal()
        slot = now.slots.popleft()
        hot = self._rng.random() < 0.4
        now.spans.append(Span(slot, pages, now.position, hot=hot))
        word = now.pool.words.read(slot)
        self._counts["published"] += len(pages)
        self._say(t.Published(now.number, slot, word, tuple(pages), tuple(contents), now.position))

    def _abort(self, now: Generation) -> None:
        """A forward pass whose request is gone: its pages are free, its kernel is still to run."""
        count = self._rng.choice((1, 4, 16))
        if len(now.free) < count:
            return
        pages = self._allocate(now, count)
        self._write(now, pages, [self._content() for _ in pages], self._sleep_us(always=True))
        now.position = now.pool.signal()
        self._rng.shuffle(pages)
        now.free += pages
        self._counts["aborted"] += len(pages)

    def _free_span(self, now: Generation, span: Span, *, overwrite: bool) -> None:
        now.spans.remove(span)
        now.pool.words.bump(span.slot)  # before anything may refill its pages
        now.slots.append(span.slot)
        if overwrite:
            self._write(now, span.pages, [self._content() for _ in span.pages], 0)
            now.position = now.pool.signal()
        now.free += span.pages
        self._counts["freed"] += len(span.pages)

    def _write(self, now: Generation, pages: list[int], contents: list[int], sleep_us: int) -> None:
        """Write on one of the lanes, after what the other was told to do to the same pages."""
        lane = FORWARD if self._rng.random() < 0.85 else CURRENT
        now.pool.order(CURRENT if lane == FORWARD else FORWARD, lane)
        now.pool.write(lane, pages, contents, sleep_us)

    def _regenerate(self) -> None:
        old = self._now
        for span in old.spans:
            old.pool.words.bump(span.slot)
        old.pool.words.bump_pool()
        self._old[old.number] = old
        self._now = self._make(old.number + 1, old.position)
        self._counts["generations"] += 1

    def _readable(self, now: Generation, span: Span) -> bool:
        return all(now.pool.timelines.read(i) >= span.position[i] for i in (FORWARD, CURRENT))

    def _allocate(self, now: Generation, count: int) -> list[int]:
        taken = now.free[-count:]
        del now.free[-count:]
        return taken

    def _content(self) -> int:
        self._next_content = (self._next_content + 1) & t.MASK
        return self._next_content

    def _sleep_us(self, *, always: bool = False) -> int:
        return self._rng.randrange(200, 3_000) if always or self._rng.random() < 0.5 else 0

    # What the driver wants.

    def _receive(self) -> None:
        for payload, fds in self._channel.receive():
            close_fds(fds)
            message = self._decoder.decode(payload)
            match message:
                case t.Ask():
                    self._ask(message)
                case t.Landed():
                    self._landed(message)
                case t.Unmapped():
                    generation = self._old[message.generation]
                    assert not generation.targets, "copies were still under way"
                    generation.unmapped = True
                case t.Stop():
                    self._stopping = True

    def _ask(self, ask: t.Ask) -> None:
        now = self._now
        if len(now.free) < ask.pages or self._stopping:
            self._say(t.Targets(ask.token, now.number, (), now.position))
            return
        pages = self._allocate(now, ask.pages)  # just freed, and perhaps still to be written
        now.targets[ask.token] = pages
        now.position = now.pool.signal()
        self._say(t.Targets(ask.token, now.number, tuple(pages), now.position))

    def _landed(self, landed: t.Landed) -> None:
        for generation in (self._now, *self._old.values()):
            pages = generation.targets.pop(landed.token, None)
            if pages is None:
                continue
            if landed.contents:
                generation.checking[landed.token] = pages
                generation.pool.check(landed.token, pages, landed.contents)
            else:
                if generation.staging is not None:
                    generation.staging.settle()
                generation.free += pages

    def _collect(self, generation: Generation) -> None:
        for token, pages, wrong in generation.pool.checked():
            generation.free += generation.checking.pop(token)
            self._say(t.Checked(token, pages, wrong))
        if generation.unmapped and not generation.checking:
            del self._old[generation.number]
            if generation.staging is not None:
                self._counts["stage requests"] += generation.staging.requests
                generation.staging.close()
            generation.pool.close()

    def _say(self, message: t.FromScheduler, fds: Sequence[int] = ()) -> None:
        self._channel.send(msgspec.msgpack.encode(message), fds)


def main() -> int:
    """Run on an inherited descriptor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--staged", action="store_true")
    options = parser.parse_args()
    channel = FdChannel(socket.socket(fileno=options.fd))
    try:
        Scheduler(channel, options.device, options.seed, staged=options.staged).run()
        while True:  # until the driver has read everything
            select.select([channel], [], [])
            channel.receive()
    except ChannelClosed:
        return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
