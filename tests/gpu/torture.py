"""The torture test: `python -m tests.gpu.torture --seconds N --seed S [--without PROTECTION]`.

Two schedulers (torture_scheduler.py) publish, free, overwrite and remake as they like, while the
driver here backs their pages up, copies them to the other, and restores host pages into pages that
were just freed. Every page of every copy that counts is compared with what was published. With one
protection taken out the run must find wrong bytes; with all in place not a single one. Exit
status: 0 if the expectation held, 1 if not. `--staged`: pages go through staging slabs; and with
`--beside` a thread of the mover makes the driver's calls of all but single ones.

`--device cpu` runs it without a GPU; else UUIDs, one or two, of the schedulers' GPUs ("auto": all).
"""

import argparse
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from directory.core.actions import CopyPart, Fence, Landing, SubmitCopy, Word
from directory.core.events import CopyDone
from directory.core.ids import CURRENT, FORWARD, HOST, POOL_WORD
from scheduler_shim.landings import Landings
from tests.gpu import torture_messages as t
from tests.gpu.torture_mover import start_mover
from tests.gpu.torture_report import PROTECTIONS, Copying, HostPages, Side, report
from transfer.host_tier import HostTierMemory
from transfer.imports import STAGE_FDS
from transfer.ipc.channel import FdChannel, close_fds
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import TimelineTable
from transfer.layout import PoolLayout
from transfer.messages import Imported, Ready, Rejected, Released, TierOpened

ROOT = Path(__file__).parent.parent.parent
SEGMENT_BYTES = 16 << 20
TIER_BYTES = 256 << 20
UNDER_WAY_MAX = 48
DELAYED_MAX = 64


