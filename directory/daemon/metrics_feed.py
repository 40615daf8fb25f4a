"""The daemon's end of the metrics: answers its own exporter, which Prometheus reads.

Owns the address, and the exporter's process (metrics_main.py) with the channel to it. To put some
hundred samples into words takes milliseconds of Python, in a thread of this process milliseconds in
which nobody else is answered: here is only made what `treecored stats` is told as well. The daemon
never waits for the exporter, and goes on without it.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from directory.core.errors import TreecoredError
from directory.daemon.clock import now_us
from directory.daemon.config import LogFormat, LogLevel, Settings
from directory.daemon.loop import Loop
from directory.daemon.preflight import PORTS_AGAIN_S, PORTS_DEADLINE_S
from directory.daemon.runtime import StartError
from directory.protocol.admin import StatsReport
from transfer.ipc.channel import FdChannel
from transfer.mover_handle import child_environment

ADDRESS: Final = re.compile(r"(?P<host>[0-9.]+|localhost|\[::1\]):(?P<port>\d{1,5})")
LOOPBACK: Final = ("127.", "localhost", "[::1]")
PROGRAM: Final = "directory.daemon.metrics_main"
RESTART_AFTER_US: Final = 1_000_000
BACKLOG: Final = 16
"""Who asks while an exporter is being started waits."""
KILLED_S_MAX: Final = 0.5
"""How long the end of one that was killed is waited for; the kernel may be busy with it."""

log = structlog.get_logger("metrics")


class Options(msgspec.Struct, frozen=True):
    """What an exporter is told. `parent`: the daemon's process id; `channel`, `listener`:
    descriptors, the latter -1 where `file` is written instead."""

    parent: int
    channel: int
    listener: int = -1
    file: str = ""
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"


class Exporter:
    """One address or file and the process that serves it, or its successor. `report`: makes one.

    Raises `StartError` where the library is missing or the port or file cannot be had.
    """

    def __init__(
        self,
        settings: Settings,
        loop: Loop,
        report: Callable[[], StatsReport],
        counters: Counter[str],
    ) -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            raise StartError("metrics need the extra `metrics`: pip install 'treecored[metrics]'")
        self._settings = settings
        self._loop = loop
        self._report = report
        self._counters = counters
        self._channel: FdChannel | None = None
        self._watched_fd = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._restart_us = 0
        self._listener: socket.socket | None = None
        self._file = ""
        where = settings.metrics or ""
        address = ADDRESS.fullmatch(where)
        if address is not None:
            self._listener = _listen(address["host"], int(address["port"]))
            named = f"{address['host']}:{self._listener.getsockname()[1]}"
            log.info("metrics", url=f"http://{named}/metrics")
        else:
            self._file = _writable(Path(where))
            log.info("metrics", file=self._file)
        try:
            self._start()
        except OSError as error:
            self.close()
            raise StartError(f"the exporter of metrics cannot be started: {error}") from None

    @property
    def pid(self) -> int:
        """Process id of the exporter, 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def due_us(self) -> int | None:
        """When `on_time` has something to do next, or None."""
        return self._restart_us if self._process is None else None

    def on_time(self) -> None:
        """Start a successor, if it is time."""
        if self._process is not None or now_us() < self._restart_us:
            return
        try:
            self._start()
        except OSError as error:
            log.error("no exporter", reason=str(error))
            self._restart_us = now_us() + RESTART_AFTER_US

    def close(self) -> None:
        """Serve no more; a file stays as it was written last. Repeatable."""
        self._bury()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # Private.

    def _start(self) -> None:
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        listener = -1 if self._listener is None else self._listener.fileno()
        options = Options(
            os.getpid(),
            other.fileno(),
            listener,
            self._file,
            self._settings.log_level,
            self._settings.log_format,
        )
        command = [sys.executable, "-P", "-m", PROGRAM, msgspec.json.encode(options).decode()]
        kept = [fd for fd in (options.channel, listener) if fd >= 0]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=child_environment(), pass_fds=kept
            )
        except OSError:
            mine.close()
            raise
        finally:
            other.close()
        self._channel = FdChannel(mine)
        self._watched_fd = self._channel.fileno()
        self._loop.watch(self._watched_fd, self._serve)
        self._counters["exporters_started"] += 1

    def _serve(self, events: int) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            if events & select.EPOLLOUT and channel.flush():
                self._loop.want_write(self._watched_fd, False)
            asked = channel.receive()
            for _, fds in asked:
                for fd in fds:
                    os.close(fd)
            if asked:
                # An answer each: the exporter counts those that have not come in time.
                answer = msgspec.msgpack.encode(self._report())
                for _ in asked:
                    channel.send(answer)
                if channel.want_write:
                    self._loop.want_write(self._watched_fd, True)
        except (TreecoredError, OSError) as error:
            log.warning("the exporter of metrics ended", exporter=self.pid, reason=str(error))
            self._lose()
        except Exception as error:
            # Metrics are for people: a defect in them must not end what schedulers live on.
            log.error("no metrics", exc_info=error)
            self._lose()

    def _lose(self) -> None:
        self._counters["exporters_lost"] += 1
        self._bury()
        self._restart_us = now_us() + RESTART_AFTER_US

    def _bury(self) -> None:
        if self._channel is not None:
            self._loop.unwatch(self._watched_fd)
            self._channel.close()
            self._channel = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            try:
                self._process.wait(KILLED_S_MAX)
            except subprocess.TimeoutExpired:
                log.warning("the exporter of metrics does not end", exporter=self.pid)
            self._process = None

    def __repr__(self) -> str:
        return f"<Exporter {self._settings.metrics}, pid {self.pid}>"


def _listen(host: str, port: int) -> socket.socket:
    if not host.startswith(LOOPBACK):
        raise StartError(
            f"metrics: {host} is no address of this machine alone; use 127.0.0.1 and let a "
            "collector on this machine pass them on"
        )
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    # The exporter of a dead daemon dies with it, but not in the same moment.
    give_up = time.monotonic() + PORTS_DEADLINE_S
    while True:
        try:
            return socket.create_server((host.strip("[]"), port), family=family, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            if not taken or time.monotonic() >= give_up:
                raise StartError(f"metrics: {host}:{port} cannot be had: {error}") from None
        time.sleep(PORTS_AGAIN_S)


def _writable(path: Path) -> str:
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise StartError(f"metrics: {path.parent} is no folder that can be written to")
    return str(path)
