"""`python -m directory.daemon.metrics_main OPTIONS`: the exporter of metrics. Started by treecored.

Owns the HTTP server or the file that Prometheus reads, and the process's signals and ties to the
daemon, which it asks for a report whenever somebody asks it. Decides nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Final

import msgspec
import structlog
from prometheus_client import CollectorRegistry, MetricsHandler, write_to_textfile

from directory.core.errors import TreecoredError
from directory.daemon.log import set_up_logging
from directory.daemon.metrics import Collector
from directory.daemon.metrics_feed import Options
from directory.protocol.admin import StatsReport
from transfer.ipc.channel import ChannelDeadline, FdChannel

PR_SET_PDEATHSIG: Final = 1
NICER: Final = 5
"""Where processors are short, who asks and who answers comes before who is told of it later."""
ANSWER_S: Final = 5.0
FILE_EVERY_S: Final = 15.0
GONE_STATUS: Final = 2

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


def serve(listener: int, registry: CollectorRegistry) -> None:
    """Answer over HTTP at an address that the daemon has bound, for ever."""
    handler = MetricsHandler.factory(registry)
    server = ThreadingHTTPServer(("", 0), handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=listener)
    server.serve_forever()


def write(path: str, registry: CollectorRegistry) -> None:
    """Keep a file up to date, for ever."""
    while True:
        try:
            write_to_textfile(path, registry)
        except OSError as error:
            log.warning("metrics not written", file=path, reason=str(error))
        time.sleep(FILE_EVERY_S)


def main(arguments: list[str]) -> int:
    """Serve until the daemon is gone; returns the exit status."""
    options = msgspec.json.decode(arguments[0], type=Options)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != options.parent:
        return 1
    os.nice(NICER)
    # What is sent to a whole terminal is for the daemon, with which this ends.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(options.log_level, options.log_format)
    asking = Asking(FdChannel(socket.socket(fileno=options.channel)))
    registry = CollectorRegistry()
    registry.register(Collector(asking.report))
    if options.listener >= 0:
        serve(options.listener, registry)
    write(options.file, registry)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
