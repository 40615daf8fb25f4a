"""The mover process: `python -m transfer.mover --fd N`.

Owns one engine, one device and the channel to its daemon. It ends with its daemon, at once: by
the parent-death signal, and at the end of the channel. A message that it does not understand is
answered, never fatal. It decides nothing about pages: it copies what it is told, or says why not.
"""

import argparse
import ctypes
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence

import msgspec

from directory.core.actions import SubmitCopy
from directory.core.errors import BadMessage, ProtocolError, TransferError, TreecoredError
from directory.core.events import CopyDone
from transfer.device.cpu import CpuDevice
from transfer.device.protocol import Device
from transfer.engine import Engine, EngineLimits, PoolReleased
from transfer.host_tier import HostTierMemory
from transfer.imports import ImportedPool
from transfer.ipc.channel import ChannelClosed, FdChannel, close_fds
from transfer.ipc.memory import SharedMemoryIPC
from transfer.messages import (
    Imported,
    ImportPool,
    OpenHostTier,
    Ping,
    Pong,
    Ready,
    Rejected,
    Released,
    ReleasePool,
    Reply,
    Request,
    Shutdown,
    TierOpened,
    decode_request,
    encode,
)

PR_SET_PDEATHSIG = 1
FENCE_SPIN_US = 2_000
FENCE_SPIN_SLEEP_S = 50e-6
FENCE_POLL_MS = 1
DETAIL_CHARS_MAX = 1_000

log = logging.getLogger("treecored.mover")


class Mover:
    """The loop around an engine."""

    def __init__(
        self, channel: FdChannel, device: Device, limits: EngineLimits | None = None
    ) -> None:
        self._channel = channel
        self._device = device
        self._ipc = SharedMemoryIPC()
        self._engine = Engine(device, now_us, limits)
        self._tier: HostTierMemory | None = None
        self._stopping = False
        self._fences_since_us = 0  # since when there has been nothing to do but to watch fences

    def run(self) -> None:
        """Serve until told to stop. Raises `ChannelClosed` when the daemon is gone."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        writing = False
        self._send(Ready(os.getpid(), self._device.name))
        while not (self._stopping and self._engine.only_fences):
            if self._channel.want_write != writing:
                writing = not writing
                # While the daemon does not read its answers, it is asked for no more questions.
                poller.modify(self._channel, select.POLLOUT if writing else select.POLLIN)
            if poller.poll(self._patience_ms()):
                if writing:
                    self._channel.flush()
                else:
                    self._receive()
            for event in self._engine.step():
                self._send(Released(*event) if isinstance(event, PoolReleased) else event)
        self._channel.wait_sent(1.0)

    def _patience_ms(self) -> int | None:
        """How long to wait for a message before the next step; None: until there is one."""
        if self._engine.idle:
            self._fences_since_us = 0
            return None
        if not self._engine.only_fences:
            self._fences_since_us = 0
            return 0
        now = now_us()
        if not self._fences_since_us:
            self._fences_since_us = now
        if now - self._fences_since_us > FENCE_SPIN_US:
            return FENCE_POLL_MS
        # poll() knows whole milliseconds only, and most fences pass sooner.
        time.sleep(FENCE_SPIN_SLEEP_S)
        return 0

    def _receive(self) -> None:
        frames = self._channel.receive()
        self._fences_since_us = 0
        for payload, fds in frames:
            try:
                self._handle(decode_request(payload), fds)
            except msgspec.DecodeError as error:
                self._reject(BadMessage.code, str(error))
            except TreecoredError as error:
                self._reject(error.code, str(error))
            except (OSError, ValueError, ArithmeticError, LookupError, MemoryError) as error:
                # What a message can provoke beyond the typed errors must not end the others'.
                log.exception("a message could not be carried out")
                self._reject(TreecoredError.code, f"{type(error).__name__}: {error}")
            finally:
                close_fds(fds)

    def _handle(self, request: Request, fds: Sequence[int]) -> None:
        match request:
            case SubmitCopy():
                self._submit(request)
            case OpenHostTier():
                self._open_tier(request, fds)
            case ImportPool():
                self._import_pool(request, fds)
            case ReleasePool():
                self._engine.release_pool(request.pool)
            case Ping():
                self._send(Pong(request.token))
            case Shutdown():
                self._stopping = True

    def _submit(self, request: SubmitCopy) -> None:
        if self._stopping:
            self._send(CopyDone(request.op, "failed", "the mover is shutting down"))
            return
        self._engine.submit(request)

    def _open_tier(self, request: OpenHostTier, fds: Sequence[int]) -> None:
        try:
            request.shape.check()
            if self._tier is None:
                self._tier = HostTierMemory(self._ipc, request.shape)
            elif self._tier.shape != request.shape:
                raise TransferError(f"the host tier is open as {self._tier.shape}")
            self._tier.open_segments(request.first, fds)
            self._engine.open_tier(self._tier)
        except TransferError as error:
            count = len(self._tier.segments) if self._tier else 0
            self._send(TierOpened(False, count, str(error)[:DETAIL_CHARS_MAX]))
        else:
            self._send(TierOpened(True, len(self._tier.segments)))

    def _import_pool(self, request: ImportPool, fds: Sequence[int]) -> None:
        try:
            pool = ImportedPool.open(
                request.pool,
                request.layout,
                request.handles,
                fds,
                memory=self._ipc,
                tables=self._ipc,
            )
            try:
                self._engine.add_pool(pool)
            except TransferError:
                pool.close()
                raise
        except TransferError as error:
            detail = str(error)[:DETAIL_CHARS_MAX]
            self._send(Imported(request.pool, False, detail, error.code))
        else:
            self._send(Imported(request.pool, True))

    def _reject(self, code: str, detail: str) -> None:
        log.warning("message rejected: %s", detail)
        self._send(Rejected(code, detail[:DETAIL_CHARS_MAX]))

    def _send(self, reply: Reply) -> None:
        self._channel.send(encode(reply))


def now_us() -> int:
    """Monotonic microseconds."""
    return time.monotonic_ns() // 1000


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; at once if it is dead already.

    The signal is tied to the *thread* that started this process, so that has to be one that lives
    as long as the daemon does.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def make_device(name: str) -> Device:
    """The device of a mover by its name on the command line."""
    if name == "cpu":
        return CpuDevice()
    raise SystemExit(f"there is no device {name!r}; known: cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a mover on an inherited channel; returns the exit status."""
    parser = argparse.ArgumentParser(prog="transfer.mover", description="Started by treecored.")
    parser.add_argument("--fd", type=int, required=True, help="inherited channel")
    parser.add_argument("--parent", type=int, required=True, help="process id of the daemon")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    # An interrupt at the terminal is for the daemon, which ends its movers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="mover %(process)d: %(levelname)s %(message)s")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    channel = FdChannel(socket.socket(fileno=options.fd))
    try:
        Mover(channel, make_device(options.device)).run()
    except ChannelClosed:
        return 0
    except ProtocolError:
        # Frames cannot be told apart any more; the daemon starts another mover.
        log.exception("the daemon's channel is broken")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
