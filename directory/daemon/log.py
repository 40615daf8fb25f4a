"""Logging: structlog to standard error, one line an event, as text or as JSON.

Owns the set-up. It must never write to standard output, which belongs to the commands, and never
let a log that cannot be written (a full disk, a pipe that nobody reads) end what is being logged.
"""

import logging
import sys
from contextlib import suppress
from typing import TextIO

import structlog

from directory.daemon.config import LogFormat, LogLevel


class _Lossy:
    """A text stream whose failures cost the line and nothing else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write if possible."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        with suppress(OSError):
            self._stream.flush()


def set_up_logging(level: LogLevel, form: LogFormat) -> None:
    """Configure structlog for this process; a second call replaces the first."""
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        shared += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        shared.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(_Lossy(sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
