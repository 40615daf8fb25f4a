"""The daemon's end of the KV events: notes changes and hands them to the publisher when idle.

Owns the publisher's process and the socket to it. Nothing of it is on a client's way: a change
costs a note in memory, notes are handed on between two messages, and when the publisher is slow or
gone they are dropped and everything is told anew later. The daemon never waits for it, and goes on
without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog
import zmq

from directory.core import limits
from directory.core.directory import Directory
from directory.core.ids import Place
from directory.core.node import Node, Tap
from directory.daemon.clock import now_us
from directory.daemon.config import Settings
from directory.daemon.loop import Loop
from directory.daemon.runtime import StartError, remove_stale_socket
from directory.kvevents.addresses import Options, parse
from directory.kvevents.capture import Capture
from directory.kvevents.records import encode
from transfer.mover_handle import child_environment

SOCKET_NAME: Final = "kv.sock"
LISTING_NAME: Final = "kv_events.json"
PROGRAM: Final = "directory.daemon.kv_main"
RESTART_AFTER_US: Final = 1_000_000
RETRY_US: Final = 20_000
"""How soon a publisher that takes nothing now is tried again."""
QUIET_US: Final = 500
"""Nothing is handed on so soon after a client's message, for the next one may follow upon it..."""
EVERY_US: Final = 100_000
"""...nor so soon after what was handed on last: a match that comes right after other work finds
the processor's caches full of that, so it is done seldom, and much at once..."""
WAIT_US_MAX: Final = 100_000
"""...unless something has been waiting for so long."""
WALK_US: Final = 5_000
"""While everything is told anew, a part of it is told so often though clients ask."""

log = structlog.get_logger("kv_events")


