"""Logging: structlog to standard error, one line an event, as text or as JSON.

Owns the set-up. It must never write to standard output, which belongs to the commands.
"""

import logging
import sys

import structlog

from directory.daemon.config import LogFormat, LogLevel


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
