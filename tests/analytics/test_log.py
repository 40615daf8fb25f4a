"""The access log is bounded, rotates, and is read after any crash without believing damage."""

import errno
import os
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from directory.analytics.block import HEADER, SYNC, Block
from directory.analytics.log import MAGIC, AccessLog, log_files
from directory.analytics.reader import LogError, LogReader
from directory.analytics.record import Access, Began, Dropped, Frame, Room
from tests.analytics.support import access, write_log

words = st.text(alphabet="ABC", max_size=12)


def accesses(frames: LogReader | list[Frame]) -> list[Access]:
    return [frame for frame in frames if isinstance(frame, Access)]


def some(count: int, letters: int = 40) -> list[Access]:
    return [access("A" * (number % letters), request=f"r{number}") for number in range(count)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(words, max_size=30), st.integers(1, 2000))
def test_every_path_comes_back_whatever_was_shared(
    tmp_path: Path, paths: list[str], block_bytes: int
) -> None:
    folder = tmp_path / f"{len(os.listdir(tmp_path))}"
    log = AccessLog(folder, block_bytes=block_bytes, files_max=1000)
    wanted = [access(word, request=str(number)) for number, word in enumerate(paths)]
    for record in wanted:
        log.add(record, 0)
    log.close(0)
    assert not wanted or accesses(LogReader(folder)) == wanted


def test_a_shared_prefix_is_stored_once_in_a_block() -> None:
    alone, shared = Block(), Block()
    alone.add(access("A" * 1000))
    shared.add(access("A" * 1000))
    shared.add(access("A" * 1000 + "B"))
    assert shared.raw_bytes - alone.raw_bytes < 200


def test_what_was_flushed_survives_a_writer_that_never_closed(tmp_path: Path) -> None:
    log = AccessLog(tmp_path)
    log.add(access("AB", request="kept"), 1)
    log.flush(1)
    log.add(access("AB", request="lost"), 2)
    assert [record.request for record in accesses(LogReader(tmp_path))] == ["kept"]


