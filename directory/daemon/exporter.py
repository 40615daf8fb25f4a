"""What the exporter of metrics does: reports from the daemon, in words, for whoever asks.

Owns the HTTP server or the file that Prometheus reads. It asks the daemon for a report whenever
somebody asks it, and where none comes it says so: an answer without counters would be a lie, and
so would a file that was emptied. Decides nothing.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Final

import msgspec
import structlog
from prometheus_client import CollectorRegistry, MetricsHandler, write_to_textfile

from directory.core.errors import TreecoredError
from directory.daemon.metrics import Collector, NoReport
from directory.daemon.metrics_feed import Options
from directory.protocol.admin import StatsReport
from transfer.ipc.channel import ChannelDeadline, FdChannel

ANSWER_S: Final = 5.0
FILE_EVERY_S: Final = 15.0
GONE_STATUS: Final = 2
SELDOM_S: Final = 3_600.0
"""How often it is looked whether somebody has ended it: nobody does."""

log = structlog.get_logger("metrics")


class Asking:
    """Asks the daemon for reports, one at a time: the server has a thread a question."""

    def __init__(self, channel: FdChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._late = 0
        """Answers that have not come in time, and will come before the next one's."""

    def report(self) -> StatsReport | None:
        """The daemon's sums of this moment; None where it is too busy to say."""
        with self._lock:
            try:
                return self._ask()
            except ChannelDeadline:
                self._late += 1
                return None
            except (TreecoredError, OSError):
                # A daemon that is gone takes this process along; one that is not starts another.
                os._exit(GONE_STATUS)

    def _ask(self) -> StatsReport:
        give_up = time.monotonic() + ANSWER_S
        payload, _ = self._channel.call(b"?", deadline_s=ANSWER_S)
        while self._late:
            self._late -= 1
            payload, _ = self._channel.wait_frame(give_up - time.monotonic())
        return msgspec.msgpack.decode(payload, type=StatsReport)


class Handler(MetricsHandler):
    """Answers one reader; where there is no report the reading fails, as it should."""

    def do_GET(self) -> None:  # noqa: N802 - the base's name
        """The counters of this moment, or 500."""
        try:
            super().do_GET()
        except NoReport as error:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))


def serve(listener: int, registry: CollectorRegistry) -> None:
    """Answer over HTTP at an address that the daemon has bound, for ever."""
    server = ThreadingHTTPServer(("", 0), Handler.factory(registry), bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=listener)
    server.serve_forever(SELDOM_S)


def write(path: str, registry: CollectorRegistry) -> None:
    """Keep a file up to date, for ever."""
    while True:
        write_once(path, registry)
        time.sleep(FILE_EVERY_S)


def write_once(path: str, registry: CollectorRegistry) -> None:
    """Write a file anew; it stays as it is where that cannot be done."""
    try:
        write_to_textfile(path, registry)
    except (OSError, NoReport) as error:
        log.warning("metrics not written", file=path, reason=str(error))


def export(options: Options) -> None:
    """Serve or write what the daemon says, for ever."""
    asking = Asking(FdChannel(socket.socket(fileno=options.channel)))
    registry = CollectorRegistry()
    registry.register(Collector(asking.report))
    if options.listener >= 0:
        serve(options.listener, registry)
    write(options.file, registry)
