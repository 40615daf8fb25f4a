"""Taking a tier up from its journal: exactly what was there, and under any damage nothing wrong.

Strategy: a random history fills a small host tier and a keeper keeps its journal; what is resident
at the end is the truth. Whatever is then done to the logs, all that a successor takes up must be
true page by page (namespace, whole path, slot), and what it misses must be what the damage covers:
pages whose own record, or an ancestor's, is not whole any more.
"""

from __future__ import annotations

import random
from functools import lru_cache

import pytest

from directory.core import limits
from directory.core.directory import Directory
from directory.core.events import Flush
from directory.core.ids import HOST
from directory.core.namespace import NamespaceKey
from directory.core.records import Numbered, PagesRecord, SpaceRecord, frame, read_log
from directory.core.tokens import pack_pages, pack_tokens, unpack_pages
from tests.unit.directory.core.keeper import Holding, Keeper, holdings, recovered
from tests.unit.directory.core.mirror import PAGE_BYTES
from tests.unit.directory.core.test_journal import KeptWorld
from tests.unit.directory.core.world import KEY, Scheduler

HOST_BYTES, SEGMENT_BYTES = 256 * PAGE_BYTES, 32 * PAGE_BYTES
KEYS = (KEY, NamespaceKey(cache_salt=""), NamespaceKey(bigram=True))
TAIL_BYTES = 64 * limits.KIB
FLIPS = 1_000


class Past:
    """A journal, and what was resident when its daemon died."""

    def __init__(self, keeper: Keeper, truth: dict[int, Holding]) -> None:
        self.keeper = keeper
        self.truth = truth
        self.log = keeper.logs[-1]

    def take_up(self, log: bytes) -> dict[int, Holding]:
        """What a successor has of a damaged log; all of it is true."""
        damaged = Keeper()
        damaged.words, damaged.logs = self.keeper.words, [log]
        successor, _ = recovered(damaged, HOST_BYTES, SEGMENT_BYTES)
        held = holdings(successor)
        assert held.items() <= self.truth.items(), "a wrong page"
        return held

    def covered(self, whole: list[Numbered]) -> dict[int, Holding]:
        """What must still be there where these records are whole."""
        named: set[tuple[int, int]] = set()
        parents: dict[tuple[int, int], tuple[int, int]] = {}
        spaces = {n.record.number for n in whole if isinstance(n.record, SpaceRecord)}
        for numbered in whole:
            record = numbered.record
            if isinstance(record, PagesRecord) and record.space in spaces:
                above = (record.parent_slot, record.parent_stamp)
                for slot in unpack_pages(record.slots):
                    parents[slot, record.stamp] = above
                    above = (slot, record.stamp)
                    named.add(above)
        kept = {}
        for slot, holding in self.truth.items():
            at = (slot, self.keeper.word(slot))
            while at in named and at != (0, 0):
                at = parents[at]
            if at == (0, 0):
                kept[slot] = holding
        return kept


@lru_cache(maxsize=1)
def past() -> Past:
    """A long history: evictions, splits, flushes, several namespaces, a log above 64 KiB. At its
    end the tier is nearly full."""
    rng = random.Random(20)
    world = KeptWorld(host_pages=256, segment_pages=32)
    world.checked = False
    schedulers = [Scheduler(world, "a", pages=64), Scheduler(world, "b", pages=64)]
    while len(b"".join(world.keeper.logs)) < 80_000 or world.directory.host.pages < 240:
        who = rng.choice(schedulers)
        trunk = rng.randrange(6)
        length = rng.randrange(1, 24)
        path = [*range(trunk, trunk + 20), *(rng.randrange(40) for _ in range(length))]
        who.publish(path[: rng.randrange(2, len(path))], key=rng.choice(KEYS))
        for op in list(world.copies):
            world.finish(op, "ok" if rng.random() < 0.9 else "void")
        if rng.random() < 0.002:
            who.ask(Flush("host"))
    world.finish_all()
    return Past(world.keeper, holdings(world.directory))


def test_a_successor_takes_up_exactly_what_was_resident() -> None:
    then = past()
    assert len(then.truth) > 200
    assert then.take_up(then.log) == then.truth


