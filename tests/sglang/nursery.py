"""A process that has imported SGLang and starts engines by forking. Runs in SGLang's environment.

    python -m tests.sglang.nursery FD

Importing SGLang takes 13 s of processor time, and an engine is three processes that each do it
once: a forked engine starts in a fraction of that. What runs is SGLang's own engine, scheduler and
detokenizer; only the way their processes come into being differs, and some tests start them the
usual way. It must stay single-threaded and must not compute with torch, because threads do not
survive a fork.
"""

import os
import signal
import socket
import sys
import threading
import warnings

from tests.sglang import driver, wire
from tests.sglang.tied import die_with_parent


def main(fd: int) -> None:
    """Start engines until the other side hangs up."""
    die_with_parent()
    sock = socket.socket(fileno=fd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        version = _import_all()
    if threading.active_count() != 1 or len(os.listdir("/proc/self/task")) != 1:
        raise SystemExit("importing SGLang started a thread; engines cannot be forked")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # engines are waited for by their pidfds
    wire.send(sock, wire.Up(version))
    while True:
        packet, fds, _, _ = socket.recv_fds(sock, wire.BYTES_MAX, 1)
        if not packet:
            return
        start = wire.start(packet)
        pid = os.fork()
        if pid == 0:
            sock.close()
            _engine(start, fds[0])
        os.close(fds[0])
        wire.send(sock, wire.Started(pid))


def _import_all() -> str:
    import sglang
    import sglang.srt.entrypoints.engine
    import sglang.srt.layers.attention.torch_native_backend
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry

    return str(sglang.__version__)


def _engine(start: wire.Start, fd: int) -> None:
    """The rest of the forked process's life."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        os.setsid()
        log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        driver.keep_forking()
        driver.main(start, fd)
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
