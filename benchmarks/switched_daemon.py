"""`treecored serve` whose log, KV events and metrics can be taken off and put on while it runs.

`python -m benchmarks.switched_daemon FILE serve ...`. Owns the switch: a file of two bytes, what is
wanted and what is. Two daemons that run the same program are not equally fast, for where their
memory lies; one that has these things on at one time and not at another is the same daemon. Off, it
does what a daemon does that was started without them: the tree's tap, the sums and the background
are those of such a one. Put on again, they go on as if no time had passed, so that however short
the times are, they do no more in them than they would. What pages came and went meanwhile nobody
has noted: now and then a publisher is told everything anew, and that is waited for (`SETTLED`).
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any, Final

from directory.cli.main import app
from directory.daemon import daemon as program
from directory.daemon import main
from directory.daemon.background import Background
from directory.daemon.clock import now_us
from directory.daemon.kv_feed import KvFeed, join_taps
from directory.daemon.metrics_feed import Exporter
from directory.daemon.recording import Recording

OFF, ON, SETTLED = range(3)
"""States; `SETTLED` is on, and nothing waits to be written or told."""
WANTED_AT, IS_AT = range(2)
COUNT_AT, FILE_BYTES = 8, 16
COUNT: Final = struct.Struct("<Q")
"""How often something was done beside answering that nobody had asked for: what is asked next finds
the processor's caches full of that."""
LOOK: Final = signal.SIGUSR1
"""Wakes the daemon to look at what is wanted."""


class Switch(Background):
    """What a daemon does besides answering, or nothing of it."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        assert Switched.file is not None
        self._file = Switched.file
        self._is = ON
        self._asked = self._times = 0
        self._off: Recording | None = None
        self._off_us = 0
        self._stale = False
        self._all = (self._recording, self._kv, self._exporter)
        signal.signal(LOOK, lambda *_: None)  # the loop is woken by it, as by any

    def turn(self, now_us: int, *, quiet: bool) -> None:
        """As before, once what is wanted is so."""
        if self._file[WANTED_AT] != self._is:
            self._switch(self._file[WANTED_AT])
        daemon = Switched.daemon
        assert daemon is not None
        counters, recording = daemon.counters, self._recording
        before = recording._worked_us, counters["kv_records"]
        super().turn(now_us, quiet=quiet)
        if before != (recording._worked_us, counters["kv_records"]):
            asked = counters["frames"]
            if asked != self._asked:  # the first time since somebody asked
                self._asked = asked
                self._times += 1
                COUNT.pack_into(self._file, COUNT_AT, self._times)

    def _switch(self, wanted: int) -> None:
        daemon = Switched.daemon
        assert daemon is not None
        if wanted == OFF:
            self._off = self._off or _nothing_on(daemon)
            self._put(daemon, self._off, None, None)
            self._off_us, self._stale = now_us(), True
        elif self._is == OFF:
            self._put(daemon, *self._all)
            self._move_on(now_us() - self._off_us)
            self._is = ON
        if wanted == SETTLED and not self._settled():
            return
        self._is = self._file[IS_AT] = wanted

    def _move_on(self, by_us: int) -> None:
        """What was to be done at a time is to be done so much later."""
        recording, kv, _ = self._all
        if recording.ready_us is not None:
            recording.ready_us += by_us
        recording._flush_us += by_us
        recording._worked_us += by_us
        if kv is not None:
            kv._handed_us += by_us
            kv._not_before_us += by_us
            if kv._waiting_us:
                kv._waiting_us += by_us

    def _put(
        self, daemon: Any, recording: Recording, kv: KvFeed | None, exporter: Exporter | None
    ) -> None:
        daemon.recording, daemon._kv = recording, kv
        self._recording, self._kv, self._exporter = recording, kv, exporter
        tap = None if kv is None else kv._capture
        daemon._directory.tree.tap = join_taps((recording.tap, tap))

    def _settled(self) -> bool:
        recording, kv, _ = self._all
        capture = None if kv is None else kv._capture
        if self._stale and capture is not None:
            capture.lose()
        self._stale = False
        recorder = recording._recorder
        if recorder is not None and len(recorder):
            return False
        return capture is None or not (capture.lost or capture.busy)


def _nothing_on(daemon: Any) -> Recording:
    """The recording of a daemon that keeps sums alone."""
    off = Recording(None, host_bytes=0, now_us=now_us())
    for pool in daemon._directory.pools.values():
        off.pool_came(pool, now_us())
    return off


class Switched(program.Daemon):
    """A daemon that its background can find."""

    daemon: Switched | None = None
    file: mmap.mmap | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Switched.daemon = self


def run(arguments: list[str]) -> None:
    """Serve, and be switched by the file."""
    fd = os.open(Path(arguments[0]), os.O_RDWR)
    Switched.file = mmap.mmap(fd, FILE_BYTES)
    os.close(fd)
    Switched.file[IS_AT] = ON
    vars(program)["Background"] = Switch
    vars(main)["Daemon"] = Switched
    app(arguments[1:], prog_name="treecored")


if __name__ == "__main__":
    run(sys.argv[1:])
