"""docs/analytics.md names everything that a reader of logs and reports meets."""

import pytest

from directory.analytics.attribution import Cause
from directory.analytics.block import BLOCK_RAW_BYTES_MAX, SYNC
from directory.analytics.log import FILE_BYTES_MAX, FILES_MAX, MAGIC
from directory.analytics.record import Access, Began, Dropped, Eviction, Named, Room
from tests.tidy.source import ROOT

TEXT = (ROOT / "docs/analytics.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("frame", [Access, Eviction, Room, Named, Dropped, Began])
def test_every_frame_is_listed_with_its_tag_and_its_fields_in_order(frame: type) -> None:
    fields = " ".join(f"`{name}`" for name in frame.__struct_fields__)  # type: ignore[attr-defined]
    tag = frame.__struct_config__.tag  # type: ignore[attr-defined]
    assert f"| {tag} | `{frame.__name__}` | {fields} |" in TEXT


def test_every_cause_is_defined_once() -> None:
    for cause in Cause:
        assert TEXT.count(f"\n| `{cause}` |") == 1


def test_limits_and_magic_are_those_of_the_code() -> None:
    assert FILE_BYTES_MAX == BLOCK_RAW_BYTES_MAX == 64 << 20
    assert f"`files_max` ({FILES_MAX})" in TEXT
    assert MAGIC.decode().rstrip() in TEXT
    assert SYNC.hex(" ") in TEXT
