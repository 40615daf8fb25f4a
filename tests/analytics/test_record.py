"""Chained digests name prefixes, and a record's own arithmetic."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.analytics.record import (
    DIGEST_BYTES,
    Frame,
    Hit,
    chain,
    chain_ids,
    namespace_digest,
    pack,
    unpack,
)
from directory.core.namespace import NamespaceKey
from tests.analytics.support import access, path_of

tokens = st.lists(st.integers(0, 3), max_size=40)


@given(tokens, tokens, st.integers(1, 5))
def test_digests_agree_exactly_as_far_as_whole_pages_agree(
    first: list[int], second: list[int], page: int
) -> None:
    paths = [chain(array("I", t).tobytes(), 4 * page) for t in (first, second)]
    assert [len(path) for path in paths] == [len(t) // page for t in (first, second)]
    for count in range(1, min(map(len, paths)) + 1):
        equal = first[: count * page] == second[: count * page]
        assert (paths[0][count - 1] == paths[1][count - 1]) is equal


def test_a_chain_can_be_continued_from_its_last_digest() -> None:
    packed = array("I", range(12)).tobytes()
    whole = chain(packed, 16)
    assert chain(packed[16:], 16, previous=whole[0]) == whole[1:]


def test_another_key_gives_other_digests() -> None:
    packed = array("I", range(4)).tobytes()
    assert chain(packed, 16, key=b"k") != chain(packed, 16)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_block_ids_are_chained_like_tokens(first: list[int], second: list[int]) -> None:
    paths = [chain_ids(ids) for ids in (first, second)]
    for count in range(1, min(map(len, paths)) + 1):
        equal = first[:count] == second[:count]
        assert (paths[0][count - 1] == paths[1][count - 1]) is equal


def test_a_chain_of_block_ids_can_be_continued() -> None:
    whole = chain_ids([7, -1, 1 << 70, 9])
    assert chain_ids([1 << 70, 9], previous=whole[1]) == whole[2:]


def test_a_million_block_ids_have_a_million_digests() -> None:
    assert len(set(chain_ids(range(1_000_000)))) == 1_000_000


def test_packed_digests_come_back() -> None:
    digests = array("Q", [0, 1, (1 << 64) - 1])
    assert unpack(pack(digests)) == digests
    with pytest.raises(ValueError, match="multiple"):
        unpack(b"1234567")


@pytest.mark.parametrize(
    ("letters", "tail", "blocks", "hittable"),
    [("", 1, 1, 0), ("", 3, 1, 0), ("A", 0, 1, 0), ("A", 1, 2, 1), ("AB", 0, 2, 1)],
)
def test_at_least_one_token_is_always_computed_f32(
    letters: str, tail: int, blocks: int, hittable: int
) -> None:
    record = access(letters, tail)
    assert (record.blocks, record.hittable) == (blocks, hittable)


def test_a_record_holds_no_token() -> None:
    packed = msgspec.msgpack.encode(access("ABC"))
    assert array("I", [ord("A")] * 4).tobytes() not in packed
    assert len(path_of("ABC")) == 3


def test_a_record_of_an_older_writer_is_read_with_defaults() -> None:
    older = [1, 5, 100, 4, b""]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=Frame)
    assert read == access("", tokens=100, instance="", at_us=5)


def test_a_namespace_is_named_by_a_digest_of_all_its_parts() -> None:
    keys = [NamespaceKey(), NamespaceKey(cache_salt=""), NamespaceKey(extra_key="a")]
    digests = {namespace_digest(msgspec.msgpack.encode(key)) for key in keys}
    assert len(digests) == len(keys)
    assert {len(digest) for digest in digests} == {DIGEST_BYTES}


def test_hits_of_all_sources_add_up() -> None:
    assert Hit(1, 2, 3, 4).total == 10
