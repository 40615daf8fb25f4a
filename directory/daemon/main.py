"""Composition root of the control process: from settings to an exit status.

Owns the order of start and end. It must never import torch, cuda or numpy, however indirectly.
"""

import os
import resource

import structlog

from directory.core.errors import TransferError
from directory.daemon.config import Settings
from directory.daemon.daemon import Daemon
from directory.daemon.log import set_up_logging
from directory.daemon.preflight import look
from directory.daemon.runtime import RuntimeDir, StartError

EXIT_OK = 0
EXIT_FAILED = 1

log = structlog.get_logger("daemon")


def run(settings: Settings, ready_fd: int = -1) -> int:
    """Run a daemon in this process until it is told to stop; returns the exit status.

    To be called in the main thread: movers die with the thread that started them. `ready_fd`
    gets one byte once the daemon serves; its end without a byte means that it did not start.
    """
    set_up_logging(settings.log_level, settings.log_format)
    os.umask(0o077)
    _raise_descriptor_limit()
    try:
        runtime = RuntimeDir.take(settings.runtime_dir)
    except StartError as error:
        log.error("not started", reason=str(error))
        return EXIT_FAILED
    try:
        look(settings, runtime.path)
        daemon = Daemon(settings, runtime, ready_fd)
        try:
            daemon.run()
        finally:
            daemon.close()
    except (StartError, TransferError) as error:
        log.error("not started", reason=str(error))
        return EXIT_FAILED
    finally:
        runtime.remove_sockets()
        runtime.release()
    log.info("stopped")
    return EXIT_OK


def _raise_descriptor_limit() -> None:
    """Pools and host tier are descriptors here; the soft limit of a login shell is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
