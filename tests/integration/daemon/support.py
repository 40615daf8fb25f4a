"""A daemon in a process of its own, and a client made of nothing but the protocol.

Owns the processes and sockets it makes; both are context managers that leave nothing behind. The
client is deliberately raw: tests send through it what a well-behaved client never would.
"""

import os
import select
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import zmq

from directory.core.actions import Counters
from directory.core.errors import InstanceLive
from directory.core.events import Body, Insert, Match, Mode, Restore, Stats
from directory.core.namespace import NamespaceKey
from directory.protocol.codec import decode_reply, decode_session_reply, encode
from directory.protocol.messages import (
    Attach,
    ClientBody,
    DaemonBody,
    Envelope,
    Hello,
    Register,
    Registered,
    ReplyEnvelope,
    SessionRefused,
    SessionReply,
    SessionRequest,
    Welcome,
)
from transfer.ipc.channel import FdChannel
from transfer.ipc.memory import MemoryHandle, SharedMapping, SharedMemoryIPC
from transfer.ipc.sync import TimelineTable, WordTable
from transfer.layout import PoolLayout, mha_layer_first

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0
"""For all that takes moments on a quiet machine and is not what a test is about."""
LOOK_EVERY_S = 0.001
PAGE_SIZE = 4
T = TypeVar("T")


class DaemonProcess:
    """`treecored serve` in a process of its own; ready when constructed."""

    def __init__(
        self,
        runtime_dir: Path,
        *flags: str,
        program: Sequence[str] = (),
        wait: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.runtime_dir = runtime_dir
        self.stderr_path = runtime_dir.with_suffix(".log")
        ready_in, ready_out = os.pipe()
        command = [*(program or (sys.executable, "-m", "directory.cli.main", "serve"))]
        command += ["--runtime-dir", str(runtime_dir), "--host-tier", "4MiB", "--segment", "1MiB"]
        # Nothing is to stay behind in shared memory; tests of that say so in their own flags.
        command += ["--no-host-keep", "--ready-fd", str(ready_out), *flags]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TREECORED_")}
        try:
            with self.stderr_path.open("ab") as stderr:
                self.process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**environment, **(environ or {})},
                    stdin=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(ready_out,),
                )
        finally:
            os.close(ready_out)
        try:
            if wait:
                readable, _, _ = select.select([ready_in], [], [], DEADLINE_S)
                said = os.read(ready_in, 1) if readable else b""
                if said != b"\n":
                    self.kill()
                    raise AssertionError(f"the daemon did not start:\n{self.log()[-3000:]}")
        finally:
            os.close(ready_in)

    def log(self) -> str:
        """Everything it has logged."""
        return self.stderr_path.read_text(encoding="utf-8", errors="replace")

    def wait_for_mover(self, number: int) -> None:
        """Wait until the mover of that number, counted from 1, serves.

        A copy waits a few seconds for one, and a busy machine may need more to start it.
        """
        wait_until(lambda: self.log().count("mover ready") >= number)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait for its end."""
        self.process.send_signal(how)
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        """End it without its help. Repeatable."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(DEADLINE_S)
        self.kill()


