"""The table of the host tier's checksums: whether there is one, and its descriptor.

Owns the choice and the file or memfd, which movers fill and read. It must never look into the
table, and never leave one behind that a boot without checksums would let go stale: what that boot
writes into the tier has none.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from directory.daemon.config import Settings
from directory.daemon.kept_tier import KeptTier
from directory.daemon.runtime import StartError
from transfer.checksum import LIBRARY, available, table_bytes
from transfer.host_tier import TierShape


class ChecksumTable(NamedTuple):
    """What a mover is told. `fd` stays the daemon's."""

    fd: int
    verify: bool
    scrub_bytes_s: int


def open_table(settings: Settings, kept: KeptTier | None) -> ChecksumTable | None:
    """Open or make the table that the settings ask for, or remove an old one.

    Raises `StartError` where it cannot be had.
    """
    if settings.host_checksums == "off" or not settings.host_tier:
        if kept is not None:
            kept.remove_sums()
        return None
    if not available():
        raise StartError(
            f"host_checksums is {settings.host_checksums!r}, but the package {LIBRARY} is missing: "
            "pip install 'treecored[checksum]', or set host_checksums to off"
        )
    nbytes = table_bytes(TierShape(int(settings.host_tier), int(settings.segment)))
    try:
        if kept is not None:
            fd = kept.open_sums(nbytes)
        else:
            fd = os.memfd_create("treecored-checksums", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
    except OSError as error:
        raise StartError(f"the table of checksums cannot be made: {error.strerror}") from None
    return ChecksumTable(fd, settings.host_checksums == "verified", int(settings.host_scrub))
