"""The daemon with marks where something took long, for late_matches.py to say what a match met.

    python -m benchmarks.marked_daemon FILE serve ...

Owns the marks: every pause (nothing was there to do), every turn of the loop that took long and
what of it the processor's time was, every piece of a turn that did, by name. What took no time
leaves none, so that a turn costs some 1.5 us more (2.7 after a pause) and each message 0.3: nothing
that changes what is looked for. On SIGUSR1 the marks begin anew, on SIGUSR2 they are written to
FILE. It never changes what the daemon does.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns, thread_time_ns
from typing import Any, Final

import msgspec

from benchmarks.late_matches import Marks
from directory.analytics.log import AccessLog
from directory.cli import main as cli
from directory.core.directory import Directory
from directory.core.events import Asked, Event
from directory.daemon import kept_tier, kv_feed, lanes, metrics_feed, movers, recording, server
from directory.daemon.daemon import Daemon
from directory.daemon.loop import Loop
from directory.daemon.sessions import Sessions

LONG_NS: Final = 200_000
PAUSE_NS: Final = 20_000
SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
"""Nanoseconds of the thread: run, waited for a core; times it was run."""


def _of_event(directory: Directory, event: Event) -> str:
    del directory
    return type(event.body if isinstance(event, Asked) else event).__name__


class Marker:
    """Puts marks. Mutated by the daemon's thread alone."""

    def __init__(self, schedstat: Path = SCHEDSTAT) -> None:
        self.marks = Marks()
        self._busy_ns = self._cpu_ns = self._garbage_ns = self._delayed_ns = 0
        try:
            self._schedstat = os.open(schedstat, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._schedstat = -1  # this kernel does not count it

    def piece(
        self, owner: type, method: str, name: str, kind: Callable[..., str] | None = None
    ) -> None:
        """Mark each call that took long; `kind`: what it is called then, if not `name`."""
        function = getattr(owner, method)

        def marked(*arguments: Any, **named: Any) -> Any:
            begun = monotonic_ns()
            try:
                return function(*arguments, **named)
            finally:
                ended = monotonic_ns()
                if ended - begun > LONG_NS:
                    self.marks.pieces.append((kind(*arguments) if kind else name, begun, ended))

        setattr(owner, method, marked)

    def turns(self) -> None:
        """Mark pauses, and turns that took long."""
        wait = Loop._wait
        self._delay_ns()

        def marked(loop: Loop, timeout_s: float | None) -> list[tuple[int, int]]:
            begun = monotonic_ns()
            if begun - self._busy_ns > LONG_NS:
                cpu_ns = thread_time_ns() - self._cpu_ns
                self.marks.turns.append((self._busy_ns, begun, cpu_ns))
                self._delay_ns()  # what a long turn waited for is no pause's
            ready = wait(loop, timeout_s)
            ended = monotonic_ns()
            if ended - begun > PAUSE_NS:
                self.marks.pauses.append((begun, ended, min(self._delay_ns(), ended - begun)))
            self._busy_ns, self._cpu_ns = ended, thread_time_ns()
            return ready

        setattr(Loop, "_wait", marked)  # noqa: B010

    def _delay_ns(self) -> int:
        """How long this thread has waited for a core since it was asked last: where nothing long
        was done since the pause before, that is at the end of this one."""
        if self._schedstat < 0:
            return 0
        before, self._delayed_ns = (
            self._delayed_ns,
            int(os.pread(self._schedstat, 128, 0).split()[1]),
        )
        return self._delayed_ns - before

    def garbage(self, phase: str, _: dict[str, int]) -> None:
        """Python's collector begins or ends."""
        now = monotonic_ns()
        if phase == "start":
            self._garbage_ns = now
        elif now - self._garbage_ns > LONG_NS:
            self.marks.pieces.append(("garbage", self._garbage_ns, now))

    def begin(self) -> None:
        """Forget all marks."""
        self.marks = Marks()

    def write(self, file: Path) -> None:
        """Put them down, whole or not at all."""
        part = file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self.marks))
        os.replace(part, file)


def watch(marker: Marker) -> None:
    """Mark a daemon's parts, before one is made."""
    for owner, method, name in (
        (kept_tier.KeptTier, "apply", "journal"),
        (movers.Movers, "submit", "handing a copy on"),
        (movers.Movers, "_serve", "a mover's words"),
        (movers.Movers, "on_time", "movers' deadlines"),
        (kv_feed.KvFeed, "on_time", "events"),
        (recording.Recording, "work", "log"),
        (recording.Recording, "hurry", "log, in a hurry"),
        (recording.Recording, "ended", "noting an end"),
        (AccessLog, "_flush_some", "log written"),
        (AccessLog, "go_on", "a piece of the log"),
        (AccessLog, "_write", "log's disk"),
        (AccessLog, "_remove_old", "old log files removed"),
        (metrics_feed.Exporter, "on_time", "metrics"),
        (server.Server, "drain", "messages of ZeroMQ"),
        (lanes.Lanes, "_serve", "questions of one lane"),
        (lanes.Lanes, "_turn", "reports of one lane"),
        (Sessions, "on_released", "a session's end"),
        (Daemon, "stats", "figures"),
        (Daemon, "admin", "a person's question"),
        (Loop, "_work", "what could wait"),
    ):
        marker.piece(owner, method, name)
    marker.piece(Directory, "handle", "", _of_event)
    marker.turns()
    gc.callbacks.append(marker.garbage)


def main() -> int:
    """Serve, with marks."""
    file = Path(sys.argv[1])
    del sys.argv[1]
    marker = Marker()
    watch(marker)
    signal.signal(signal.SIGUSR1, lambda *_: marker.begin())
    signal.signal(signal.SIGUSR2, lambda *_: marker.write(file))
    cli.app()
    return 0


if __name__ == "__main__":
    sys.exit(main())
