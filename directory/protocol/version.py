"""Protocol version: which versions this build speaks, and how a common one is found."""

from typing import Final

from directory.core.errors import VersionMismatch

VERSION_MIN: Final = 1
VERSION_MAX: Final = 1


def agree(client_min: int, client_max: int) -> int:
    """Return the highest version both sides speak, or raise `VersionMismatch` naming both."""
    version = min(client_max, VERSION_MAX)
    if version < max(client_min, VERSION_MIN):
        raise VersionMismatch(
            f"the client speaks protocol versions {client_min} to {client_max}, this daemon "
            f"{VERSION_MIN} to {VERSION_MAX}; upgrade the older side, the engine serves on without"
        )
    return version
