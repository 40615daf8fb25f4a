"""A record of any length is a row of small pieces of work, and what they make is what one would."""

import errno
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.analytics import causes as causes_module
from directory.analytics import paths as paths_module
from directory.analytics import recorder as recorder_module
from directory.analytics.block import (
    HEADER,
    PACKED_AT_ONCE,
    STRETCH_PAGES_MAX,
    WRITTEN_AT_ONCE,
    Block,
    Pathed,
    Stored,
    parted,
)
from directory.analytics.causes import PAGES_AT_ONCE, Causes
from directory.analytics.log import MAGIC, STANDING_AT_ONCE, AccessLog
from directory.analytics.paths import PathTree
from directory.analytics.reader import LogReader
from directory.analytics.record import DIGEST_BYTES, Access, Digests, Dropped, Named, chain, unpack
from directory.analytics.recorder import BYTES_AT_ONCE, PIECE_PAGES, Chains, Recorder, Work
from directory.core.namespace import NamespaceKey
from directory.core.place import PoolState
from directory.daemon.recording import Recording
from directory.protocol.ended import Ended
from tests.analytics.support import access
from tests.analytics.test_causes import N1, N2, records

LONG = 1 << 16
"""Pages of a prompt that is long enough for everything to be done in pieces."""
FRAME_BYTES_MAX = 512
"""What stands around the digests of a record here."""


