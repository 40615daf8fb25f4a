"""`python -m directory.daemon.kv_main OPTIONS`: the publisher of KV events. Started by treecored.

Owns the process's signals and its ties to the daemon. Decides nothing.
"""

import ctypes
import os
import signal
import sys

import msgspec

from directory.daemon.kv_publisher import Publisher
from directory.daemon.log import set_up_logging
from directory.kvevents.addresses import Options

PR_SET_PDEATHSIG = 1
NICER = 5
"""Where processors are short, who asks and who answers comes before who is told of it later."""


def main(arguments: list[str]) -> int:
    """Publish until the daemon is gone; returns the exit status."""
    options = msgspec.json.decode(arguments[0], type=Options)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != options.parent:
        return 1
    os.nice(NICER)
    # What is sent to a whole terminal is for the daemon, with which this ends.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(options.log_level, options.log_format)
    Publisher(options).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
