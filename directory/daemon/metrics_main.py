"""`python -m directory.daemon.metrics_main OPTIONS`: the exporter of metrics. Started by treecored.

Owns the process's signals and its ties to the daemon. Decides nothing. It imports nothing large
before it is tied: an exporter that has outlived its daemon holds the address of the next one.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1
NICER: Final = 5
"""Where processors are short, who asks and who answers comes before who is told of it later."""


def main(arguments: list[str]) -> int:
    """Serve until the daemon is gone; returns the exit status."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != json.loads(arguments[0])["parent"]:
        return 1
    os.nice(NICER)
    # What is sent to a whole terminal is for the daemon, with which this ends.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _export(arguments[0])
    return 0


def _export(told: str) -> None:
    import msgspec

    from directory.daemon.exporter import export
    from directory.daemon.log import set_up_logging
    from directory.daemon.metrics_feed import Options

    options = msgspec.json.decode(told, type=Options)
    set_up_logging(options.log_level, options.log_format)
    export(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
