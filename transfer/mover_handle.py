"""The daemon's end of a mover: start it, talk to it, see it die.

Owns the child process and the channel. Never blocks: what cannot be sent at once is queued, and
the daemon's loop watches `fileno` (messages) and `pidfd` (death). Whether a dead mover is replaced
is the daemon's to decide.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

import transfer
from directory.core.actions import SubmitCopy
from directory.core.errors import BadMessage
from directory.core.ids import PoolId
from directory.core.limits import FDS_PER_FRAME_MAX, MIB
from transfer.host_tier import HostTierMemory
from transfer.ipc.channel import FdChannel, close_fds
from transfer.ipc.memory import MemoryHandle
from transfer.ipc.sync import SyncHandle
from transfer.layout import PoolLayout
from transfer.messages import (
    Expect,
    ImportPool,
    OpenChecksums,
    OpenHostTier,
    Ping,
    ReleasePool,
    Reply,
    Request,
    Shutdown,
    decode_reply,
    encode,
)

TIMELINE = SyncHandle()
DAEMONS_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The mover ignores them: they are for the daemon, which ends its movers in order."""
TIER_PORTION_BYTES = 1024 * MIB
"""Of the host tier in one message: pinning so much takes well below a second."""


class MoverHandle:
    """A running (or dead) mover. Start it from the main thread: it dies with that thread."""

    def __init__(self, process: subprocess.Popen[bytes], channel: FdChannel, device: str) -> None:
        self._process = process
        self.channel = channel
        self.device = device
        self.pidfd = os.pidfd_open(process.pid)

    @classmethod
    def spawn(
        cls,
        device: str = "cpu",
        *,
        python: str = sys.executable,
        program: str = "transfer.mover",
        options: Sequence[str] = (),
        held_fds: Sequence[int] = (),
    ) -> "MoverHandle":
        """Start a mover and return at once; its `Ready` comes over the channel. Raises `OSError`.

        `device`: "cpu" or "cuda:<UUID>". `options`: further flags, such as "--unpinned".
        `held_fds`: descriptors that the mover does nothing with but hold open until it is dead.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [python, "-P", "-m", program, "--device", device, *options]
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        # The child inherits what is blocked, so a signal to the whole process group cannot end it
        # before it has come to ignoring those; one to this process is delivered right after.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, DAEMONS_SIGNALS)
        with theirs:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *held_fds),
                    env=child_environment(),
                )
            except OSError:
                ours.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            return cls(process, FdChannel(ours), device)
        except OSError:  # no descriptor is left that would tell of its death
            ours.close()
            process.kill()
            process.wait()
            raise

    @property
    def pid(self) -> int:
        """Process id of the mover."""
        return self._process.pid

    @property
    def want_write(self) -> bool:
        """Whether to poll `fileno` for writing, too, and call `flush`."""
        return self.channel.want_write

    def fileno(self) -> int:
        """The channel's descriptor, to be polled."""
        return self.channel.fileno()

    def flush(self) -> bool:
        """Send what is queued; say whether all is gone."""
        return self.channel.flush()

    def receive(self) -> list[Reply]:
        """Replies that have arrived. Raises `ChannelClosed` when the mover is gone, and
        `BadMessage` when it speaks another language (then replace it)."""
        replies: list[Reply] = []
        for payload, fds in self.channel.receive():
            close_fds(fds)  # a mover has none to give
            try:
                replies.append(decode_reply(payload))
            except msgspec.DecodeError as error:
                raise BadMessage(f"mover {self.pid} sent an unknown reply: {error}") from error
        return replies

    def open_tier(self, tier: HostTierMemory) -> int:
        """Hand the tier's segments over; returns how many `TierOpened` will answer.

        In portions, so that a mover that pins them gives a sign of life between two.
        """
        fds = tier.fds
        at_once = min(FDS_PER_FRAME_MAX, max(1, TIER_PORTION_BYTES // tier.shape.segment_bytes))
        firsts = range(0, len(fds), at_once)
        for first in firsts:
            self._send(OpenHostTier(tier.shape, first), fds[first : first + at_once])
        return len(firsts)

    def open_checksums(
        self, tier: HostTierMemory, table: int, *, verify: bool, scrub_bytes_s: int
    ) -> int:
        """Hand the table of checksums over, before the tier; one `TierOpened` answers."""
        self._send(OpenChecksums(tier.shape, verify, scrub_bytes_s), (table,))
        return 1

    def import_pool(
        self,
        pool: PoolId,
        layout: PoolLayout,
        handles: Sequence[MemoryHandle],
        fds: Sequence[int],
        sync: SyncHandle = TIMELINE,
        page_table: bool = False,
        staging: bool = False,
    ) -> None:
        """Ask for a pool; `fds`: one an allocation whose kind has one, timelines, words, and with
        `page_table` that of the table, with `staging` those of ring and event.

        They stay the caller's.
        """
        self._send(ImportPool(pool, layout, tuple(handles), sync, page_table, staging), fds)

    def release_pool(self, pool: PoolId) -> None:
        """Ask for a pool to be closed."""
        self._send(ReleasePool(pool))

    def submit(self, copy: SubmitCopy) -> None:
        """Hand a copy over."""
        self._send(copy)

    def expect(self, pool: PoolId) -> None:
        """A copy into the pool is likely to be asked for in a moment."""
        del pool  # whoever has it is this one
        self._send(Expect())

    def ping(self, token: int) -> None:
        """Ask for a sign of life."""
        self._send(Ping(token))

    def shutdown(self) -> None:
        """Ask the mover to end by itself, in order."""
        self._send(Shutdown())

    def exit_status(self) -> int | None:
        """Exit status once the process has ended (negative: by that signal), or None."""
        return self._process.poll()

    def terminate(self, how: signal.Signals) -> None:
        """Signal the process, if it still lives; its pidfd tells when it is gone.

        It ignores SIGTERM and SIGINT; `shutdown` asks it to end and `kill` ends it.
        """
        if self.exit_status() is None:
            self._process.send_signal(how)

    def kill(self) -> None:
        """End the process without its help."""
        self.terminate(signal.SIGKILL)

    def close(self) -> int:
        """Kill the mover if it still lives, reap it, and close everything. Repeatable.

        A killed process is gone within moments, so this wait is short.
        """
        self.kill()
        self.channel.close()
        status = self._process.wait()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return status

    def _send(self, request: Request, fds: Sequence[int] = ()) -> None:
        self.channel.send(encode(request), fds)

    def __repr__(self) -> str:
        status = self.exit_status()
        state = "running" if status is None else f"exited {status}"
        return f"<MoverHandle {self.device} pid {self.pid} {state}>"


def child_environment() -> dict[str, str]:
    """A child's environment: as ours, and able to import this package where it is not installed.

    `-P` keeps the current folder off the import path, whoever owns it.
    """
    root = str(Path(transfer.__file__).parent.parent)
    if Path(root).name in ("site-packages", "dist-packages"):
        return dict(os.environ)
    paths = [path for path in (os.environ.get("PYTHONPATH", ""), root) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
