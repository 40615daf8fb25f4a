"""Checksums of host pages: kept at backup, compared at load back and by the scrubber."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from directory.core.actions import CopyKind, Landing, SubmitCopy
from directory.core.errors import TransferError
from directory.core.events import CopyDone, PagesDamaged
from directory.core.ids import LANDINGS
from directory.core.tokens import unpack_pages
from tests.unit.transfer.bench import FENCE_DEADLINE_US, Bench
from tests.unit.transfer.support import HOST, OwnedPool, copy, part, slot
from transfer.checksum import (
    DAMAGED,
    SEGMENT_BYTES,
    UNITS_PER_SEGMENT_MAX,
    Form,
    SumTable,
    Units,
    load_hash,
    table_bytes,
    units_of,
)
from transfer.checksum_copies import Checksums
from transfer.checksum_scrub import REST_US, Scrubber
from transfer.engine import EngineEvent
from transfer.engine_limits import EngineLimits
from transfer.host_tier import TierShape

Outcome = tuple[list[int], list[str]]


class SummedBench(Bench):
    """A bench whose engine keeps checksums, in a table that outlives an engine."""

    def __init__(self, *, verify: bool = True, landings: int = 0) -> None:
        super().__init__(EngineLimits(fence_deadline_us=FENCE_DEADLINE_US))
        self.file = os.memfd_create("checksums")
        os.ftruncate(self.file, table_bytes(self.tier.shape))
        table = SumTable(os.dup(self.file), self.tier.shape)
        self.sums = Checksums(table, self.tier, load_hash(), verify=verify)
        self.engine.use_checksums(self.sums)
        self.scrubber = Scrubber(self.sums, 1_000_000_000, 0)

    @property
    def form(self) -> Form:
        return Form(self.layout.page_bytes, self.layout.page_bytes)

    def entry(self, index: int) -> int:
        return self.sums.table.read(Units(slot(index) >> 16, slot(index) & 0xFFFF, 1))[0]

    def flip(self, index: int, bit: int = 5) -> None:
        page = self.tier.page(slot(index), self.layout.page_bytes)
        page[bit // 8] ^= 1 << bit % 8
        page.release()

    def scrub_round(self) -> list[int]:
        rounds, damaged = self.scrubber.rounds, list[int]()
        while self.scrubber.rounds == rounds:
            self.now_us = max(self.now_us, self.scrubber.due_us)
            damaged += self.scrubber.step(self.now_us)
        return damaged

    def close(self) -> None:
        super().close()
        self.sums.close()
        os.close(self.file)


@pytest.fixture
def bench() -> Iterator[SummedBench]:
    made = SummedBench()
    yield made
    made.close()


def backup(op: int, pages: list[int], slots: list[int]) -> SubmitCopy:
    return copy(op, "backup", part(1, pages, HOST, map(slot, slots)), words=[(1, 3, 0)])


def load(op: int, slots: list[int], pages: list[int]) -> SubmitCopy:
    return copy(op, "load_back", part(HOST, map(slot, slots), 2, pages))


def outcome(events: list[EngineEvent]) -> Outcome:
    """Damaged slots, and how copies ended."""
    damaged: list[int] = []
    ends: list[str] = []
    for event in events:
        if isinstance(event, PagesDamaged):
            assert not ends, "damage is told before the end of the copy that found it"
            damaged += unpack_pages(event.slots)
        elif isinstance(event, CopyDone):
            ends.append(event.outcome)
    return damaged, ends


def test_what_was_backed_up_is_loaded_when_it_is_what_it_was(bench: SummedBench) -> None:
    pages, slots = list(range(12)), [9, 8, 7, 1, 2, 3, 20, 21, 30, 0, 31, 16]
    assert outcome(bench.run(backup(1, pages, slots))) == ([], ["ok"])
    assert all(bench.entry(index) > DAMAGED for index in slots)
    assert bench.entry(4) == 0
    assert outcome(bench.run(load(2, slots, pages))) == ([], ["ok"])
    for page in pages:
        assert bench.pools[2].read_page(page) == bench.pools[1].pattern(1, page)
    assert bench.scrub_round() == []
    assert bench.scrubber.units == len(slots)


@pytest.mark.parametrize("bit", [0, 7, 100, -1])
def test_any_flipped_bit_loses_the_load_and_names_the_slot(bench: SummedBench, bit: int) -> None:
    bench.run(backup(1, [1, 2, 3], [4, 5, 6]))
    bench.flip(5, bit % (8 * bench.layout.page_bytes))
    assert outcome(bench.run(load(2, [4, 5, 6], [1, 2, 3]))) == ([slot(5)], ["failed"])
    assert outcome(bench.run(load(3, [4, 6], [4, 5]))) == ([], ["ok"]), "its neighbours are whole"


def test_a_bit_that_flips_while_the_load_runs_is_noticed(bench: SummedBench) -> None:
    bench.run(backup(1, [1], [4]))
    bench.engine.submit(load(2, [4], [1]))
    assert bench.engine.step() == []
    bench.flip(4)
    assert outcome(bench.until_idle()) == ([slot(4)], ["failed"])


def test_damage_stays_damage_whoever_looks_and_until_the_slot_is_written_again(
    bench: SummedBench,
) -> None:
    bench.run(backup(1, [1], [4]))
    bench.flip(4)
    assert outcome(bench.run(load(2, [4], [1])))[1] == ["failed"]
    bench.flip(4)
    assert outcome(bench.run(load(3, [4], [1]))) == ([slot(4)], ["failed"])
    assert bench.scrub_round() == [], "it is known already"
    assert outcome(bench.run(backup(4, [2], [4]), load(5, [4], [1])))[0] == []
    assert outcome(bench.run(load(6, [4], [1]))) == ([], ["ok"])


def test_a_page_in_the_place_of_another_is_not_taken_for_it(bench: SummedBench) -> None:
    bench.run(backup(1, [1, 2], [4, 5]))
    four, five = (bench.tier.page(slot(index), bench.layout.page_bytes) for index in (4, 5))
    four[:], five[:] = bytes(five), bytes(four)
    four.release()
    five.release()
    damaged, ends = outcome(bench.run(load(2, [4, 5], [1, 2])))
    assert (set(damaged), ends) == ({slot(4), slot(5)}, ["failed"])


def test_a_slot_has_no_checksum_while_it_is_written_and_after_a_copy_that_was_lost(
    bench: SummedBench,
) -> None:
    bench.run(backup(1, [1], [4]))
    first = bench.entry(4)
    assert first > DAMAGED
    bench.engine.submit(backup(2, [2], [4]))
    bench.engine.step()
    assert bench.entry(4) == 0
    assert bench.scrub_round() == []
    bench.pools[1].words.bump(3)
    assert outcome(bench.until_idle()) == ([], ["void"])
    assert bench.entry(4) == 0
    assert outcome(bench.run(load(3, [4], [1]))) == ([], ["ok"]), "what has none is believed"


def test_the_scrubber_finds_what_nobody_has_asked_for(bench: SummedBench) -> None:
    bench.run(backup(1, list(range(10)), list(range(20, 30))))
    for index in (22, 29):
        bench.flip(index)
    assert bench.scrub_round() == [slot(22), slot(29)]
    assert bench.scrub_round() == []


def test_the_scrubber_reads_no_faster_than_it_was_told(bench: SummedBench) -> None:
    nbytes = bench.layout.page_bytes
    bench.run(backup(1, list(range(8)), list(range(8))))
    scrubber = Scrubber(bench.sums, nbytes, 1_000)  # a page a second
    assert scrubber.step(999) == []
    assert scrubber.units == 0
    scrubber.step(1_000)
    assert scrubber.units == 8, "one step is a run of pages"
    assert scrubber.due_us == 1_000 + 8_000_000
    scrubber.step(scrubber.due_us - 1)
    assert scrubber.units == 8


def test_the_scrubber_of_an_empty_tier_rests(bench: SummedBench) -> None:
    now, steps = 0, 0
    while not bench.scrubber.rounds:
        bench.scrubber.step(now)
        steps += 1
    assert steps <= len(bench.tier.segments)
    assert bench.scrubber.due_us == now + REST_US


def test_without_verification_a_load_is_not_compared_and_the_scrubber_still_is() -> None:
    bench = SummedBench(verify=False)
    try:
        bench.run(backup(1, [1], [4]))
        bench.flip(4)
        assert outcome(bench.run(load(2, [4], [1]))) == ([], ["ok"])
        assert bench.scrub_round() == [slot(4)]
    finally:
        bench.close()


def test_a_mover_that_comes_after_another_knows_what_that_one_wrote(bench: SummedBench) -> None:
    bench.run(backup(1, [1, 2], [4, 5]))
    table = SumTable(os.dup(bench.file), bench.tier.shape)
    after = Checksums(table, bench.tier, load_hash(), verify=True)
    try:
        bench.engine.use_checksums(after)
        bench.flip(5)
        assert outcome(bench.run(load(2, [4, 5], [1, 2]))) == ([slot(5)], ["failed"])
        scrubber = Scrubber(after, 1_000_000, 0)
        while not scrubber.rounds:
            scrubber.step(scrubber.due_us)
        assert scrubber.units == 1, "the other one is known to be damaged"
    finally:
        after.close()


def test_a_segment_that_is_given_to_another_page_size_forgets_its_checksums(
    bench: SummedBench,
) -> None:
    bench.run(backup(1, [1, 2], [4, 5]))
    half = Form(bench.layout.page_bytes // 2, bench.layout.page_bytes // 2)
    assert bench.sums.table.begin(Units(0, 0, 1), half)
    assert not any(bench.sums.table.read(Units(0, 0, UNITS_PER_SEGMENT_MAX)))
    assert bench.sums.table.form(0) == half
    assert bench.scrub_round() == []


def test_the_ranks_of_a_group_have_a_checksum_each() -> None:
    pages = part(HOST, [slot(0), slot(1), slot(9)], 2, [1, 2, 3])
    runs = [units_of(pages, Form(100, 400), offset) for offset in (0, 300)]
    assert runs[0] == [Units(0, 0, 1), Units(0, 4, 1), Units(1, 4, 1)]
    assert runs[1] == [Units(0, 3, 1), Units(0, 7, 1), Units(1, 7, 1)]
    assert units_of(pages, Form(300, 400), 0) == [], "what is no even part has none"


def test_units_beyond_the_table_have_no_checksum() -> None:
    pages = part(HOST, [65_535, 65_534], 2, [1, 2])
    assert units_of(pages, Form(100, 400), 0) == []
    assert units_of(pages, Form(100, 100), 0) == [Units(0, 65_535, 1), Units(0, 65_534, 1)]


def test_a_table_without_room_keeps_no_checksum_and_nothing_is_called_damaged(
    bench: SummedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transfer.checksum.os.pwrite", full)
        assert outcome(bench.run(backup(1, [1], [4]))) == ([], ["ok"])
    assert bench.entry(4) == 0
    assert outcome(bench.run(load(2, [4], [1]))) == ([], ["ok"])


def test_an_old_checksum_that_cannot_be_taken_away_bars_the_backup(
    bench: SummedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.run(backup(1, [1], [4]))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transfer.checksum.os.pwrite", full)
        assert outcome(bench.run(backup(2, [2], [4]))) == ([], ["failed"])
    assert outcome(bench.run(load(3, [4], [1]))) == ([], ["ok"])


def test_a_table_that_is_too_small_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    path.write_bytes(b"\0" * (SEGMENT_BYTES - 1))
    with pytest.raises(TransferError, match="needs"):
        SumTable(os.open(path, os.O_RDWR), TierShape(100, 100))


def test_no_layer_is_told_before_the_whole_load_is_compared(bench: SummedBench) -> None:
    pool = OwnedPool(bench.layout, landings=1)
    pages = bench.pools[1].pattern(1, 1), bench.pools[1].pattern(1, 2)
    bench.pools[3] = pool
    bench.engine.add_pool(pool.import_as(3))
    bench.run(backup(1, [1, 2], [4, 5]))
    for first, flipped in ((0, False), (2, True)):
        if flipped:
            bench.flip(5)
        landing = Landing(3, LANDINGS, first)
        wanted = part(HOST, [slot(4), slot(5)], 3, [6, 7])
        bench.engine.submit(SubmitCopy(2 + flipped, "load_back", (wanted,), (), (), 0, 0, landing))
        events = bench.engine.step()
        while not events:
            assert pool.timelines.read(LANDINGS) == first, "the copy is not over"
            bench.device.step()
            events = bench.engine.step()
        assert outcome(events) == (([slot(5)], ["failed"]) if flipped else ([], ["ok"]))
        assert pool.timelines.read(LANDINGS) == 2, "the two layers of the first load"
    assert (pool.read_page(6), pool.read_page(7)[1:]) == (pages[0], pages[1][1:])


def test_each_rank_of_a_group_is_compared_by_itself(bench: SummedBench) -> None:
    nbytes = bench.layout.page_bytes

    def shard(op: int, kind: CopyKind, rank: int, page: int) -> SubmitCopy:
        fill = kind == "backup"
        pages = part(1, [page], HOST, [2]) if fill else part(HOST, [2], 2, [page])
        return SubmitCopy(op, kind, (pages,), (), (), 2 * nbytes, rank * nbytes)

    for rank in (0, 1):
        assert outcome(bench.run(shard(rank, "backup", rank, rank + 3))) == ([], ["ok"])
    bench.flip(5)  # the second half of slot 2, which has two pages of a segment
    assert outcome(bench.run(shard(2, "load_back", 0, 0))) == ([], ["ok"])
    assert outcome(bench.run(shard(3, "load_back", 1, 1))) == ([2], ["failed"])
    assert bench.pools[2].read_page(0) == bench.pools[1].pattern(1, 3)


def test_a_copy_of_what_is_not_there_touches_no_checksum(bench: SummedBench) -> None:
    bench.run(backup(1, [1], [4]))
    size = os.fstat(bench.file).st_size
    for op, pages, slots in ((2, [99], [4]), (3, [1], [32]), (4, [1, 2], [4, 4])):
        assert outcome(bench.run(backup(op, pages, slots))) == ([], ["failed"])
    assert bench.entry(4) > DAMAGED
    assert os.fstat(bench.file).st_size == size
