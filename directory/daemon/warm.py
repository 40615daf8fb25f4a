"""Warm start: whether a host tier is kept, where, and what of an earlier one is taken up.

Owns the order of these steps and what the log says of them. By the time they happen the locks of
both folders are held, so no mover of an earlier daemon can write any more. A place that was not
chosen by the user is done without, with a warning: the tier is memory that ends with the daemon.
"""

from __future__ import annotations

import gc
from pathlib import Path

import structlog

from directory.core.actions import Journal, JournalBegin, JournalEnd
from directory.core.directory import Directory
from directory.daemon.clock import now_us
from directory.daemon.config import Settings
from directory.daemon.kept_tier import KeptTier
from directory.daemon.runtime import StartError
from directory.daemon.tier_folder import TierFolder, choose, discard_others
from transfer.host_tier import TierShape

log = structlog.get_logger("tier")

NOT_KEPT: tuple[None, None] = (None, None)


def open_kept(
    settings: Settings, runtime_dir: Path
) -> tuple[KeptTier, TierFolder] | tuple[None, None]:
    """Open the files of the host tier, or nothing where it is not to be kept.

    Raises `StartError` where the user's own choice of a folder cannot be used.
    """
    wanted = settings.host_keep and settings.host_tier > 0
    path = None
    if wanted:
        path = choose(runtime_dir, settings.host_dir, int(settings.host_tier))
    if settings.host_dir is None:
        discard_others(runtime_dir, path)
    if path is None:
        if wanted:
            log.warning(
                "the host tier will end with this daemon: no file system in memory has room for "
                "it; set host_dir, or host_keep to false",
                bytes=int(settings.host_tier),
            )
        return NOT_KEPT
    folder = None
    try:
        folder = TierFolder.take(path, runtime_dir)
        shape = TierShape(int(settings.host_tier), int(settings.segment))
        return folder.open(shape, cold=settings.cold), folder
    except StartError as error:
        if folder is not None:
            folder.release()
        if settings.host_dir is not None:
            raise
        log.warning("the host tier will end with this daemon", reason=str(error))
        return NOT_KEPT


def recover(kept: KeptTier, directory: Directory) -> None:
    """Have a new directory take up what the files say, and write that down anew."""
    began = now_us()
    gc.disable()  # all that is made here stays, and nothing of it is a circle to be found
    try:
        for action in directory.recover(kept.logs(), kept.word, kept.sizes()):
            assert isinstance(action, Journal | JournalBegin | JournalEnd)
            kept.apply(action)
    finally:
        gc.enable()
    counters = directory.counters
    log.info(
        "host tier taken up",
        folder=str(kept.folder),
        pages=counters.get("host_pages_recovered", 0),
        dropped=counters.get("host_pages_not_recovered", 0),
        records_lost=counters.get("journal_records_lost", 0),
        ms=(now_us() - began) // 1000,
    )