def test_what_is_taken_up_is_written_down_anew_and_taken_up_again() -> None:
    then = past()
    keeper = Keeper()
    keeper.words, keeper.logs = dict(then.keeper.words), list(then.keeper.logs)
    first, actions = recovered(keeper, HOST_BYTES, SEGMENT_BYTES)
    keeper.take_in(actions)
    assert len(keeper.logs) == 1
    assert len(keeper.logs[0]) < len(then.log)
    second, _ = recovered(keeper, HOST_BYTES, SEGMENT_BYTES, salt=100)
    assert holdings(second) == holdings(first) == then.truth
    assert [node.places[HOST].tick for node in first.host.nodes.values()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_log_cut_anywhere_in_its_last_64_kib_costs_what_was_cut_off() -> None:
    then = past()
    assert len(then.log) > TAIL_BYTES
    whole = list(read_log(then.log))
    ends = [numbered.end for numbered in whole]
    known: dict[int, dict[int, Holding]] = {}
    complete = 0
    for cut in range(len(then.log) - TAIL_BYTES, len(then.log) + 1):
        while complete < len(ends) and ends[complete] <= cut:
            complete += 1
        # What is read of the cut log is compared at every offset; what follows from it is the
        # same for all offsets within one record, and is worked out once for each.
        tail = then.log[ends[max(0, complete - 3)] if complete > 3 else 0 : cut]
        read = [n.record for n in read_log(tail)]
        begin = max(0, complete - 3) + 1 if complete > 3 else 0
        assert read == [n.record for n in whole[begin:complete]]
        if complete not in known:
            known[complete] = then.take_up(then.log[:cut])
            assert known[complete] == then.covered(whole[:complete])
    assert len(known) > 100


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_of_a_thousand_flipped_bits_costs_what_its_record_says() -> None:
    then = past()
    whole = list(read_log(then.log))
    rng = random.Random(4)
    known: dict[int, int] = {}
    for _ in range(FLIPS):
        at = rng.randrange(len(then.log))
        damaged = bytearray(then.log)
        damaged[at] ^= 1 << rng.randrange(8)
        left = [n for n in whole if not _begin(n, whole) <= at < n.end]
        assert len(left) == len(whole) - 1
        assert list(read_log(bytes(damaged))) == left
        # What follows from the loss of one record is worked out once for each.
        hit = next(index for index, n in enumerate(whole) if at < n.end)
        if hit not in known:
            held = then.take_up(bytes(damaged))
            assert held == then.covered(left)
            known[hit] = len(then.truth) - len(held)
    assert sum(known.values()) > 0


def test_a_thousand_flipped_bits_at_once_make_no_wrong_page() -> None:
    then = past()
    for seed in range(20):
        rng = random.Random(seed)
        damaged = bytearray(then.log)
        for _ in range(FLIPS if seed % 2 else 30):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        held = then.take_up(bytes(damaged))
        assert held == then.covered(list(read_log(bytes(damaged))))


def test_flipped_bits_in_the_words_cost_their_own_pages_and_those_below() -> None:
    then = past()
    rng = random.Random(5)
    for _ in range(50):
        damaged = Keeper()
        damaged.words, damaged.logs = dict(then.keeper.words), list(then.keeper.logs)
        hit = rng.choice(sorted(damaged.words))
        damaged.words[hit] ^= 1 << rng.randrange(64)
        successor, _ = recovered(damaged, HOST_BYTES, SEGMENT_BYTES)
        held = holdings(successor)
        assert held.items() <= then.truth.items()
        gone = then.truth.keys() - held.keys()
        if hit in then.truth:
            path = then.truth[hit][1]
            assert hit in gone
            assert all(then.truth[slot][1].startswith(path) for slot in gone)
        else:
            assert not gone


def test_what_is_not_taken_up_is_invalid_from_then_on() -> None:
    then = past()
    keeper = Keeper()
    keeper.words, keeper.logs = dict(then.keeper.words), list(then.keeper.logs)
    successor, actions = recovered(keeper, 64 * PAGE_BYTES, SEGMENT_BYTES)
    keeper.take_in(actions)
    held = holdings(successor)
    assert 0 < len(held) < len(then.truth)
    assert keeper.valid() == held.keys()
    counters = successor.counters
    assert counters["host_pages_recovered"] == len(held)
    assert counters["host_pages_not_recovered"] == len(then.truth) - len(held)


def test_logs_that_stand_beside_one_another_all_count() -> None:
    """A compaction under way: half in the old log, half in the new one, some in both."""
    then = past()
    keeper = Keeper()
    keeper.words = dict(then.keeper.words)
    _, actions = recovered(then.keeper, HOST_BYTES, SEGMENT_BYTES)
    anew = Keeper()
    anew.take_in(actions)
    new = anew.logs[-1]
    ends = [numbered.end for numbered in read_log(new)]
    keeper.logs = [then.log, new[: ends[len(ends) // 2]]]
    assert holdings(recovered(keeper, HOST_BYTES, SEGMENT_BYTES)[0]) == then.truth


# Records that nobody wrote, or not in this tier.

SPACE = SpaceRecord(1, b"f", KEY, 2, PAGE_BYTES, 1)


def written(*records: PagesRecord | SpaceRecord, words: dict[int, int] | None = None) -> Keeper:
    """A keeper of these records; words as the records say, unless others are given."""
    keeper = Keeper()
    keeper.logs = [b"".join(frame(at, record) for at, record in enumerate(records, 1))]
    for record in records:
        if isinstance(record, PagesRecord) and len(record.slots) % 4 == 0:
            keeper.words.update(dict.fromkeys(unpack_pages(record.slots), record.stamp))
    keeper.words.update(words or {})
    return keeper


def pages(stamp: int, slots: list[int], tokens: list[int], **changed: int) -> PagesRecord:
    """A record of pages of two tokens each, at the root unless changed."""
    numbers = {"space": 1, "parent_slot": 0, "parent_stamp": 0, **changed}
    return PagesRecord(
        numbers["space"],
        stamp,
        numbers["parent_slot"],
        numbers["parent_stamp"],
        pack_pages(slots),
        pack_tokens(tokens),
    )


def slots_of(keeper: Keeper) -> set[int]:
    """Which slots a successor takes up."""
    return set(holdings(recovered(keeper, HOST_BYTES, SEGMENT_BYTES)[0]))


def test_a_page_is_its_parents_only_under_the_stamp_that_it_names() -> None:
    parent = pages(7, [3], [1, 2])
    assert slots_of(
        written(SPACE, parent, pages(8, [4], [5, 6], parent_slot=3, parent_stamp=7))
    ) == {
        3,
        4,
    }
    orphan = pages(8, [4], [5, 6], parent_slot=3, parent_stamp=9)
    assert slots_of(written(SPACE, parent, orphan)) == {3}


def test_the_order_of_records_does_not_matter() -> None:
    child = pages(8, [4], [5, 6], parent_slot=3, parent_stamp=7)
    assert slots_of(written(child, pages(7, [3], [1, 2]), SPACE)) == {3, 4}


def test_a_page_in_the_middle_that_is_not_valid_takes_those_behind_it_along() -> None:
    record = pages(7, [3, 4, 5], [1, 2, 3, 4, 5, 6])
    assert slots_of(written(SPACE, record, words={4: 1})) == {3}


def test_a_circle_of_parents_is_no_path() -> None:
    a = pages(7, [3], [1, 2], parent_slot=4, parent_stamp=8)
    b = pages(8, [4], [5, 6], parent_slot=3, parent_stamp=7)
    assert slots_of(written(SPACE, a, b)) == set()


@pytest.mark.parametrize(
    "record",
    [
        pages(7, [3], [1, 2], space=2),
        pages(7, [3], [1, 2, 3]),
        pages(7, [], []),
        pages(7, [300 << 16], [1, 2]),
        pages(7, [32], [1, 2]),
        PagesRecord(1, 7, 0, 0, b"\3\0\0", b"12345678"),
    ],
    ids=["space", "tokens", "empty", "segment", "index", "uneven"],
)
def test_a_record_that_does_not_fit_the_tier_is_dropped(record: PagesRecord) -> None:
    assert slots_of(written(SPACE, record, pages(9, [9], [8, 8]))) == {9}


def test_pages_of_two_sizes_in_one_segment_are_not_both_believed() -> None:
    other = SpaceRecord(2, b"g", KEY, 2, 2 * PAGE_BYTES, 1)
    keeper = written(SPACE, other, pages(7, [3], [1, 2]), pages(8, [1], [1, 2], space=2))
    assert slots_of(keeper) in ({3}, {1})


def test_two_namespaces_that_differ_in_sizes_alone_are_not_both_believed() -> None:
    other = SpaceRecord(2, b"f", KEY, 2, 2 * PAGE_BYTES, 1)
    far = 1 << 16
    keeper = written(SPACE, other, pages(7, [3], [1, 2]), pages(8, [far], [3, 4], space=2))
    assert slots_of(keeper) in ({3}, {far})


def test_a_child_of_another_namespace_than_its_parents_is_dropped() -> None:
    other = SpaceRecord(2, b"g", KEY, 2, PAGE_BYTES, 1)
    child = pages(8, [4], [5, 6], space=2, parent_slot=3, parent_stamp=7)
    assert slots_of(written(SPACE, other, pages(7, [3], [1, 2]), child)) == {3}


def test_the_same_page_twice_is_taken_up_once() -> None:
    keeper = written(SPACE, pages(7, [3], [1, 2]), pages(8, [4], [1, 2]))
    assert len(slots_of(keeper)) == 1


def test_a_namespace_out_of_range_is_dropped() -> None:
    bad = SpaceRecord(1, b"f", NamespaceKey(cache_salt="x" * 2_000), 2, PAGE_BYTES, 1)
    assert slots_of(written(bad, pages(7, [3], [1, 2]))) == set()


def test_more_namespaces_than_there_may_be_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_MAX", 1)
    other = SpaceRecord(2, b"g", KEY, 2, PAGE_BYTES, 1)
    keeper = written(SPACE, other, pages(7, [3], [1, 2]), pages(8, [4], [1, 2], space=2))
    assert slots_of(keeper) in ({3}, {4})


def test_a_record_written_into_a_prompt_is_not_believed() -> None:
    """A client's tokens hold a whole record; damage makes the reader look inside of them."""
    forged = frame(1, pages(123, [9], [6, 6]))
    forged += bytes(-len(forged) % 8)
    outer = PagesRecord(1, 7, 0, 0, pack_pages(range(len(forged) // 8)), forged)
    keeper = written(SPACE, outer)
    (log,) = keeper.logs
    at = log.index(forged)
    for damage in range(len(frame(1, SPACE)), at):
        damaged = bytearray(log)
        damaged[damage] ^= 1
        keeper.logs = [bytes(damaged)]
        assert slots_of(keeper) == set()


def test_memory_that_is_not_there_any_more_holds_nothing() -> None:
    keeper = written(SPACE, pages(7, [3, 5], [1, 2, 3, 4]))
    directory = Directory(host_bytes=HOST_BYTES, segment_bytes=SEGMENT_BYTES, journal=1)
    directory.recover(keeper.logs, keeper.word, [4 * PAGE_BYTES])
    assert set(holdings(directory)) == {3}
    empty = Directory(host_bytes=HOST_BYTES, segment_bytes=SEGMENT_BYTES, journal=1)
    empty.recover(keeper.logs, keeper.word, [])
    assert holdings(empty) == {}
    assert empty.check() == []


def test_missing_records_are_counted() -> None:
    keeper = written(SPACE, pages(7, [3], [1, 2]), pages(8, [4], [3, 4]))
    log = keeper.logs[0]
    ends = [numbered.end for numbered in read_log(log)]
    keeper.logs = [log[: ends[0]] + log[ends[1] :]]
    successor, _ = recovered(keeper, HOST_BYTES, SEGMENT_BYTES)
    assert successor.counters["journal_records_lost"] == 1


def _begin(numbered: Numbered, whole: list[Numbered]) -> int:
    at = numbered.seq - whole[0].seq
    return whole[at - 1].end if at else 0
