"""A pretended mover, and supervision over it with a clock that the test turns."""

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import pytest

from directory.core.actions import SubmitCopy
from directory.core.events import Event
from directory.daemon import movers as module
from directory.daemon.loop import Loop
from directory.daemon.mover_states import MoverState
from directory.daemon.movers import Movers
from directory.daemon.registration import Registration
from directory.protocol.messages import Register
from transfer.ipc.channel import ChannelClosed
from transfer.layout import mha_layer_first
from transfer.messages import Ready, Reply

SILENCE_MS = 1_500
START_MS = 30_000
PING_MS = 250
LAYOUT = mha_layer_first(layers=1, page_size=4, page_count=8, heads=1, head_dim=8, itemsize=1)
REGISTRATION = Registration(Register("a", b"f", "mirrored", b"", b""), LAYOUT, (), ())


class PretendMover:
    """Stands for a `MoverHandle`: records what it is told, says what a test puts in its mouth."""

    made: ClassVar["list[PretendMover]"] = []
    spawned: ClassVar[list[tuple[str, tuple[str, ...]]]] = []
    spawn_error: OSError | None = None

    def __init__(self) -> None:
        self.fd, self.pidfd = os.eventfd(0), os.eventfd(0)
        self.told: list[object] = []
        self.says: list[Reply] = []
        self.want_write = False
        self.gone = False
        self.closed = False
        self.described: tuple[object, ...] = ()
        self.pid = 1000 + len(self.made)
        self.made.append(self)

    @classmethod
    def spawn(
        cls, device: str, *, options: Sequence[str], held_fds: Sequence[int]
    ) -> "PretendMover":
        assert not held_fds, "the rig has no lock to hold"
        if cls.spawn_error is not None:
            raise cls.spawn_error
        cls.spawned.append((device, tuple(options)))
        return cls()

    def fileno(self) -> int:
        return self.fd

    def say(self, *replies: Reply) -> None:
        self.says += replies
        os.eventfd_write(self.fd, 1)

    def die(self) -> None:
        self.gone = True
        os.eventfd_write(self.pidfd, 1)

    def receive(self) -> list[Reply]:
        if not self.says and self.gone:
            raise ChannelClosed("gone")
        said, self.says = self.says, []
        return said

    def flush(self) -> bool:
        return True

    def _hear(self, *what: object) -> None:
        if self.gone:
            raise ChannelClosed("gone")
        self.told.append(what)

    def open_tier(self, tier: object) -> int:
        self._hear("tier")
        return 2

    def import_pool(self, pool: int, *described: object) -> None:
        self._hear("import", pool)
        self.described = described

    def release_pool(self, pool: int) -> None:
        self._hear("release", pool)

    def submit(self, copy: SubmitCopy) -> None:
        self._hear("copy", copy.op)

    def expect(self, pool: int) -> None:
        self._hear("expect", pool)

    def ping(self, token: int) -> None:
        self._hear("ping")

    def shutdown(self) -> None:
        self._hear("shutdown")

    def kill(self) -> None:
        self.gone = True

    def close(self) -> int:
        if not self.closed:
            os.close(self.fd)
            os.close(self.pidfd)
        self.closed = True
        return -int(signal.SIGKILL)


class PretendTier:
    """A tier of which the pretended mover says it has two parts."""

    def close(self) -> None:
        """Nothing is open."""


class Rig:
    """Supervision over pretended movers and a clock that the test turns."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.events: list[Event] = []
        self.imported: list[tuple[int, bool, str, str]] = []
        self.unmapped: list[int] = []
        self.on_unmapped = self.unmapped.append
        self.serving = 0
        self.now = 1
        self.counters: Counter[str] = Counter()
        self.movers = Movers(
            self.loop, self, "cpu", None, SILENCE_MS, self.counters, start_ms_max=START_MS
        )

    def tell(self, event: Event) -> None:
        self.events.append(event)

    def on_imported(self, pool: int, ok: bool, code: str, detail: str) -> None:
        self.imported.append((pool, ok, code, detail))

    def on_serving(self) -> None:
        self.serving += 1

    @property
    def mover(self) -> PretendMover:
        return PretendMover.made[-1]

    def start_serving(self) -> None:
        self.movers.start()
        self.mover.say(Ready(1, "cpu"))
        self.loop.turn(0)
        assert self.movers.state is MoverState.SERVING

    def die(self) -> None:
        """The mover dies, and that is noticed."""
        self.mover.die()
        self.loop.turn(0)

    def wait_for_successor(self) -> int:
        """Let time pass until the next one starts; returns milliseconds."""
        due = self.movers.due_us()
        assert due is not None
        before, self.now = self.now, max(self.now, due)
        self.movers.on_time(self.now)
        return (self.now - before) // 1000


@contextmanager
def pretended_movers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig whose movers are pretended."""
    PretendMover.made = []
    PretendMover.spawned = []
    PretendMover.spawn_error = None
    rig = Rig()
    monkeypatch.setattr(module, "MoverHandle", PretendMover)
    monkeypatch.setattr(module, "now_us", lambda: rig.now)
    yield rig
    rig.movers.close()
    rig.loop.close()


def copy(op: int) -> SubmitCopy:
    """A copy of nothing."""
    return SubmitCopy(op, "backup", (), (), ())