def test_a_file_cut_off_anywhere_gives_every_whole_block(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log", block_bytes=1)
    for record in some(6):
        log.add(record, 0)
    log.close(0)
    (path,) = log_files(tmp_path / "log")
    data, cut = path.read_bytes(), tmp_path / "cut.tclog"
    counts = []
    for end in range(len(data) + 1):
        cut.write_bytes(data[:end])
        reader = LogReader(cut)
        counts.append(len(accesses(reader)))
        assert reader.health.damaged_blocks == 0
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert counts[0] == 0


def test_a_damaged_block_costs_only_itself(tmp_path: Path) -> None:
    log = AccessLog(tmp_path, block_bytes=1)
    for record in some(6):
        log.add(record, 0)
    log.close(0)
    (path,) = log_files(tmp_path)
    data = bytearray(path.read_bytes())
    third = [at for at in range(len(data)) if data.startswith(SYNC, at)][3]
    data[third + HEADER.size + 3] ^= 0xFF
    path.write_bytes(data)
    reader = LogReader(tmp_path)
    assert [record.request for record in accesses(reader)] == ["r0", "r1", "r3", "r4", "r5"]
    assert (reader.health.damaged_blocks, reader.health.torn_bytes) == (1, 0)
    assert reader.health.damaged_bytes > 0


@given(st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_after_the_magic_are_never_believed(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "junk.tclog"
    path.write_bytes(MAGIC + junk)
    reader = LogReader(path)
    assert list(reader) == []
    assert reader.health.torn_bytes + reader.health.damaged_bytes == len(junk)


def sealed(raw: bytes, frames: int, raw_bytes: int | None = None) -> bytes:
    """A block with a checksum that holds, whatever is in it."""
    packed = zlib.compress(raw)
    fields = (len(packed), len(raw) if raw_bytes is None else raw_bytes, frames)
    crc = zlib.crc32(packed, zlib.crc32(struct.pack("<III", *fields)))
    return HEADER.pack(SYNC, *fields, crc) + packed


@pytest.mark.parametrize(
    "block",
    [
        sealed(b"\0" * 5_000_000, 1, raw_bytes=100),
        sealed(b"", 1),
        sealed(struct.pack("<I", 3) + b"\xc1\xc1\xc1", 1),
        sealed(struct.pack("<I", 1 << 31) + b"\x90", 1),
        HEADER.pack(SYNC, 1 << 31, 10, 1, 0),
        sealed(b"x", 1 << 30),
    ],
    ids=["bomb", "fewer frames", "no msgpack", "long frame", "long block", "many frames"],
)
def test_a_block_that_lies_is_skipped(tmp_path: Path, block: bytes) -> None:
    good = Block()
    good.add(access("A", request="good"))
    path = tmp_path / "lies.tclog"
    path.write_bytes(MAGIC + block + good.seal())
    assert [record.request for record in accesses(LogReader(path))] == ["good"]


def test_a_reference_to_a_path_that_is_not_there_is_damage(tmp_path: Path) -> None:
    block = Block()
    block.add(access("AB"))
    block.add(access("ABC"))
    raw = zlib.decompress(block.seal()[HEADER.size :])
    (first,) = struct.unpack_from("<I", raw)
    path = tmp_path / "dangling.tclog"
    path.write_bytes(MAGIC + sealed(raw[4 + first :], 1))
    assert list(LogReader(path)) == []


def test_files_rotate_by_size_and_only_the_newest_stay(tmp_path: Path) -> None:
    log = AccessLog(tmp_path, block_bytes=500, file_bytes_max=2_000, files_max=3)
    for record in some(2_000):
        log.add(record, 0)
    log.close(0)
    files = log_files(tmp_path)
    assert len(files) == 3
    assert log.files_begun > 3
    assert all(path.stat().st_size < 2_000 + 1_000 for path in files)
    left = [record.request for record in accesses(LogReader(tmp_path))]
    assert left == [f"r{number}" for number in range(2_000 - len(left), 2_000)]


def test_a_new_writer_never_touches_an_old_file(tmp_path: Path) -> None:
    write_log(tmp_path, [access("A", request="old")])
    (old,) = log_files(tmp_path)
    before = old.read_bytes()
    write_log(tmp_path, [access("A", request="new")])
    assert old.read_bytes() == before
    assert [record.request for record in accesses(LogReader(tmp_path))] == ["old", "new"]


def test_each_file_repeats_the_memory_that_is_there(tmp_path: Path) -> None:
    def room(instance: str, pages: int) -> Room:
        return Room(
            at_us=0, tier="device", pages=pages, page_tokens=4, page_bytes=8, instance=instance
        )

    log = AccessLog(tmp_path, block_bytes=1, file_bytes_max=1)
    for frame in (room("a", 5), room("b", 6), room("a", 0), access("A")):
        log.add(frame, 0)
    log.close(0)
    last = list(LogReader(log_files(tmp_path)[-1]))
    assert isinstance(last[0], Began)
    assert last[1:] == [room("b", 6), access("A")]


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log", [access("A")])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert log_files(folder)[0].stat().st_mode & 0o777 == 0o600


def test_a_disk_that_refuses_costs_records_and_never_an_error(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("in the way")
    log = AccessLog(tmp_path / "log", block_bytes=1)
    log.add(access("A", request="lost"), 7)
    assert (log.records_lost, log.frames_written) == (1, 0)
    assert log.last_error
    (tmp_path / "log").unlink()
    log.add(access("A", request="kept"), 8)
    log.close(9)
    frames = list(LogReader(tmp_path / "log"))
    assert [record.request for record in accesses(frames)] == ["kept"]
    assert [frame.records for frame in frames if isinstance(frame, Dropped)] == [1]


@pytest.mark.parametrize("takes", [0, 1])
def test_a_disk_that_refuses_for_long_costs_no_file_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: int
) -> None:
    log = AccessLog(tmp_path, block_bytes=1, file_bytes_max=1, files_max=3)
    for record in some(5):
        log.add(record, 0)
    before = {path: path.read_bytes() for path in log_files(tmp_path)}
    assert len(before) == 3
    write, written = os.write, []

    def refuse(fd: int, data: bytes) -> int:
        """Takes the beginning of a new file at most."""
        written.append(fd)
        if len(written) % (takes + 1) != 0:
            return write(fd, data)
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "write", refuse)
    for record in some(20):
        log.add(record, 1)
    monkeypatch.undo()
    assert len(written) == 20 * (takes + 1)
    assert {path: path.read_bytes() for path in log_files(tmp_path)} == before
    log.add(access("A", request="kept"), 2)
    log.close(2)
    assert len(log_files(tmp_path)) == 3
    frames = list(LogReader(tmp_path))
    assert accesses(frames)[-1].request == "kept"
    assert [frame.records for frame in frames if isinstance(frame, Dropped)] == [20]


def test_old_files_that_cannot_be_removed_cost_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AccessLog(tmp_path, block_bytes=1, file_bytes_max=1, files_max=2)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "unlink", refuse)
    for record in some(4):
        log.add(record, 0)
    monkeypatch.undo()
    assert (len(log_files(tmp_path)), log.records_lost) == (4, 0)
    log.add(access("A"), 1)
    log.close(1)
    assert len(log_files(tmp_path)) == 2


def test_a_newer_format_is_refused_with_a_sentence(tmp_path: Path) -> None:
    block = Block()
    block.add(Began(at_us=0, version=99))
    path = tmp_path / "newer.tclog"
    path.write_bytes(MAGIC + block.seal())
    with pytest.raises(LogError, match="format version 99"):
        list(LogReader(path))


def test_another_file_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("something else entirely")
    with pytest.raises(LogError, match="not an access log"):
        list(LogReader(path))
    with pytest.raises(LogError, match="no access log files"):
        LogReader(tmp_path)