class Driver:
    """The daemon's part. `without`: the protection that is taken out, or nothing."""

    def __init__(
        self,
        devices: Sequence[str],
        seed: int,
        without: str,
        *,
        staged: bool = False,
        beside: bool = False,
        limits: Sequence[str] = (),
    ) -> None:
        self._rng = random.Random(seed)
        self._without = without
        self._mover = start_mover(devices[0], without, limits, staged=staged, beside=beside)
        self._tier = HostTierMemory.create(TIER_BYTES, SEGMENT_BYTES)
        self._mover.open_tier(self._tier)
        self._sides = [
            Side(n, *_start(devices[n % len(devices)], seed * 1000 + n, staged)) for n in range(2)
        ]
        self._host: HostPages | None = None
        self._layout: PoolLayout | None = None  # of every pool
        self._ipc = SharedMemoryIPC()
        self._tables: dict[int, TimelineTable] = {}  # by pool, for landing counters
        self._landings: dict[int, Landings] = {}
        self._copies: dict[int, Copying] = {}
        self._wanted: dict[int, Copying] = {}  # restores that wait for their targets, by token
        self._landed: dict[int, Copying] = {}
        self._delayed: deque[tuple[float, int, t.Published]] = deque()
        self._last_pool = self._last_op = self._last_token = 0
        self._stopping = False
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._from_scheduler = msgspec.msgpack.Decoder(t.FromScheduler)

    def run(self, seconds: float) -> None:
        """Torture for so long, then let everything end."""
        poller = select.poll()
        poller.register(self._mover, select.POLLIN)
        for side in self._sides:
            poller.register(side.channel, select.POLLIN)
        begun = 0.0
        give_up = time.monotonic() + seconds + 120
        while not all(side.ended for side in self._sides) or self._copies or self._landed:
            assert time.monotonic() < give_up, f"stuck: {self._copies} {self._wanted}"
            poller.poll(1)
            self._hear_mover()
            for side in self._sides:
                self._hear_scheduler(side)
            if all(side.pool for side in self._sides):
                begun = begun or time.monotonic()
                self._act()
            if begun and not self._stopping and time.monotonic() - begun > seconds:
                self._stopping = True
                for side in self._sides:
                    side.say(t.Stop())
            if self._mover.want_write:
                self._mover.flush()
            for side in self._sides:
                if side.channel.want_write:
                    side.channel.flush()
        self.counts["seconds"] = int(time.monotonic() - begun)

    def close(self) -> None:
        """End all processes."""
        for side in self._sides:
            side.close()
        self._mover.close()
        self._tier.close()
        for table in self._tables.values():
            table.close()

    # What it wants.

    def _act(self) -> None:
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            _, number, published = self._delayed.popleft()
            self._back_up(self._sides[number], published)
        if self._stopping or len(self._copies) + len(self._wanted) >= UNDER_WAY_MAX:
            return
        if self._host is not None and self._rng.random() < 0.5:
            slots = self._host.take(self._rng)
            if slots is not None:
                contents = tuple(self._host.contents[s] for s in slots)
                copying = Copying("load_back", None, tuple(slots), contents)
                self._ask(self._rng.choice(self._sides), copying)

    def _published(self, side: Side, published: t.Published) -> None:
        if self._rng.random() < 0.5 and len(self._copies) < UNDER_WAY_MAX:
            source = (side.number, side.pool, published)
            copying = Copying("peer_copy", source, published.pages, published.contents)
            self._ask(self._sides[1 - side.number], copying)
        if self._rng.random() < 0.15 and len(self._delayed) < DELAYED_MAX:
            # Some backups come late, as from a queue: their spans may be gone, and their pool too.
            self._delayed.append((time.monotonic() + 0.1, side.number, published))
        else:
            self._back_up(side, published)

    def _back_up(self, side: Side, published: t.Published) -> None:
        if self._host is None or len(self._copies) >= UNDER_WAY_MAX:
            return
        pool = side.pool_of(published.generation)
        slots = self._host.allocate(len(published.pages)) if pool else None
        if slots is None:
            return
        copying = Copying(
            "backup", (side.number, pool, published), published.pages, published.contents
        )
        copying.onto = tuple(slots)
        self._submit(copying, pool, published.pages, HOST, slots, [])

    def _ask(self, side: Side, copying: Copying) -> None:
        if not side.pool:
            self._give_up(copying)
            return
        self._last_token += 1
        self._wanted[self._last_token] = copying
        side.say(t.Ask(self._last_token, len(copying.contents)))

    def _targets(self, side: Side, targets: t.Targets) -> None:
        copying = self._wanted.pop(targets.token)
        pool = side.pool_of(targets.generation)
        if not targets.pages or not pool:
            self._give_up(copying)
            if targets.pages:
                side.say(t.Landed(targets.token, ()))
            return
        copying.token, copying.side = targets.token, side.number
        fences = _fences(pool, targets.position)
        if self._without == "destination-fence":
            fences = []
        source = copying.source[1] if copying.source else HOST
        self._submit(copying, source, copying.pages, pool, targets.pages, fences)

    def _submit(
        self,
        copying: Copying,
        source: int,
        pages: Sequence[int],
        target: int,
        onto: Sequence[int],
        fences: list[Fence],
    ) -> None:
        words: tuple[Word, ...] = ()
        if copying.source is not None:
            _, pool, published = copying.source
            written = _fences(pool, published.position)
            if self._without == "forward-fence":
                written = [fence for fence in written if fence.timeline != FORWARD]
            fences = [*written, *fences]
            words = (Word(pool, published.slot, published.word), Word(pool, POOL_WORD, 0))
        self._last_op += 1
        part = CopyPart(source, _packed(pages), target, _packed(onto))
        self._copies[self._last_op] = copying
        landing = None
        if copying.kind == "load_back" and self._rng.random() < 0.5 and self._layout is not None:
            landings = self._landings.get(target)
            copying.landing = landings.begin(len(self._layout.layers())) if landings else None
            if copying.landing is not None:
                landing = Landing(target, *copying.landing.wire)
        self._mover.submit(
            SubmitCopy(self._last_op, copying.kind, (part,), tuple(fences), words, landing=landing)
        )

    # What it hears.

    def _hear_mover(self) -> None:
        for reply in self._mover.receive():
            match reply:
                case CopyDone():
                    self._done(reply)
                case Imported():
                    assert reply.ok, reply.detail
                    for side in self._sides:
                        if side.coming == reply.pool:
                            side.arrived()
                case Released():
                    assert not reply.detail, reply.detail
                    self._released(reply.pool)
                case TierOpened():
                    assert reply.ok, reply.detail
                case Rejected():
                    raise AssertionError(reply.detail)
                case Ready():
                    pass

    def _done(self, done: CopyDone) -> None:
        copying = self._copies.pop(done.op)
        self.counts[f"{copying.kind} {done.outcome}"] += 1
        if done.outcome == "failed":
            self.counts[f"because {done.detail[:60]}"] += 1
        landed = done.outcome == "ok"
        if copying.landing is not None:
            if landed and copying.landing.landed_layers < copying.landing.layers:
                self.wrong.append(f"{copying!r}: {copying.landing!r} though all has landed")
            copying.landing.take_answer(landed=landed)
            self.counts[f"load_back layer by layer {done.outcome}"] += 1
        if copying.kind == "backup":
            assert self._host is not None
            if landed:
                self._verify(copying)
                self._host.keep(copying.onto, copying.contents)
            else:
                self._host.free(copying.onto)
            return
        self._give_up(copying)
        self._sides[copying.side].say(t.Landed(copying.token, copying.contents if landed else ()))
        if landed:
            self._landed[copying.token] = copying

    def _verify(self, copying: Copying) -> None:
        layout = self._layout
        assert layout is not None
        for page, slot, content in zip(copying.pages, copying.onto, copying.contents, strict=True):
            view = self._tier.page(slot, layout.page_bytes)
            if view != t.page_of(content, layout):
                self.wrong.append(f"{copying!r}: page {page} in the host tier")
            view.release()
        self.counts["pages verified at the host"] += len(copying.pages)

    def _hear_scheduler(self, side: Side) -> None:
        for payload, fds in side.channel.receive():
            message = self._from_scheduler.decode(payload)
            match message:
                case t.Registered():
                    self._registered(side, message, fds)
                case t.Published() if side.pool_of(message.generation):
                    self._published(side, message)
                case t.Targets():
                    self._targets(side, message)
                case t.Checked():
                    copying = self._landed.pop(message.token)
                    self.counts[f"pages verified after {copying.kind}"] += message.pages
                    if message.wrong:
                        self.wrong.append(f"{copying!r}: {message.wrong} pages in a pool")
                case t.Ended():
                    side.ended = True
                    self.counts.update(message.counts)
                case _:
                    self.counts["reports of another generation"] += 1
            close_fds(fds)

    def _registered(self, side: Side, message: t.Registered, fds: Sequence[int]) -> None:
        if self._host is None:
            self._host = HostPages(self._tier.shape, message.layout.page_bytes)
        self._layout = message.layout
        forget = self._without == "generation-check"
        self._last_pool += 1
        number = side.pool if forget and side.pool else self._last_pool
        # On a slow machine the last one may still be coming; the one before it has been left.
        last = side.coming or side.pool
        if last:
            side.leaving[last] = side.generation
            self._mover.release_pool(last)
        side.comes(number, message.generation, keep_names=forget)
        if not forget:
            timelines = fds[-2 - STAGE_FDS * message.staged]
            self._tables[number] = TimelineTable.open(self._ipc, timelines)
            self._landings[number] = Landings(self._tables[number])
        if number == side.pool:
            side.held = message, [os.dup(fd) for fd in fds]  # one name, so one after the other
        else:
            self._import(number, message, fds)

    def _import(self, number: int, message: t.Registered, fds: Sequence[int]) -> None:
        layout, handles = message.layout, message.handles
        self._mover.import_pool(number, layout, handles, fds, staging=message.staged)

    def _released(self, pool: int) -> None:
        if pool in self._tables:
            del self._landings[pool]
            self._tables.pop(pool).close()
        for side in self._sides:
            if pool in side.leaving:
                side.say(t.Unmapped(side.leaving.pop(pool)))
            if side.held is not None and side.coming == pool:
                message, fds = side.held
                side.held = None
                self._import(pool, message, fds)
                close_fds(fds)

    def _give_up(self, copying: Copying) -> None:
        if copying.kind == "load_back" and self._host is not None:
            self._host.give_back(copying.pages)


