"""Checking mode: what is recorded of published and of landed pages, and when it is written."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.sglang_gpu.compare import compare
from directory.core.actions import Restored
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages
from scheduler_shim.fills import Fill
from scheduler_shim.own_tree import Published
from scheduler_shim.request import Request
from scheduler_shim.sglang.checking import DIGEST_BYTES, SUFFIX, Checking, read_records
from scheduler_shim.sglang.load import Load

KEY = NamespaceKey()
PAGE_KEY = 8
"""Two tokens a page."""


class Memory:
    """A pool whose pages hold one number each; `late`: digests that are not ready yet."""

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        self.late = False

    def __call__(self, names: bytes) -> Pending:
        numbers = [int.from_bytes(names[at : at + 4], "little") for at in range(0, len(names), 4)]
        return Pending(self, [self.pages[name] for name in numbers])


class Pending:
    def __init__(self, memory: Memory, values: list[int]) -> None:
        self._memory = memory
        self._values = values

    def ready(self) -> bool:
        return not self._memory.late

    def take(self) -> bytes:
        return b"".join(value.to_bytes(DIGEST_BYTES, "little") for value in self._values)


class Side:
    """One engine's memory and what checking mode records of it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.memory = Memory()
        self.path = folder / f"{name}{SUFFIX}"
        self.checks = Checking(self.path, self.memory)

    def publish(self, tokens: bytes, first: int, names: list[int], duplicates: int = 0) -> None:
        """`names`: canonical names of the whole path, of which the last are new."""
        gone = pack_pages([900 + number for number in range(duplicates)])
        self.checks.computed(KEY, tokens, first, Published(pack_pages(names), gone))
        self.checks.tick()

    def land(self, tokens: bytes, start: int, names: list[int], reply: Restored) -> Fill:
        request = Request(1, "r", KEY, tokens, b"", PAGE_KEY)
        request.row.extend(range(500, 500 + start))
        fill = Fill(1, request, array("I", names), ())
        self.checks.restored(fill, reply)
        self.checks.tick()
        return fill


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    pair = Side(tmp_path, "a"), Side(tmp_path, "b")
    yield pair
    for side in pair:
        side.checks.close()


TOKENS = bytes(range(32))
"""Four pages."""


def landed(host: int = 0, peer: int = 0, *, whole: bool = True) -> Restored:
    return Restored(landed=whole, host_pages=host, peer_pages=peer, nbytes=0, duration_us=0)


def test_a_restored_page_with_the_computed_bytes_is_right(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    a, b = sides
    a.memory.pages = {1: 11, 2: 22, 3: 33, 4: 44}
    a.publish(TOKENS, 0, [1, 2, 3, 4])
    b.memory.pages = {7: 33, 8: 44}
    b.land(TOKENS, 2, [7, 8], landed(host=2))
    found = compare(tmp_path)
    assert (found.computed, found.compared, found.wrong, found.unknown) == (4, 2, 0, 0)
    assert found.by == {"host, whole": 2, "of another engine": 2}


def test_a_restored_page_with_other_bytes_is_wrong_and_told_with_its_place(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    a, b = sides
    a.memory.pages = {1: 11, 2: 22}
    a.publish(TOKENS[:16], 0, [1, 2])
    b.memory.pages = {7: 11, 8: 23}
    b.land(TOKENS[:16], 0, [7, 8], landed(peer=2))
    found = compare(tmp_path)
    assert (found.compared, found.wrong) == (2, 1)
    assert found.first_wrong[0].startswith("b: page 1 of 0 to 2, from peer")


def test_the_same_tokens_behind_others_are_another_page(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    a, b = sides
    a.memory.pages = {1: 11, 2: 22}
    a.publish(TOKENS[:16], 0, [1, 2])
    b.memory.pages = {7: 22}
    b.land(bytes(8) + TOKENS[8:16], 1, [7], landed(host=1))
    found = compare(tmp_path)
    assert (found.compared, found.unknown) == (0, 1)


def test_only_new_pages_of_a_publication_are_recorded(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    a, _ = sides
    a.memory.pages = {4: 44}
    a.publish(TOKENS, 1, [1, 2, 3, 4], duplicates=2)
    (record,) = read_records(a.path)
    assert (record.kind, record.start, record.digests) == (
        "computed", 3, (44).to_bytes(DIGEST_BYTES, "little"),
    )  # fmt: skip


def test_loaded_pages_that_are_published_later_do_not_count_as_computed(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    a, _ = sides
    a.memory.pages = {1: 1, 7: 7, 8: 8, 4: 4}
    load = SimpleNamespace(fill=a.land(TOKENS[:24], 1, [7, 8], landed(host=2)))
    a.checks.about(cast(Load, load))
    a.publish(TOKENS, 0, [1, 7, 8, 4])
    a.checks.about(None)
    computed = [(r.start, len(r.digests)) for r in read_records(a.path) if r.kind == "computed"]
    assert computed == [(0, DIGEST_BYTES), (3, DIGEST_BYTES)]


def test_nobody_waits_for_digests_that_a_stream_has_not_computed(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    a, _ = sides
    a.memory.pages = {1: 11}
    a.memory.late = True
    a.publish(TOKENS[:8], 0, [1])
    assert [record.kind for record in read_records(a.path)] == ["begun"]
    a.memory.late = False
    a.checks.tick()
    assert [record.kind for record in read_records(a.path)] == ["begun", "computed"]


def test_what_a_killed_engine_had_not_digested_yet_is_lost_and_not_wrong(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    a, b = sides
    b.memory.pages = {1: 11, 7: 12}
    b.publish(TOKENS[:8], 0, [1])
    a.memory.pages = {1: 12}
    a.memory.late = True
    a.publish(TOKENS[:8], 0, [1])
    b.land(TOKENS[:8], 0, [7], landed(host=1))
    found = compare(tmp_path)
    assert (found.compared, found.wrong, found.lost) == (0, 0, 1)
    a.memory.late = False
    a.checks.tick()
    found = compare(tmp_path)
    assert (found.compared, found.wrong, found.lost) == (1, 0, 0)


def test_a_load_that_did_not_land_is_not_recorded(sides: tuple[Side, Side], tmp_path: Path) -> None:
    a, _ = sides
    a.land(TOKENS[:8], 0, [1], landed(whole=False))
    assert list(read_records(a.path)) == []


def test_a_record_that_its_writer_did_not_finish_is_left_out(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    a, _ = sides
    a.memory.pages = {1: 11}
    a.publish(TOKENS[:8], 0, [1])
    whole = a.path.read_bytes()
    a.path.write_bytes(whole + whole[:-3])
    assert len(list(read_records(a.path))) == 1


def test_pages_of_an_engine_that_was_dead_by_then_are_told_apart(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    a, b = sides
    a.memory.pages = {1: 11}
    a.publish(TOKENS[:8], 0, [1])
    b.memory.pages = {7: 11}
    b.land(TOKENS[:8], 0, [7], landed(host=1))
    (record,) = read_records(b.path)
    assert compare(tmp_path, {"a": record.at - 1}).by["of a dead engine"] == 1
    assert compare(tmp_path, {"a": record.at + 1}).by["of a dead engine"] == 0
