"""The bytes of a log: whole records are read wherever they stand, all else is passed over."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from directory.core import limits
from directory.core.namespace import NamespaceKey
from directory.core.records import (
    FRAME_BYTES,
    MAGIC,
    PagesRecord,
    SpaceRecord,
    frame,
    read_log,
    stamp_of,
)

SPACE = SpaceRecord(1, b"f", NamespaceKey(cache_salt=""), 4, 1024, 1)
PAGES = PagesRecord(1, 77, 0, 0, b"\x05\0\0\0", b"tokens of 16 byt")


def test_records_are_read_back_in_order_with_their_numbers() -> None:
    log = frame(7, SPACE) + frame(8, PAGES)
    assert [(n.seq, n.record) for n in read_log(log)] == [(7, SPACE), (8, PAGES)]


def test_absent_and_empty_parts_of_a_namespace_stay_apart() -> None:
    (numbered,) = read_log(frame(1, SPACE))
    assert isinstance(numbered.record, SpaceRecord)
    assert numbered.record.key.cache_salt == ""
    assert numbered.record.key.extra_key is None


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_foreign_bytes_between_records_are_passed_over(before: bytes, between: bytes) -> None:
    log = before + frame(7, SPACE) + between + frame(8, PAGES) + before
    assert [n.record for n in read_log(log)] == [SPACE, PAGES]


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read(log: bytes) -> None:
    assert list(read_log(log)) == []
    assert list(read_log(MAGIC + log)) == []


def test_each_single_flipped_bit_costs_its_own_record_only() -> None:
    first, second, third = frame(7, SPACE), frame(8, PAGES), frame(9, SPACE)
    for at in range(len(second) * 8):
        damaged = bytearray(second)
        damaged[at // 8] ^= 1 << at % 8
        assert [n.seq for n in read_log(first + bytes(damaged) + third)] == [7, 9]


def test_a_length_beyond_the_limit_is_not_believed() -> None:
    head = struct.pack("<4sIQ", MAGIC, limits.JOURNAL_RECORD_BYTES_MAX + 1, 1)
    log = head + bytes(limits.JOURNAL_RECORD_BYTES_MAX + 100) + frame(8, PAGES)
    assert [n.seq for n in read_log(log)] == [8]


def test_a_whole_record_of_another_program_is_passed_over() -> None:
    ours = frame(8, PAGES)
    strange = bytearray(frame(7, SPACE))
    strange[FRAME_BYTES:] = b"\xc1" * (len(strange) - FRAME_BYTES)
    assert [n.seq for n in read_log(bytes(strange) + ours)] == [8]


def test_stamps_are_never_zero_and_never_one_bit_apart() -> None:
    stamps = {stamp_of(5, seq) for seq in range(1, 3_000)}
    assert len(stamps) == 2_999
    assert 0 not in stamps
    assert not any(stamp ^ (1 << bit) in stamps for stamp in stamps for bit in range(64))
