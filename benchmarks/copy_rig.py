"""What the copy benchmark is run on: scheduler processes, a mover, and the daemon's part.

Owns those processes and what is registered with the mover. The mover is the product's own, started
as the daemon starts it; copies are the directory's own messages.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks import copy_messages as m
from benchmarks.copy_pages import packed
from directory.core.actions import CopyKind, CopyPart, Fence, Landing, SubmitCopy
from directory.core.events import CopyDone
from directory.daemon.cores import cores
from directory.daemon.mover_words import options_of
from transfer.host_tier import HostTierMemory
from transfer.ipc.channel import FdChannel, close_fds
from transfer.ipc.memory import MemoryHandle, SharedMemoryIPC
from transfer.ipc.sync import TimelineTable
from transfer.layout import PoolLayout
from transfer.messages import Imported, Ready, Reply, TierOpened
from transfer.mover_handle import MoverHandle

ROOT = Path(__file__).parents[1]
DEADLINE_S = 120.0
Answer = TypeVar("Answer", bound=msgspec.Struct)


class SchedulerProcess:
    """A scheduler; see copy_scheduler.py for what it does. `gpu`: UUID, "cpu" or "model"."""

    def __init__(self, gpu: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        kind = gpu if gpu in ("cpu", "model") else "cuda"
        command = [sys.executable, "-m", "benchmarks.copy_scheduler", "--device", kind]
        with theirs:
            self.process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
                pass_fds=(theirs.fileno(),),
            )
        self._channel = FdChannel(ours)
        self._decoder = msgspec.msgpack.Decoder(m.FromScheduler)
        self.fds: dict[str, list[int]] = {}
        self.memory: dict[str, m.Memory] = {}
        self.versions = ""

    def ready(self) -> None:
        """Wait until it is up."""
        hello, _ = self._next(m.Hello)
        self.versions = hello.versions

    def ask(self, request: m.ToScheduler, expected: type[Answer]) -> Answer:
        """Say something, and wait for the answer of the expected type."""
        self._channel.send(msgspec.msgpack.encode(request))
        answer, fds = self._next(expected)
        close_fds(fds)
        return answer

    def make(self, request: m.MakeMemory) -> None:
        """Have memory made; its descriptors are kept until the end."""
        self._channel.send(msgspec.msgpack.encode(request))
        self.memory[request.name], self.fds[request.name] = self._next(m.Memory)

    def make_slab(self, request: m.MakeSlab) -> tuple[MemoryHandle, list[int]]:
        """Have a slab made: its handle, and the descriptors of slab, ring and event."""
        self._channel.send(msgspec.msgpack.encode(request))
        memory, fds = self._next(m.Memory)
        self.fds[f"slab {request.name} {request.page_size}"] = fds
        return memory.handles[0], fds

    def steps_us(self) -> list[float]:
        """Stop stepping: what each step took."""
        return list(array("f", self.ask(m.StopSteps(), m.Steps).times_us))

    def timelines(self, name: str) -> TimelineTable:
        """The timelines of a memory, as the daemon could read them."""
        return TimelineTable.open(SharedMemoryIPC(), self.fds[name][-2])

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._channel.close()
        for fds in self.fds.values():
            close_fds(fds)

    def _next(self, expected: type[Answer]) -> tuple[Answer, list[int]]:
        payload, fds = self._channel.wait_frame(DEADLINE_S)
        answer = self._decoder.decode(payload)
        if not isinstance(answer, expected):
            close_fds(fds)
            raise RuntimeError(f"expected {expected.__name__}, the scheduler says {answer!r:.500}")
        return answer, fds


class MoverRig:
    """A mover with a host tier that is mapped, and touched, in this process too."""

    def __init__(
        self,
        device: str,
        tier_bytes: int,
        segment_bytes: int,
        limits: Sequence[str] = (),
        program: str = "transfer.mover",
    ) -> None:
        """`limits`: as the mover's --limit takes them, behind what a daemon would say here."""
        started = time.monotonic()
        said = [word for limit in limits for word in ("--limit", limit)]
        options = options_of(device, said, cores())
        self.mover = MoverHandle.spawn(device, options=options, program=program)
        self._replies: list[Reply] = []
        self._last_op = 0
        self.tier = HostTierMemory.create(tier_bytes, segment_bytes)
        self.wait(Ready)
        self.ready_s = time.monotonic() - started
        for _ in range(self.mover.open_tier(self.tier)):
            opened = self.wait(TierOpened)
            if not opened.ok:
                raise RuntimeError(opened.detail)
        self.open_s = time.monotonic() - started

    def add(self, number: int, scheduler: SchedulerProcess, name: str, layout: PoolLayout) -> None:
        """Import a scheduler's memory as a pool of a layout."""
        memory, fds = scheduler.memory[name], scheduler.fds[name]
        self.mover.import_pool(number, layout, memory.handles, fds)
        imported = self.wait(Imported)
        if not imported.ok:
            raise RuntimeError(imported.detail)

    def add_staged(
        self, number: int, scheduler: SchedulerProcess, name: str, layout: PoolLayout, nbytes: int
    ) -> None:
        """The same with a staging slab of so many bytes."""
        memory, fds = scheduler.memory[name], scheduler.fds[name]
        handle, more = scheduler.make_slab(m.MakeSlab(name, layout.page_size, nbytes))
        sizes = (*layout.allocation_bytes, handle.nbytes)
        whole = PoolLayout(layout.page_size, layout.page_count, layout.buffers, sizes)
        given = [*fds[:-2], *more[:-2], *fds[-2:], *more[-2:]]
        self.mover.import_pool(number, whole, (*memory.handles, handle), given, staging=True)
        imported = self.wait(Imported)
        if not imported.ok:
            raise RuntimeError(imported.detail)

    def submit(
        self,
        kind: CopyKind,
        source: int,
        pages: Iterable[int],
        target: int,
        onto: Iterable[int],
        *,
        fences: Sequence[Fence] = (),
        landing: Landing | None = None,
    ) -> int:
        """Hand a copy over; returns its number."""
        self._last_op += 1
        part = CopyPart(source, packed(pages), target, packed(onto))
        copy = SubmitCopy(self._last_op, kind, (part,), tuple(fences), (), landing=landing)
        self.mover.submit(copy)
        return self._last_op

    def done(self, op: int) -> CopyDone:
        """Wait for the end of a copy, which has to be a good one."""
        while True:
            for reply in self._replies:
                if isinstance(reply, CopyDone) and reply.op == op:
                    self._replies.remove(reply)
                    if reply.outcome != "ok":
                        raise RuntimeError(f"copy {op}: {reply.outcome}, {reply.detail}")
                    return reply
            self._receive()

    def wait(self, kind: type[Answer]) -> Answer:
        """The next reply of a kind; others are kept."""
        while True:
            for reply in self._replies:
                if isinstance(reply, kind):
                    self._replies.remove(reply)
                    return reply
            self._receive()

    def close(self) -> None:
        """Kill the mover and free the tier."""
        self.mover.close()
        self.tier.close()

    def _receive(self) -> None:
        if self.mover.want_write:
            self.mover.flush()
        writing = [self.mover] if self.mover.want_write else []
        if not any(select.select([self.mover], writing, [], DEADLINE_S)[:2]):
            raise RuntimeError(f"the mover says nothing for {DEADLINE_S} s")
        self._replies += self.mover.receive()