class Counted:
    """What is done, by kind: pages hashed, bytes hashed, packed, checked and written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: Counter[str] = Counter()
        make, crc32, write = zlib.compressobj, zlib.crc32, os.write

        class Packer:
            def __init__(packer, level: int) -> None:  # noqa: N805
                packer.own = make(level)

            def compress(packer, raw: bytes) -> bytes:  # noqa: N805
                self.done["packed"] += len(raw)
                return packer.own.compress(raw)

            def flush(packer) -> bytes:  # noqa: N805
                return packer.own.flush()

        def check(data: bytes, value: int = 0) -> int:
            self.done["checked"] += len(data)
            return crc32(data, value)

        def writes(fd: int, data: bytes) -> int:
            self.done["written"] += len(data)
            return write(fd, data)

        def chains(tokens: bytes, page_bytes: int, **how: Any) -> Digests:
            self.done["pages"] += len(tokens) // page_bytes
            return chain(tokens, page_bytes, **how)

        def hashes(data: bytes, **how: Any) -> Any:
            self.done["hashed"] += len(data)
            return blake2b(data, **how)

        monkeypatch.setattr(zlib, "compressobj", Packer)
        monkeypatch.setattr(zlib, "crc32", check)
        monkeypatch.setattr(os, "write", writes)
        monkeypatch.setattr(recorder_module, "chain", chains)
        monkeypatch.setattr(recorder_module, "blake2b", hashes)

    def since(self) -> Counter[str]:
        """What was done since it was asked last."""
        done, self.done = self.done, Counter()
        return done


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def pool(page_size: int = 1) -> PoolState:
    return PoolState(1, instance="a", generation=1, fingerprint=b"f", page_size=page_size,
                     page_count=LONG, page_bytes=64, mode="thin")  # fmt: skip


def ended(tokens: bytes, request: str) -> Ended:
    count = len(tokens) // 4
    return Ended(request=request, attempt=0, namespace=NamespaceKey(), kind="request",
                 prompt_tokens=count, inserted=count, tokens=tokens)  # fmt: skip


def test_no_step_of_a_long_prompts_record_does_much(tmp_path: Path, counted: Counted) -> None:
    log = AccessLog(tmp_path, block_bytes=WRITTEN_AT_ONCE)
    recording = Recording(log, host_bytes=0, now_us=0, clock=lambda: 1)
    first = os.urandom(4 * LONG)
    prompts = [first, first, first[: 2 * LONG] + os.urandom(2 * LONG)]
    steps = 0
    for number, tokens in enumerate(prompts):
        recording.ended(pool(), ended(tokens, f"r{number}"), 1)
        while recording.ready_us is not None:
            block, known = log._block, recording.causes.pages
            stored = sum(len(stretch.edge) for stretch in block._stretches.values())
            counted.since()
            recording.work(recording.ready_us, lambda: True)
            done = counted.since()
            steps += 1
            assert done["pages"] <= PIECE_PAGES
            assert done["hashed"] <= 2 * BYTES_AT_ONCE
            assert done["packed"] <= 2 * PACKED_AT_ONCE + FRAME_BYTES_MAX
            assert done["checked"] <= 2 * WRITTEN_AT_ONCE
            assert done["written"] <= 2 * WRITTEN_AT_ONCE
            assert recording.causes.pages - known <= PAGES_AT_ONCE
            after = sum(len(stretch.edge) for stretch in block._stretches.values())
            assert after - stored <= PACKED_AT_ONCE // DIGEST_BYTES
    assert steps > 2 * LONG // PIECE_PAGES
    recording.close(1)
    paths = [list(frame.path) for frame in LogReader(tmp_path) if isinstance(frame, Access)]
    assert paths == [list(chain(tokens, 4)) for tokens in prompts]
    assert {(each.cause, each.tokens) for each in recording.missed()} == {
        ("never_seen", LONG - 1), ("evicted", LONG - 1 + LONG // 2), ("diverged", LONG // 2 - 1),
        ("partial_tail", 3),
    }  # fmt: skip


@pytest.mark.parametrize("page_bytes", [4, 64, 256, 768, 1024, 4096, 8192, BYTES_AT_ONCE])
def test_known_pieces_are_looked_up_for_no_longer_than_others_are_made(
    page_bytes: int, counted: Counted
) -> None:
    chains, tokens = Chains(), os.urandom(24 * BYTES_AT_ONCE)
    assert chains.whole(tokens, page_bytes) == chain(tokens, page_bytes)
    counted.since()
    for _ in chains.pieces(tokens, page_bytes):
        done = counted.since()
        assert done["pages"] == 0
        assert done["hashed"] < 2 * BYTES_AT_ONCE


@pytest.mark.parametrize("pages", [0, 1, 31, 32, 8_191, 8_192])
def test_a_record_in_two_parts_is_the_record_as_it_was_stored_before(pages: int) -> None:
    digests = os.urandom(pages * DIGEST_BYTES)
    whole = msgspec.structs.replace(access("AB", request="r"), digests=digests)
    head, tail = parted(whole, 7, 300, len(digests))
    assert head + digests + tail == msgspec.msgpack.encode(Stored(whole, 7, 300))


def test_a_path_whose_digests_stand_beside_it_is_stored_like_one_that_has_them() -> None:
    one, other = Block(), Block()
    for letters in ("ABCD", "ABX", "ABCDE", "ABCDE", "", "ABXY", "ABCDEF"):
        record = access(letters)
        one.add(record)
        other.add(Pathed(msgspec.structs.replace(record, digests=b""), record.path))
    assert one.seal() == other.seal()


def test_what_goes_on_where_another_path_ends_or_leaves_it_is_stored_from_there_on() -> None:
    def costs(*paths: str) -> list[int]:
        block, costs = Block(), []
        for letters in paths:
            before = block.raw_bytes
            block.add(access(letters))
            costs.append((block.raw_bytes - before) // 100)
        return costs

    long, other = "A" * 1_000, "B" * 1_000
    # Digests of a thousand pages have eight thousand bytes.
    assert costs(long, long + other, long + "C", long + other, long + "C" + other) == [
        80, 80, 0, 0, 80,
    ]  # fmt: skip


def test_of_what_is_longer_than_a_stretch_everything_is_found_again() -> None:
    block, path = Block(), chain(os.urandom(4 * (3 * STRETCH_PAGES_MAX + 7)), 4)
    plain = msgspec.structs.replace(access(""), tokens=len(path))
    block.add(Pathed(plain, path))
    assert len(block._stretches) > 2
    before = block.raw_bytes
    for end in (len(path), len(path) - 5, STRETCH_PAGES_MAX, STRETCH_PAGES_MAX + 1):
        block.add(Pathed(plain, path[:end]))
    assert block.raw_bytes - before < 4 * FRAME_BYTES_MAX


@st.composite
def looks(draw: st.DrawFn) -> list[tuple[str, int]]:
    words = st.lists(st.text("AB", min_size=1, max_size=6), min_size=1, max_size=3)
    return [
        (word, draw(st.integers(0, len(word))))
        for word in map("".join, draw(st.lists(words, max_size=20)))
    ]


@given(looks(), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_a_tree_of_short_edges_knows_what_one_of_long_ones_does(
    wanted: list[tuple[str, int]], edge_max: int
) -> None:
    def told() -> Iterator[Any]:
        tree = PathTree()
        for tick, (word, extent) in enumerate(wanted):
            path = access(word).path
            yield tree.look(path)
            yield tree.touch(path, tick, extent)
            yield tree.pages

    long = list(told())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(paths_module, "EDGE_PAGES_MAX", edge_max)
        assert list(told()) == long


def test_no_edge_is_longer_than_it_may_be() -> None:
    tree, path = PathTree(), unpack(os.urandom(DIGEST_BYTES * 3 * paths_module.EDGE_PAGES_MAX))
    for tick, end in enumerate((5, paths_module.EDGE_PAGES_MAX + 5, 7, len(path) - 1, len(path))):
        tree.touch(path[:end], tick)
        lengths = [len(node.edge) for node in tree._nodes.values()]
        assert max(lengths) <= paths_module.EDGE_PAGES_MAX
    assert sum(len(node.edge) for node in tree._nodes.values()) == len(path)


@given(st.lists(records(), max_size=25), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_causes_of_what_is_taken_in_piece_by_piece_are_the_same(
    given_records: list[Access], at_once: int
) -> None:
    def sums() -> tuple[object, int]:
        found = Causes(pages_max=40)
        for record in given_records:
            found.add(record)
        return {key: (each.requests, each.tokens) for key, each in found.sums.items()}, found.pages

    whole = sums()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(causes_module, "PAGES_AT_ONCE", at_once)
        assert sums() == whole


def test_a_long_path_in_two_namespaces_is_told_apart_whatever_its_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(causes_module, "PAGES_AT_ONCE", 2)
    found = Causes()
    for namespace in (N1, N2, N2, N1):
        found.add(access("ABCDEFGHIJ", namespace=namespace))
    by_cause = {
        cause.value: (each.requests, each.tokens) for (_, cause), each in found.sums.items()
    }
    assert by_cause == {
        "never_seen": (1, 40), "other_namespace": (1, 40), "evicted": (2, 80),
        "partial_tail": (0, 4),
    }  # fmt: skip


def long_record(request: str) -> Access:
    digests = os.urandom(DIGEST_BYTES * LONG)
    return msgspec.structs.replace(access("", request=request, tokens=LONG), digests=digests)


def test_what_has_begun_is_ended_before_what_follows_it(tmp_path: Path) -> None:
    log = AccessLog(tmp_path)
    wanted = [long_record("a"), access("A", request="b"), long_record("c")]
    for record in wanted:
        log.begin(record, 0)
    assert log.go_on(0)
    log.close(0)
    assert not log.busy
    assert [frame for frame in LogReader(tmp_path) if isinstance(frame, Access)] == wanted


def test_a_record_that_has_begun_is_written_whatever_is_given_up(tmp_path: Path) -> None:
    def work() -> Work:
        yield None
        return record

    log, record = AccessLog(tmp_path), long_record("a")
    recorder = Recorder(log)
    recorder.offer(work())
    assert recorder.step(0)
    assert recorder.step(0)
    recorder.offer(access("A"))
    assert recorder.busy
    recorder.give_up()
    assert recorder.busy
    recorder.drain(0)
    assert not recorder.step(0)
    log.close(0)
    frames = list(LogReader(tmp_path))
    assert [frame for frame in frames if isinstance(frame, Access)] == [record]
    assert [frame.records for frame in frames if isinstance(frame, Dropped)] == [1]


def test_what_is_lost_while_a_block_is_written_is_told_by_the_next(tmp_path: Path) -> None:
    log = AccessLog(tmp_path, block_bytes=1)
    log.lose(2)
    log.begin(long_record("a"), 0)
    while not log._flushing:
        assert log.go_on(0)
    assert log.unwritten == 2
    log.lose(3)
    log.close(0)
    log = AccessLog(tmp_path)
    assert [frame.records for frame in LogReader(tmp_path) if isinstance(frame, Dropped)] == [2, 3]


def test_a_disk_that_is_full_in_the_middle_of_a_block_costs_that_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AccessLog(tmp_path, block_bytes=1)
    log.add(access("A", request="before"), 0)
    write, left = os.write, [3]

    def fills(fd: int, data: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", fills)
    log.add(long_record("lost"), 0)
    monkeypatch.undo()
    assert (log.records_lost, log.frames_written) == (1, 1)
    assert not log.busy
    log.add(access("A", request="after"), 0)
    log.close(0)
    frames = list(LogReader(tmp_path))
    assert [each.request for each in frames if isinstance(each, Access)] == ["before", "after"]
    assert [each.records for each in frames if isinstance(each, Dropped)] == [1]


def test_a_sealed_block_is_one_piece_where_it_is_not_long() -> None:
    block = Block()
    block.add(access("ABC"))
    (piece,) = block.sealed()
    assert len(piece) > HEADER.size


def test_a_file_that_begins_with_much_begins_piece_by_piece_and_appears_whole(
    tmp_path: Path, counted: Counted
) -> None:
    log = AccessLog(tmp_path, file_bytes_max=1)
    names = [
        Named(namespace=os.urandom(16), fields={"salt": os.urandom(64).hex()})
        for _ in range(STANDING_AT_ONCE * 8)
    ]
    for name in names:
        log.add(name, 1)
    log.flush(1)
    added = 0
    real = Block.begin

    def begin(block: Block, frame: Any) -> None:
        nonlocal added
        added += 1
        real(block, frame)

    log.add(access("ab"), 2)
    counted.since()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "begin", begin)
        log._begin_flush(2)
        pieces = 1
        while True:
            done = counted.since()
            assert added <= STANDING_AT_ONCE + 1
            frame = max(len(msgspec.msgpack.encode(Stored(name))) for name in names)
            assert done["packed"] <= (STANDING_AT_ONCE + 1) * (frame + 4) + PACKED_AT_ONCE
            for file in tmp_path.iterdir():
                assert file.stat().st_size > len(MAGIC), "it is there with its beginning"
            added = 0
            if not log.go_on(2):
                break
            pieces += 1
    assert pieces > len(names) // STANDING_AT_ONCE
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    again = [one for one in LogReader(files[1]) if isinstance(one, Named)]
    assert again == names
