"""Registrations: what is checked before a pool is taken in, and who closes its descriptors."""

import os

import msgspec
import pytest

from directory.core import limits
from directory.core.errors import BadMessage, LayoutError, TooLarge, TreecoredError
from directory.daemon.registration import Registration
from directory.protocol.messages import Register
from transfer.ipc.memory import MemoryHandle
from transfer.ipc.sync import SyncHandle
from transfer.layout import BufferLayout, PoolLayout, mha_layer_first

LAYOUT = mha_layer_first(layers=1, page_size=4, page_count=8, heads=1, head_dim=8, itemsize=1)
HANDLES = tuple(MemoryHandle("memfd", nbytes) for nbytes in LAYOUT.allocation_bytes)
pack = msgspec.msgpack.encode


def message(**changes: object) -> Register:
    """A good Register message, but for the changes."""
    good = Register("a", b"f" * 16, "mirrored", pack(LAYOUT), pack(HANDLES))
    return msgspec.structs.replace(good, **changes)


def test_a_good_message_becomes_an_event_with_the_pools_sizes() -> None:
    registration = Registration.read(
        message(), [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    )
    event = registration.event(7, 1234)
    assert (event.token, event.now_us, event.instance) == (7, 1234, "a")
    assert (event.page_size, event.page_count) == (4, 8)
    assert event.page_bytes == LAYOUT.page_bytes
    assert (event.world_size, event.rank) == (1, 0)
    fds = list(registration.fds)
    registration.close()
    registration.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


HUGE = PoolLayout(4, 1, (BufferLayout("kv", 0, 0, 0, 1 << 30, 1 << 30),), (1 << 30,))
OUTSIDE = PoolLayout(4, 8, (BufferLayout("kv", 0, 0, 0, 64, 64),), (100,))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"layout": b""}, BadMessage),
        ({"layout": b"\x91" * 10_000}, BadMessage),
        ({"layout": pack([4, 8, [], []])}, LayoutError),
        ({"layout": pack(["4", 8, [], []])}, BadMessage),
        ({"layout": pack([-4, 8, [], []])}, BadMessage),
        ({"layout": pack(OUTSIDE)}, LayoutError),
        ({"layout": pack(HUGE)}, TooLarge),
        ({"handles": b"\xc1"}, BadMessage),
        ({"handles": pack([["memfd", 0]])}, BadMessage),
        ({"handles": pack([["k" * 100, 1]])}, BadMessage),
        ({"handles": pack([["memfd", 1]] * 5_000)}, BadMessage),
        ({"sync": b"\xc1"}, BadMessage),
        ({"sync": pack(["k" * 33, b""])}, BadMessage),
        ({"sync": pack(["cuda-events", bytes(17 * 1024)])}, BadMessage),
        ({"fingerprint": b""}, BadMessage),
        ({"fingerprint": bytes(limits.FINGERPRINT_BYTES_MAX + 1)}, BadMessage),
    ],
)
def test_a_bad_message_is_a_typed_error_and_the_descriptors_stay_the_callers(
    changes: dict[str, object], error: type[TreecoredError]
) -> None:
    fds = os.pipe()
    with pytest.raises(error):
        Registration.read(message(**changes), fds)
    for fd in fds:
        os.close(fd)  # would raise if someone had closed it


def test_a_pool_without_its_tables_is_refused() -> None:
    with pytest.raises(BadMessage, match="timelines"):
        Registration.read(message(), [])


def test_a_rank_is_handed_on_and_its_range_is_the_directorys_to_check() -> None:
    registration = Registration.read(message(world_size=4, rank=9), os.pipe())
    event = registration.event(1, 0)
    assert (event.world_size, event.rank) == (4, 9)
    registration.close()


@pytest.mark.parametrize(
    ("sync", "wanted"),
    [
        (b"", SyncHandle()),
        (pack(SyncHandle("cuda-events", b"x")), SyncHandle("cuda-events", b"x")),
    ],
)
def test_how_the_timelines_are_read_is_the_schedulers_choice(
    sync: bytes, wanted: SyncHandle
) -> None:
    registration = Registration.read(message(sync=sync), os.pipe())
    assert registration.sync == wanted
    registration.close()


def test_a_page_table_that_is_announced_has_to_come() -> None:
    fds = os.pipe()
    with pytest.raises(BadMessage, match="page table"):
        Registration.read(message(page_table=True), fds)
    third = os.dup(fds[0])
    registration = Registration.read(message(page_table=True), [*fds, third])
    assert registration.message.page_table
    registration.close()


def test_a_stage_ring_that_is_announced_has_to_come_with_what_wakes_its_scheduler() -> None:
    fds = os.pipe()
    with pytest.raises(BadMessage, match="stage ring"):
        Registration.read(message(staging=True), [*fds, os.dup(fds[0])])
    registration = Registration.read(message(staging=True), [*fds, *os.pipe()])
    assert registration.message.staging
    registration.close()