def _fences(pool: int, position: t.Position) -> list[Fence]:
    return [Fence(pool, FORWARD, position[0]), Fence(pool, CURRENT, position[1])]


def _packed(pages: Sequence[int]) -> bytes:
    return b"".join(page.to_bytes(4, "little") for page in pages)


def _start(device: str, seed: int, staged: bool) -> tuple[subprocess.Popen[bytes], FdChannel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [sys.executable, "-m", "tests.gpu.torture_scheduler", "--device", device]
    environment = dict(os.environ)
    if device != "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = device.removeprefix("cuda:")
    with theirs:
        process = subprocess.Popen(
            [*command, "--fd", str(theirs.fileno()), "--seed", str(seed)] + ["--staged"] * staged,
            cwd=ROOT,
            env=environment,
            pass_fds=(theirs.fileno(),),
        )
    return process, FdChannel(ours)


def device_names(text: str) -> list[str]:
    """Mover and scheduler devices of the command line's word."""
    if text == "cpu":
        return ["cpu"]
    if text == "auto":
        from transfer.ipc.cuda_driver import load_api, visible_devices

        return [f"cuda:{uuid}" for uuid in visible_devices(load_api())][:2]
    return [f"cuda:{uuid}" for uuid in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the torture; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.torture")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--without", choices=PROTECTIONS, default="")
    parser.add_argument("--staged", action="store_true")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--limit", action="append", default=[], help="of the mover: NAME=NUMBER")
    options = parser.parse_args(arguments)
    devices, staged = device_names(options.device), options.staged
    limits = [word for limit in options.limit for word in ("--limit", limit)]
    how = {"staged": staged, "beside": options.beside}
    driver = Driver(devices, options.seed, options.without, limits=limits, **how)
    try:
        driver.run(options.seconds)
    finally:
        driver.close()
    return report(options.seed, options.without, driver.counts, driver.wrong)


if __name__ == "__main__":
    sys.exit(main())
