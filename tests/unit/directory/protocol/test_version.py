"""Finding a common version."""

import pytest

from directory.core.errors import VersionMismatch
from directory.protocol.version import VERSION_MAX, VERSION_MIN, agree


def test_the_highest_common_version_is_spoken() -> None:
    assert agree(VERSION_MIN, VERSION_MAX) == VERSION_MAX
    assert agree(0, VERSION_MAX + 5) == VERSION_MAX


@pytest.mark.parametrize(
    ("low", "high"), [(VERSION_MAX + 1, VERSION_MAX + 2), (-2, VERSION_MIN - 1), (2, 1)]
)
def test_a_mismatch_names_both_sides_f129(low: int, high: int) -> None:
    with pytest.raises(VersionMismatch, match=f"{low} to {high}.*{VERSION_MIN} to {VERSION_MAX}"):
        agree(low, high)
