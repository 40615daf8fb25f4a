"""The mover process: `python -m transfer.mover --fd N`.

Owns one engine, one device and the channel to its daemon. It ends with its daemon, at once: by
the parent-death signal, and at the end of the channel; it ignores SIGTERM and SIGINT. A message
that it does not understand is answered, never fatal. It decides nothing about pages: it copies
what it is told, or says why not.
"""

import argparse
import ctypes
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from directory.core.actions import SubmitCopy
from directory.core.errors import (
    BadMessage,
    ImportFailed,
    ProtocolError,
    TransferError,
    TreecoredError,
)
from directory.core.events import CopyDone, PagesDamaged
from transfer.checksum import SumTable, load_hash, packed_slots
from transfer.checksum_copies import Checksums
from transfer.checksum_scrub import Scrubber
from transfer.device.protocol import Device, DeviceLost
from transfer.engine import Engine, PoolReleased
from transfer.engine_limits import EngineLimits
from transfer.host_tier import HostTierMemory
from transfer.imports import ImportedPool
from transfer.ipc.backends import MemoryByKind
from transfer.ipc.channel import ChannelClosed, FdChannel, close_fds
from transfer.ipc.marks import mark
from transfer.ipc.memory import MEMFD, SharedMemoryIPC
from transfer.ipc.sync import TIMELINE_SYNC, SyncHandle, Timelines, TimelineTable
from transfer.messages import (
    Expect,
    Imported,
    ImportPool,
    OpenChecksums,
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
from transfer.mover_backend import Backend, make_device, now_us

PR_SET_PDEATHSIG = 1
DAEMONS_SIGNALS = (signal.SIGTERM, signal.SIGINT)
FENCE_SPIN_US = 2_000
FENCE_LOOK_US = 200
EXPECTED_SPIN_US = 2_000
FENCE_SPIN_SLEEP_S = 50e-6
FENCE_POLL_MS = 1
DETAIL_CHARS_MAX = 1_000
COLLECT_EVERY = (10_000, 10, 1_000_000)
"""Objects made, and collections of the young and the middle ones: what has lived for a while, which
is caches, is never walked through."""
EXIT_DEVICE_LOST = 3
"""Exit status of a mover whose device broke; any other mover can be started in its place."""

log = logging.getLogger("treecored.mover")


class Mover:
    """The loop around an engine."""

    def __init__(
        self,
        channel: FdChannel,
        device: Device | Backend,
        limits: EngineLimits | None = None,
    ) -> None:
        backend = device if isinstance(device, Backend) else Backend(device, {}, {})
        device = backend.device
        self._channel = channel
        self._device = device
        self._ipc = SharedMemoryIPC()
        self._memory = MemoryByKind({MEMFD: self._ipc, **backend.memory})
        self._syncs = backend.syncs
        chosen = limits or backend.limits
        self._engine = Engine(device, now_us, chosen, backend.computing, backend.links)
        self._tier: HostTierMemory | None = None
        self._sums: Checksums | None = None
        self._scrubber: Scrubber | None = None
        self._stopping = False
        self._fences_since_us = 0  # since when there has been nothing to do but to watch fences
        self._idle_spin_us = (limits or backend.limits).idle_spin_us
        self._awake_us = 0  # until when it looks for the next copy before it sleeps
        self._beside = backend.beside
        self._close = backend.close
        if ranges_min := (limits or backend.limits).submit_beside:
            backend.submit_beside(ranges_min)

    def run(self) -> None:
        """Serve until told to stop. Raises `ChannelClosed` when the daemon is gone."""
        lost = False
        try:
            self._serve()
        except DeviceLost:
            lost = True  # a call into a broken context may never return: nobody waits for one
            raise
        finally:
            if not lost:
                self._close()

    def _serve(self) -> None:
        # What was imported lives as long as this process: no collection has to walk through it
        # while a forward pass waits for a layer.
        gc.freeze()
        gc.set_threshold(*COLLECT_EVERY)
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
            self._beside()
            if self._scrubber is not None:
                damaged = self._scrubber.step(now_us())
                if damaged:
                    self._send(PagesDamaged(packed_slots(damaged), "scrub"))
        self._channel.wait_sent(1.0)

    def _patience_ms(self) -> int | None:
        """How long to wait for a message before the next step; None: until there is one."""
        if self._engine.idle:
            self._fences_since_us = 0
            if self._awake_us and now_us() < self._awake_us:
                os.sched_yield()  # whoever asks may have been put on this very core
                return 0
            if self._scrubber is None:
                return None
            return max(0, -(-(self._scrubber.due_us - now_us()) // 1000))
        now = now_us()
        if self._idle_spin_us:
            self._awake_us = max(self._awake_us, now + self._idle_spin_us)
        if not self._engine.only_fences:
            self._fences_since_us = 0
            return 0
        if not self._fences_since_us:
            self._fences_since_us = now
        if now - self._fences_since_us > FENCE_SPIN_US:
            return FENCE_POLL_MS
        # poll() knows whole milliseconds only, and most fences pass sooner; a sleep of this length
        # takes twice as long, so at first there is none where a mover may spin at all.
        if not self._idle_spin_us or now - self._fences_since_us > FENCE_LOOK_US:
            time.sleep(FENCE_SPIN_SLEEP_S)
        else:
            os.sched_yield()  # the scheduler whose fence it is may want this very core
        return 0

    def _receive(self) -> None:
        frames = self._channel.receive()
        self._fences_since_us = 0
        for payload, fds in frames:
            try:
                self._handle(decode_request(payload), fds)
            except msgspec.DecodeError as error:
                self._reject(BadMessage.code, str(error))
            except DeviceLost:
                raise
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
            case OpenChecksums():
                self._open_checksums(request, fds)
            case ImportPool():
                self._import_pool(request, fds)
            case ReleasePool():
                self._engine.release_pool(request.pool)
            case Expect():
                mark("expected")
                if self._idle_spin_us:
                    self._awake_us = now_us() + EXPECTED_SPIN_US
            case Ping():
                self._send(Pong(request.token))
            case Shutdown():
                self._stopping = True

    def _submit(self, request: SubmitCopy) -> None:
        if self._stopping:
            self._send(CopyDone(request.op, "failed", "the mover is shutting down"))
            return
        try:
            self._engine.submit(request)
        except TransferError as error:
            self._send(CopyDone(request.op, "failed", str(error)[:DETAIL_CHARS_MAX]))

    def _open_checksums(self, request: OpenChecksums, fds: Sequence[int]) -> None:
        try:
            request.shape.check()
            if self._tier is not None or len(fds) != 1:
                raise TransferError("one table of checksums comes before the host tier")
            hash_of = load_hash()
            table = SumTable(os.dup(fds[0]), request.shape)
            self._tier = HostTierMemory(self._ipc, request.shape)
            self._sums = Checksums(table, self._tier, hash_of, verify=request.verify)
            self._engine.use_checksums(self._sums)
            if request.scrub_bytes_s:
                self._scrubber = Scrubber(self._sums, request.scrub_bytes_s, now_us())
        except TransferError as error:
            self._send(TierOpened(False, 0, str(error)[:DETAIL_CHARS_MAX]))
        else:
            self._send(TierOpened(True, 0))

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
                memory=self._memory,
                tables=self._ipc,
                read_timelines=lambda table: self._timelines(table, request.sync),
                page_table=request.page_table,
                staging=request.staging,
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

    def _timelines(self, table: TimelineTable, sync: SyncHandle) -> Timelines:
        """Read a pool's timelines in the way that its scheduler chose; the table is theirs then."""
        if sync.kind == TIMELINE_SYNC:
            return table
        read = self._syncs.get(sync.kind)
        if read is None:
            table.close()
            known = ", ".join([TIMELINE_SYNC, *self._syncs])
            raise ImportFailed(f"this mover knows the syncs {known}, not {sync.kind!r}")
        return read(table, sync)

    def _reject(self, code: str, detail: str) -> None:
        log.warning("message rejected: %s", detail)
        self._send(Rejected(code, detail[:DETAIL_CHARS_MAX]))

    def _send(self, reply: Reply) -> None:
        self._channel.send(encode(reply))


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


def leave_at_once(status: int) -> None:
    """End without tidying up: calls into a broken context may never return."""
    logging.shutdown()
    os._exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a mover on an inherited channel; returns the exit status."""
    parser = argparse.ArgumentParser(prog="transfer.mover", description="Started by treecored.")
    parser.add_argument("--fd", type=int, required=True, help="inherited channel")
    parser.add_argument("--parent", type=int, required=True, help="process id of the daemon")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:<UUID of a GPU>")
    parser.add_argument("--unpinned", action="store_true", help="leave host memory unregistered")
    parser.add_argument("--limit", action="append", default=[], help="NAME=NUMBER of EngineLimits")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    # What is sent to a whole terminal or service is for the daemon, which ends its movers in
    # order; a mover that outlived it would be ended by its death. Blocked until here (spawn).
    for number in DAEMONS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DAEMONS_SIGNALS)
    logging.basicConfig(stream=sys.stderr, format="mover %(process)d: %(levelname)s %(message)s")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    channel = FdChannel(socket.socket(fileno=options.fd))
    try:
        backend = make_device(options.device, pinned=not options.unpinned)
        Mover(channel, backend, backend.limits.changed(options.limit)).run()
    except ChannelClosed:
        return 0
    except DeviceLost:
        log.exception("the device is lost, and this mover with it")
        leave_at_once(EXIT_DEVICE_LOST)
        return EXIT_DEVICE_LOST
    except TransferError as error:
        log.error("device %s cannot be used: %s", options.device, error)
        with suppress(ProtocolError, OSError):
            channel.send(encode(Rejected(error.code, str(error)[:DETAIL_CHARS_MAX])))
        return 1
    except ProtocolError:
        # Frames cannot be told apart any more; the daemon starts another mover.
        log.exception("the daemon's channel is broken")
        return 1
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
