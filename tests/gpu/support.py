"""The test's own side: scheduler processes (`Peer`) and a mover with a host tier (`Rig`)."""

import os
import select
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from directory.core.actions import CopyKind, CopyPart, Fence, Landing, SubmitCopy, Word
from directory.core.events import CopyDone
from directory.core.ids import CURRENT, FORWARD
from directory.daemon.cores import cores
from directory.daemon.mover_words import options_of
from tests.gpu import peer_messages as m
from transfer.host_tier import HostTierMemory
from transfer.ipc.channel import FdChannel, close_fds
from transfer.messages import Imported, Ready, Released, Reply, TierOpened
from transfer.mover_handle import MoverHandle

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 60.0
START_DEADLINE_S = 110.0
CYCLES_PER_MS = 1_980_000
"""Of `torch.cuda._sleep` at the boost clock; longer at a lower one."""
TIER_BYTES = 64 << 20
READ_BYTES = 8 << 20
"""Of pages in one answer; a frame has a limit."""
SEGMENTS = 4
SEGMENT_BYTES = TIER_BYTES // SEGMENTS

Answer = TypeVar("Answer", bound=msgspec.Struct)


def packed(pages: Iterable[int]) -> bytes:
    """A packed page list."""
    return array("I", pages).tobytes()


class Peer:
    """A scheduler process; see peer.py for what it does."""

    def __init__(self, gpu: str, **environment: str) -> None:
        """`gpu`: what it sees, in the form of CUDA_VISIBLE_DEVICES."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.peer", "--fd", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu, **environment},
                pass_fds=(theirs.fileno(),),
            )
        self._channel = FdChannel(ours)
        self._decoder = msgspec.msgpack.Decoder(m.FromPeer)
        self.device = ""
        self.fds: dict[str, list[int]] = {}
        self.pools: dict[str, m.Pool] = {}

    def ready(self) -> m.Hello:
        """Wait until the process is up."""
        hello, _ = self._next(m.Hello, START_DEADLINE_S)
        self.device = hello.device
        return hello

    def ask(self, request: m.ToPeer, expected: type[Answer]) -> Answer:
        """Say something and return the answer, of the expected type."""
        self._channel.send(msgspec.msgpack.encode(request))
        answer, fds = self._next(expected, DEADLINE_S)
        close_fds(fds)
        return answer

    def answer(self, expected: type[Answer]) -> Answer:
        """A further answer to the last request."""
        answer, fds = self._next(expected, DEADLINE_S)
        close_fds(fds)
        return answer

    def create(self, request: m.Create) -> m.Pool:
        """Make a pool; its descriptors are kept until it is dropped."""
        self._channel.send(msgspec.msgpack.encode(request))
        pool, fds = self._next(m.Pool, DEADLINE_S)
        self.pools[pool.name], self.fds[pool.name] = pool, fds
        return pool

    def carve(self, request: m.Carve) -> tuple[m.Pool, ...]:
        """Make several pools of one allocation."""
        self._channel.send(msgspec.msgpack.encode(request))
        answer, fds = self._next(m.Pools, DEADLINE_S)
        for number, pool in enumerate(answer.pools):
            self.pools[pool.name] = pool
            self.fds[pool.name] = fds[2 * number : 2 * number + 2]
        return answer.pools

    def refused(self, request: m.ToPeer) -> m.Failed:
        """The typed error that a request meets."""
        return self.ask(request, m.Failed)

    def fill(self, name: str, seed: int = -1) -> None:
        """Random bytes of a seed, or poison."""
        self.ask(m.Fill(name, seed), m.Done)

    def read(self, name: str, pages: Iterable[int]) -> bytes:
        """Pages as host pages, back to back."""
        rows = list(pages)
        at_once = max(1, READ_BYTES // self.pools[name].layout.page_bytes)
        pieces = [rows[at : at + at_once] for at in range(0, len(rows), at_once)]
        return b"".join(self.ask(m.Read(name, packed(p)), m.Content).data for p in pieces)

    def pages(self, name: str) -> list[bytes]:
        """Every page of a pool."""
        layout = self.pools[name].layout
        data = self.read(name, range(layout.page_count))
        size = layout.page_bytes
        return [data[at : at + size] for at in range(0, len(data), size)]

    def free_bytes(self) -> int:
        """Free memory of the GPU, as the driver counts it."""
        return self.ask(m.MemoryInfo(), m.Free).free

    def drop(self, name: str) -> None:
        """Free a pool there."""
        self.ask(m.Drop(name), m.Done)
        self.forget(name)

    def drop_all(self) -> None:
        """Free every pool there."""
        self.ask(m.Drop(), m.Done)
        for name in list(self.pools):
            self.forget(name)

    def forget(self, name: str) -> None:
        """Close the descriptors of a pool, as the daemon does when its session ends.

        Those of virtual memory keep the memory alive.
        """
        close_fds(self.fds.pop(name))
        del self.pools[name]

    def kill(self) -> None:
        """SIGKILL, and reaped."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        """End the process, however."""
        self.kill()
        self._channel.close()
        for name in list(self.pools):
            self.forget(name)

    def _next(self, expected: type[Answer], deadline_s: float) -> tuple[Answer, list[int]]:
        payload, fds = self._channel.wait_frame(deadline_s)
        answer = self._decoder.decode(payload)
        if not isinstance(answer, expected):
            close_fds(fds)
            raise AssertionError(f"expected {expected.__name__}, the peer says {answer!r:.1000}")
        return answer, fds


class Rig:
    """A mover on a GPU, a host tier, and what a daemon would say to it."""

    def __init__(
        self,
        uuid: str,
        *,
        options: Sequence[str] = (),
        program: str = "transfer.mover",
        tier_bytes: int = TIER_BYTES,
    ) -> None:
        started = time.monotonic()
        device = f"cuda:{uuid}"
        said = options_of(device, options, cores())  # as a daemon would start it here
        self.mover = MoverHandle.spawn(device, options=said, program=program)
        self._replies: list[Reply] = []
        self._last_op = 0
        self.tier = HostTierMemory.create(tier_bytes, tier_bytes // SEGMENTS)
        try:
            self.wait(Ready)
            self.ready_after_s = time.monotonic() - started
            self.mover.open_tier(self.tier)
            opened = self.wait(TierOpened)
            assert opened.ok, opened.detail
        except BaseException:
            self.close()
            raise
        self.serving_after_s = time.monotonic() - started

    def import_pool(self, number: int, peer: Peer, name: str) -> Imported:
        """Import a peer's pool; the answer may be a refusal."""
        pool = peer.pools[name]
        return self.import_raw(number, pool, peer.fds[name])

    def import_raw(self, number: int, pool: m.Pool, fds: Sequence[int]) -> Imported:
        """Import what is said to be a pool."""
        self.mover.import_pool(number, pool.layout, pool.handles, fds, pool.sync)
        return self.wait(Imported)

    def release(self, number: int) -> Released:
        """Release a pool and wait until it is unmapped."""
        self.mover.release_pool(number)
        return self.wait(Released, lambda reply: reply.pool == number)

    def submit(
        self,
        kind: CopyKind,
        parts: Sequence[tuple[int, Iterable[int], int, Iterable[int]]],
        fences: Iterable[Fence] = (),
        words: Iterable[Word] = (),
        landing: Landing | None = None,
    ) -> int:
        """Submit a copy of (source, pages, target, pages) parts; returns its number."""
        self._last_op += 1
        copy_parts = tuple(CopyPart(s, packed(sp), t, packed(tp)) for s, sp, t, tp in parts)
        self.mover.submit(
            SubmitCopy(
                self._last_op, kind, copy_parts, tuple(fences), tuple(words), landing=landing
            )
        )
        return self._last_op

    def done(self, op: int) -> CopyDone:
        """Wait for the end of a copy."""
        return self.wait(CopyDone, lambda reply: reply.op == op)

    def copy(
        self,
        kind: CopyKind,
        source: int,
        pages: Iterable[int],
        target: int,
        target_pages: Iterable[int],
        fences: Iterable[Fence] = (),
        words: Iterable[Word] = (),
    ) -> CopyDone:
        """Submit a copy of one part and wait for its end."""
        return self.done(self.submit(kind, [(source, pages, target, target_pages)], fences, words))

    def slots(self, count: int, page_bytes: int, choose: Callable[[int], list[int]]) -> list[int]:
        """`count` different host slots for pages of a size, chosen of all by their number."""
        shape = self.tier.shape
        each = shape.slots_of(0, page_bytes)
        numbers = choose(shape.segment_count * each)[:count]
        return [(number // each) << 16 | number % each for number in numbers]

    def host_page(self, slot: int, page_bytes: int) -> bytes:
        """The bytes of a slot."""
        view = self.tier.page(slot, page_bytes)
        try:
            return bytes(view)
        finally:
            view.release()

    def poison(self, value: int = 0xEE) -> None:
        """Fill the whole tier with one value."""
        for segment in self.tier.segments:
            segment.view[:] = bytes([value]) * segment.nbytes

    def wait(
        self,
        kind: type[Answer],
        which: Callable[[Answer], bool] = lambda _: True,
        deadline_s: float = DEADLINE_S,
    ) -> Answer:
        """The next reply of a kind; others are kept for later."""
        give_up = time.monotonic() + deadline_s
        while True:
            for reply in self._replies:
                if isinstance(reply, kind) and which(reply):
                    self._replies.remove(reply)
                    return reply
            if self.mover.want_write:
                self.mover.flush()
            writing = [self.mover] if self.mover.want_write else []
            if not any(select.select([self.mover], writing, [], 0.2)[:2]):
                assert time.monotonic() < give_up, f"no {kind.__name__} in {deadline_s} s"
            self._replies += self.mover.receive()

    def close(self) -> None:
        """Kill the mover and free the tier."""
        self.mover.close()
        self.tier.close()


def fences(pool: int, position: m.Position) -> list[Fence]:
    """The fence set of a pool at a position: forward and current stream."""
    return [Fence(pool, FORWARD, position.forward), Fence(pool, CURRENT, position.current)]


def figure(text: str) -> None:
    """Record a measured figure: in the file that TREECORED_FIGURES names, and in the output."""
    line = f"FIGURE {text}\n"
    sys.stderr.write(line)
    if path := os.environ.get("TREECORED_FIGURES"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)


def until(condition: Callable[[], bool], deadline_s: float) -> float:
    """Look again and again until a condition holds; returns how long that took in seconds."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > deadline_s:
            raise AssertionError(f"not within {deadline_s} s")
    return time.monotonic() - started
