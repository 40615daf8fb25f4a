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
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf
from contextlib import suppress
from typing import NamedTuple

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
from transfer.device.cpu import CpuDevice
from transfer.device.protocol import Device, DeviceLost
from transfer.engine import Engine, PoolReleased
from transfer.engine_limits import CUDA_LIMITS, EngineLimits
from transfer.host_tier import HostTierMemory
from transfer.imports import ImportedPool
from transfer.ipc.backends import MemoryByKind, NamedMemory
from transfer.ipc.channel import ChannelClosed, FdChannel, close_fds
from transfer.ipc.memory import CUDA_IPC, CUDA_VMM, MEMFD, DeviceMemoryIPC, SharedMemoryIPC
from transfer.ipc.sync import EVENT_SYNC, TIMELINE_SYNC, SyncHandle, Timelines, TimelineTable
from transfer.messages import (
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

PR_SET_PDEATHSIG = 1
DAEMONS_SIGNALS = (signal.SIGTERM, signal.SIGINT)
FENCE_SPIN_US = 2_000
FENCE_SPIN_SLEEP_S = 50e-6
FENCE_POLL_MS = 1
DETAIL_CHARS_MAX = 1_000
COLLECT_EVERY = (10_000, 10, 1_000_000)
"""Objects made, and collections of the young and the middle ones: what has lived for a while, which
is caches, is never walked through."""
CUDA_PREFIX = "cuda:"
EXIT_DEVICE_LOST = 3
"""Exit status of a mover whose device broke; any other mover can be started in its place."""

log = logging.getLogger("treecored.mover")


class Backend(NamedTuple):
    """What a mover is made of for one kind of device.

    `memory`: imports by kind of handle, beside shared memory. `syncs`: how to read the timelines
    of a pool, by the kind that its scheduler chose, beside plain timelines. `computing`: whether
    the GPU computes now.
    """

    device: Device
    memory: MappingOf[str, DeviceMemoryIPC]
    syncs: MappingOf[str, Callable[[TimelineTable, SyncHandle], Timelines]]
    limits: EngineLimits = EngineLimits()
    computing: Callable[[], bool] = lambda: True


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
        self._engine = Engine(device, now_us, limits or backend.limits, backend.computing)
        self._tier: HostTierMemory | None = None
        self._sums: Checksums | None = None
        self._scrubber: Scrubber | None = None
        self._stopping = False
        self._fences_since_us = 0  # since when there has been nothing to do but to watch fences
        self._idle_spin_us = (limits or backend.limits).idle_spin_us
        self._busy_us = 0  # when there was last something to do

    def run(self) -> None:
        """Serve until told to stop. Raises `ChannelClosed` when the daemon is gone."""
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
            if self._scrubber is not None:
                damaged = self._scrubber.step(now_us())
                if damaged:
                    self._send(PagesDamaged(packed_slots(damaged), "scrub"))
        self._channel.wait_sent(1.0)

    def _patience_ms(self) -> int | None:
        """How long to wait for a message before the next step; None: until there is one."""
        if self._engine.idle:
            self._fences_since_us = 0
            if self._idle_spin_us and now_us() - self._busy_us < self._idle_spin_us:
                return 0
            if self._scrubber is None:
                return None
            return max(0, -(-(self._scrubber.due_us - now_us()) // 1000))
        now = self._busy_us = now_us()
        if not self._engine.only_fences:
            self._fences_since_us = 0
            return 0
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


def leave_at_once(status: int) -> None:
    """End without tidying up: calls into a broken context may never return."""
    logging.shutdown()
    os._exit(status)


def make_device(name: str, *, pinned: bool = True) -> Backend:
    """The backend of a mover by its device's name on the command line: cpu, or cuda:<UUID>; also
    cpu:<name>, which reaches only pools that announce that name.

    Raises `SystemExit` for a name that means nothing, `TransferError` for a GPU that is not there.
    """
    if name.partition(":")[0] == "cpu":
        return Backend(CpuDevice(), {MEMFD: NamedMemory(name)} if ":" in name else {}, {})
    if name.startswith(CUDA_PREFIX):
        return _cuda_backend(name.removeprefix(CUDA_PREFIX), pinned=pinned)
    raise SystemExit(f"there is no device {name!r}; known: cpu, {CUDA_PREFIX}<UUID of a GPU>")


def _cuda_backend(uuid: str, *, pinned: bool) -> Backend:
    # Imported here: a mover of CPU pools runs without CUDA's bindings.
    from transfer.device.cuda import open_device
    from transfer.device.cuda_busy import Computing
    from transfer.device.cuda_calibrate import calibrate
    from transfer.ipc.cuda_events import EventReader
    from transfer.ipc.cuda_memory import CudaMemoryIPC
    from transfer.topology import Topology

    computing = Computing(uuid, now_us)
    device, driver = open_device(uuid, pinned=pinned, computing=computing)
    if pinned:
        log.info("calibrated: %s", calibrate(device, driver).as_rows())
    topology = Topology.probe(driver, driver.devices())
    for text in topology.describe():
        log.info("links of %s", text)
    memory = CudaMemoryIPC(driver, topology)
    return Backend(
        device,
        {CUDA_IPC: memory, CUDA_VMM: memory},
        {EVENT_SYNC: lambda table, sync: EventReader.open(driver, table, sync)},
        CUDA_LIMITS,
        computing,
    )


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
