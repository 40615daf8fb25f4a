"""Timelines and words: shared counters, and waiting for fences with a deadline."""

import threading

import pytest

from directory.core.actions import Fence
from directory.core.errors import ImportFailed, TransferError
from transfer.ipc import sync
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import CounterTable, OutOfTable, TimelineSync, TimelineTable, WordTable

FORWARD, CURRENT = 0, 1


def shared_words(count: int = 8) -> tuple[WordTable, WordTable]:
    made = WordTable.create(SharedMemoryIPC(), "words", count)
    return made, WordTable.open(SharedMemoryIPC(), made.fd, count)


def close(*tables: CounterTable) -> None:
    for table in tables:
        table.close()
        table.close()  # repeatable


def test_a_reader_sees_the_owners_bump() -> None:
    owner, reader = shared_words()
    assert reader.read(3) == 0
    assert owner.bump(3) == 1
    assert owner.bump(3) == 2
    assert reader.read(3) == 2
    assert reader.read(2) == reader.read(4) == 0
    close(owner, reader)


def test_the_pool_word_is_slot_0() -> None:
    owner, reader = shared_words()
    assert owner.bump_pool() == 1
    assert reader.read(0) == 1
    close(owner, reader)


def test_set_at_least_raises_a_word_but_never_lowers_it() -> None:
    owner, reader = shared_words()
    assert owner.set_at_least(1, 5) == 5
    assert owner.set_at_least(1, 3) == 5
    assert reader.read(1) == 5
    close(owner, reader)


def test_counters_hold_64_bits_in_native_order() -> None:
    table = TimelineTable.create(SharedMemoryIPC(), "timelines")
    table.write(CURRENT, (1 << 64) - 1)
    assert bytes(table.mapping.view[8:16]) == b"\xff" * 8
    assert table.read(FORWARD) == 0
    close(table)


@pytest.mark.parametrize("index", [8, -1, 1 << 40])
def test_an_index_beyond_the_table_is_an_error(index: int) -> None:
    owner, reader = shared_words(8)
    with pytest.raises(OutOfTable):
        reader.read(index)
    with pytest.raises(OutOfTable):
        owner.bump(index)
    close(owner, reader)


def test_a_table_that_is_too_small_is_refused() -> None:
    made = WordTable.create(SharedMemoryIPC(), "words", 1)
    with pytest.raises(ImportFailed, match="timeline table"):
        TimelineTable.open(SharedMemoryIPC(), made.fd, 2)
    close(made)


def test_waiting_ends_when_another_thread_reaches_the_value() -> None:
    table = TimelineTable.create(SharedMemoryIPC(), "timelines")
    fences = TimelineSync({4: table})
    writer = threading.Timer(0.01, table.write, (CURRENT, 9))
    writer.start()
    assert fences.wait([Fence(4, CURRENT, 9), Fence(4, FORWARD, 0)], deadline_s=30) == ()
    writer.join()
    close(table)


def test_waiting_ends_at_the_deadline_and_names_what_is_missing() -> None:
    table = TimelineTable.create(SharedMemoryIPC(), "timelines")
    table.write(FORWARD, 2)
    late = Fence(4, FORWARD, 3)
    assert TimelineSync({4: table}).wait([late, Fence(4, FORWARD, 2)], 0.001) == (late,)
    close(table)


def test_a_fence_of_an_unknown_pool_is_an_error() -> None:
    with pytest.raises(TransferError, match="pool 7"):
        TimelineSync({}).query([Fence(7, 0, 0)])


def test_the_barrier_for_weakly_ordered_processors_can_be_taken() -> None:
    sync._lock_barrier()
    sync._lock_barrier()