class Pool:
    """A CPU pool in sealed memory with its tables, ready to be handed over."""

    def __init__(self, page_count: int = 64, layers: int = 2) -> None:
        self.ipc = SharedMemoryIPC()
        self.layout: PoolLayout = mha_layer_first(
            layers=layers,
            page_size=PAGE_SIZE,
            page_count=page_count,
            heads=1,
            head_dim=64,
            itemsize=1,
        )
        self.allocations: list[SharedMapping] = [
            self.ipc.create(f"pool-{n}", nbytes)
            for n, nbytes in enumerate(self.layout.allocation_bytes)
        ]
        self.timelines = TimelineTable.create(self.ipc, "timelines", landings=2)
        self.words = WordTable.create(self.ipc, "words", page_count + 1)

    @property
    def fds(self) -> list[int]:
        """Descriptors as `Register` wants them."""
        return [*(a.fd for a in self.allocations), self.timelines.fd, self.words.fd]

    def register(
        self, instance: str, mode: Mode = "mirrored", world_size: int = 1, rank: int = 0
    ) -> Register:
        """The message that hands it over."""
        handles = tuple(MemoryHandle("memfd", a.nbytes) for a in self.allocations)
        return Register(
            instance,
            self.layout.canonical().encode(),
            mode,
            encode(self.layout),
            msgspec.msgpack.encode(handles),
            world_size,
            rank,
        )

    def chunks(self, page: int) -> list[memoryview]:
        """The bytes of one page, buffer by buffer."""
        views = []
        for buffer in self.layout.buffers:
            start = buffer.offset + page * buffer.page_stride
            view = self.allocations[buffer.allocation].view
            views.append(view[start : start + buffer.chunk_bytes])
        return views

    def write(self, page: int, content: bytes) -> None:
        """Fill every chunk of a page with a repeated pattern, then let both timelines advance."""
        for chunk in self.chunks(page):
            chunk[:] = (content * (len(chunk) // len(content) + 1))[: len(chunk)]
            chunk.release()
        for line in (0, 1):
            self.timelines.write(line, self.timelines.read(line) + 1)

    def read(self, page: int) -> bytes:
        """The bytes of one page, all buffers behind one another."""
        chunks = self.chunks(page)
        content = b"".join(chunks)
        for chunk in chunks:
            chunk.release()
        return content

    def now(self) -> tuple[int, int]:
        """Values of both timelines."""
        return self.timelines.read(0), self.timelines.read(1)

    def close(self) -> None:
        """Unmap everything."""
        self.timelines.close()
        self.words.close()
        for allocation in self.allocations:
            self.ipc.close(allocation)


class SessionClient:
    """The session socket alone."""

    def __init__(self, runtime_dir: Path) -> None:
        self.channel = FdChannel.connect(str(runtime_dir / "session.sock"), DEADLINE_S)

    def call(self, message: SessionRequest, fds: Sequence[int] = ()) -> SessionReply:
        """One message and its answer."""
        payload, _ = self.channel.call(encode(message), fds, deadline_s=DEADLINE_S)
        return decode_session_reply(payload)

    def raw(self, payload: bytes, fds: Sequence[int] = ()) -> SessionReply:
        """Any bytes as a frame, and the answer."""
        got, _ = self.channel.call(payload, fds, deadline_s=DEADLINE_S)
        return decode_session_reply(got)

    def hello(self, low: int = 1, high: int = 1) -> SessionReply:
        """Say hello."""
        return self.call(Hello(low, high, "test client"))

    def close(self) -> None:
        """Hang up."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawClient:
    """A registered pool with its ZeroMQ connection. Nothing is sent that a test does not send."""

    def __init__(
        self,
        runtime_dir: Path,
        instance: str,
        mode: Mode = "mirrored",
        page_count: int = 64,
        world_size: int = 1,
        rank: int = 0,
        layers: int = 2,
    ) -> None:
        self.pool_memory = Pool(page_count, layers)
        self.instance = instance
        message = self.pool_memory.register(instance, mode, world_size, rank)
        # A daemon learns of an end a moment later, and may hear who comes after it before.
        registered = wait_until(lambda: self._register(runtime_dir, message))
        assert isinstance(registered, Registered), registered
        self.registered = registered
        self.pool, self.generation = registered.pool, registered.generation
        self.acked = 0
        self.seq = 0
        self.spans = 0
        self.context = zmq.Context(io_threads=1)
        self.dealers: list[zmq.Socket[bytes]] = []  # keeps replaced ones until they are closed
        self.dealer = self.connect()
        assert type(self.ask(Attach(self.pool, registered.secret), seq=0)).__name__ == "Attached"

    def _register(self, runtime_dir: Path, message: Register) -> SessionReply | None:
        """Open a session and register; None while the instance's last session is not over."""
        self.session = SessionClient(runtime_dir)
        welcome = self.session.hello()
        assert isinstance(welcome, Welcome), welcome
        self.epoch = welcome.epoch
        reply = self.session.call(message, self.pool_memory.fds)
        if isinstance(reply, SessionRefused) and reply.code == InstanceLive.code:
            self.session.close()
            return None
        return reply

    def connect(self) -> "zmq.Socket[bytes]":
        """A new DEALER at the daemon's endpoint; closed with the client."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.connect(self.registered.endpoint)
        self.dealers.append(dealer)
        return dealer

    def send(self, body: ClientBody | Body, *, seq: int | None = None, answered: int = 0) -> int:
        """Send a message under the next number, or under a given one."""
        if seq is None:
            self.seq += 1
            seq = self.seq
        self.dealer.send(encode(Envelope(self.epoch, seq, answered, body)))  # type: ignore[arg-type]
        return seq

    def receive(self, dealer: "zmq.Socket[bytes] | None" = None) -> ReplyEnvelope:
        """The next reply."""
        socket = dealer or self.dealer
        assert socket.poll(int(DEADLINE_S * 1000)), "no reply came"
        envelope = decode_reply(socket.recv())
        self.acked = max(self.acked, envelope.acked)
        return envelope

    def answer_to(self, seq: int) -> DaemonBody:
        """Read on until the answer to a number comes."""
        while True:
            envelope = self.receive()
            if envelope.seq == seq and type(envelope.body).__name__ != "Acked":
                return envelope.body

    def ask(self, body: ClientBody | Body, *, seq: int | None = None) -> DaemonBody:
        """Send a message and return its answer."""
        return self.answer_to(self.send(body, seq=seq))

    def report(self, body: Body) -> None:
        """Send a message that only gets acknowledged, and wait for that."""
        seq = self.send(body)
        while self.acked < seq:
            self.receive()

    def stats(self, *, check: bool = True) -> dict[str, int]:
        """The daemon's counters; no invariant may be broken."""
        answer = self.ask(Stats(check))
        assert isinstance(answer, Counters), answer
        assert answer.violations == ()
        return answer.counters

    # What a scheduler does.

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Publish pages under a new span."""
        self.spans += 1
        self.report(
            Insert(
                "r", 0, NamespaceKey(), packed(tokens), packed(pages), self.spans, 0,
                self.pool_memory.now(),
            )
        )  # fmt: skip

    def match(self, tokens: Sequence[int], start_pages: int = 0) -> DaemonBody:
        """Ask what lies beyond, with a lease."""
        return self.ask(Match("r", 0, NamespaceKey(), packed(tokens), start_pages))

    def restore(self, receipt: int, start_page: int, pages: Sequence[int]) -> DaemonBody:
        """Have pages copied into the own pool."""
        return self.ask(Restore("r", 0, receipt, start_page, packed(pages), self.pool_memory.now()))

    def close(self) -> None:
        """Hang up and unmap."""
        self.context.destroy(linger=0)
        self.session.close()
        self.pool_memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def packed(numbers: Sequence[int]) -> bytes:
    """Numbers as the wire packs them."""
    return array("I", numbers).tobytes()


def wait_until(look: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """Look again and again until the result is true.

    What is waited for may need the processor that this would take with looking.
    """
    give_up = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < give_up, "it did not come to pass"
        time.sleep(LOOK_EVERY_S)
    return found