def open_feed(settings: Settings, folder: Path, counters: Counter[str]) -> KvFeed | None:
    """The feed that the settings ask for; None: no KV events."""
    if not settings.kv_events:
        return None
    socket_path = folder / SOCKET_NAME
    options = Options(
        feed=f"ipc://{socket_path}",
        parent=os.getpid(),
        base=parse(settings.kv_events),
        form=settings.kv_events_form,
        union=parse(settings.kv_events_union) if settings.kv_events_union else None,
        detokenizer=settings.kv_events_detokenizer or None,
        listing=str(folder / LISTING_NAME),
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    return KvFeed(socket_path, options, counters)


def join_taps(taps: Iterable[Tap | None]) -> Tap | None:
    """One tap that tells all; None where there is none."""
    listening = [tap for tap in taps if tap is not None]
    if len(listening) < 2:
        return listening[0] if listening else None

    def tell(node: Node, place: Place, sign: int) -> None:
        for tap in listening:
            tap(node, place, sign)

    return tell


class KvFeed:
    """Feeds one publisher. `watch` a directory; then `on_time` in every turn of the loop."""

    def __init__(self, socket_path: Path, options: Options, counters: Counter[str]) -> None:
        self._options = options
        self._counters = counters
        self._path = socket_path
        self._loop: Loop | None = None
        self._capture: Capture | None = None
        self._bound = False
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._not_before_us = 0
        self._asked_us = 0
        """When a client last wanted something."""
        self._waiting_us = 0
        """Since when something waits, or when a walk last went on; 0: nothing waits."""
        self._handed_us = 0
        """When the last of what waited was handed on."""
        self._going_on = False
        """What waits is being handed on, a message a turn."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._feed: zmq.Socket[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the publisher, 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def watch(self, directory: Directory) -> Tap:
        """Return the tap of a new directory; what was told of the one before is void."""
        self._capture = Capture(directory.tree, directory.pools)
        return self._capture

    def start(self, loop: Loop) -> None:
        """Start a publisher. Raises `StartError` where that cannot be."""
        self._loop = loop
        self._start(loop)

    def due_us(self) -> int | None:
        """When `on_time` has something to do next, or None."""
        capture = self._capture
        idle = capture is not None and not (capture.busy or capture.lost)
        return None if self._feed is not None and idle else max(1, self._not_before_us)

    def pools_changed(self) -> None:
        """A pool has come or gone."""
        if self._capture is not None:
            self._capture.meet_pools()

    def on_time(self, *, idle: bool) -> bool:
        """Hand on what was noted, if it is time; whether that was done. `idle`: no client wanted
        anything just now."""
        capture, feed = self._capture, self._feed
        if capture is None:
            return False
        if feed is not None and not (capture.busy or capture.lost):
            self._waiting_us = 0
            return False
        now = now_us()
        if not idle:
            self._asked_us = now
        if now < self._not_before_us:
            return False
        feed = feed or self._restart()
        if feed is None:
            return False
        if not self._waiting_us:
            self._waiting_us = now
        due_us = self._due_us(capture)
        if now < due_us:
            self._not_before_us = due_us
            return False
        if capture.lost:
            if not int(feed.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                self._not_before_us = now + RETRY_US
                return False
            capture.begin()
            self._counters["kv_told_anew"] += 1
        done = self._hand_on(capture, feed)
        if not capture.busy:
            self._handed_us, self._waiting_us = now, 0
        elif capture.walking:
            self._waiting_us = now  # a walk is long: it goes on while nobody asks, or now and then
        self._going_on = capture.busy and not capture.walking
        return done

    def close(self) -> None:
        """End the publisher. Repeatable."""
        self._bury()
        self._context.term()
        for place in (self._path, self._path.with_name(LISTING_NAME)) if self._bound else ():
            place.unlink(missing_ok=True)

    # Private.

    def _start(self, loop: Loop) -> None:
        self._feed = self._bind()
        options = msgspec.structs.replace(self._options, parent=os.getpid())
        command = [sys.executable, "-P", "-m", PROGRAM, msgspec.json.encode(options).decode()]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=child_environment()
            )
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            raise StartError(f"the publisher of KV events cannot be started: {error}") from None
        loop.watch(self._pidfd, self._lose)
        self._counters["kv_publishers_started"] += 1

    def _due_us(self, capture: Capture) -> int:
        """When what waits goes on, if nobody asks until then."""
        if self._going_on or capture.crowded:
            return 0
        due_us = self._asked_us + QUIET_US
        if not (capture.walking or capture.lost):
            due_us = max(due_us, self._handed_us + EVERY_US)
        return min(due_us, self._waiting_us + (WALK_US if capture.walking else WAIT_US_MAX))

    def _hand_on(self, capture: Capture, feed: zmq.Socket[bytes]) -> bool:
        """Hand one message on, some 100 microseconds of work; whether there was one and it went."""
        taken = capture.take() if capture.busy else []
        if not taken:
            return False
        try:
            feed.send(encode(taken), zmq.NOBLOCK)
        except zmq.Again:
            capture.put_back(taken)
            self._not_before_us = now_us() + RETRY_US
            return False
        self._counters["kv_records"] += len(taken)
        return True

    def _bind(self) -> zmq.Socket[bytes]:
        feed = self._context.socket(zmq.PUSH)
        feed.setsockopt(zmq.LINGER, 0)
        feed.setsockopt(zmq.IMMEDIATE, 1)
        feed.setsockopt(zmq.SNDHWM, limits.KV_EVENTS_MESSAGES_QUEUED)
        try:
            remove_stale_socket(self._path)
            feed.bind(self._options.feed)
        except zmq.ZMQError as error:
            feed.close(linger=0)
            raise StartError(f"the socket {self._path} cannot be bound: {error}") from None
        except StartError:
            feed.close(linger=0)
            raise
        self._bound = True
        # Until the new publisher has written it, nobody is to go where the last one was.
        self._path.with_name(LISTING_NAME).unlink(missing_ok=True)
        return feed

    def _restart(self) -> zmq.Socket[bytes] | None:
        if self._loop is None:
            return None
        try:
            self._start(self._loop)
        except StartError as error:
            log.error("no publisher", reason=str(error))
            self._bury()
            self._not_before_us = now_us() + RESTART_AFTER_US
        return self._feed

    def _lose(self, _: int) -> None:
        log.warning("the publisher of kv events ended", publisher=self.pid)
        self._counters["kv_publishers_lost"] += 1
        self._bury()
        self._not_before_us = now_us() + RESTART_AFTER_US

    def _bury(self) -> None:
        """Let go of the process and of what it has not taken."""
        if self._pidfd >= 0:
            if self._loop is not None:
                self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._feed is not None:
            self._feed.close(linger=0)
            self._feed = None
        if self._capture is not None and not self._capture.lost:
            self._capture.lose()
