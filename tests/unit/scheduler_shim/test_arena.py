"""The token arena: what an unacknowledged message names is never written over.

Strategy: random things are placed for rising message numbers while acknowledgements lag behind at
random; after each step every extent of an unacknowledged message still holds what was placed, and
no two of them overlap.
"""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.protocol.messages import NOWHERE, Extent
from scheduler_shim.arena import BEGUN_BYTES, PLACED_BYTES_MIN, TokenArena


@pytest.fixture
def arena() -> Iterator[TokenArena]:
    arena = TokenArena(64 * 1024)
    yield arena
    arena.close()


def held(arena: TokenArena, extent: Extent) -> bytes:
    offset, length, _ = extent
    return bytes(arena._view[offset : offset + length])


@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 120))
def test_what_is_named_and_not_acknowledged_stays(seed: int, steps: int) -> None:
    draw = Random(seed)
    arena = TokenArena(32 * 1024)
    known = [draw.randbytes(draw.randrange(PLACED_BYTES_MIN, 9_000)) for _ in range(4)]
    open_: dict[int, tuple[Extent, bytes]] = {}
    acked = 0
    numbers: dict[int, bytes] = {}
    for seq in range(1, steps + 1):
        data = draw.choice(known) if draw.random() < 0.5 else draw.randbytes(draw.randrange(9_000))
        extent = arena.place(data, seq, acked)
        if extent != NOWHERE:
            open_[seq] = extent, data
            assert numbers.setdefault(extent[2], data) is data, "a number stands for two things"
        acked = max(acked, seq - draw.randrange(6))
        open_ = {at: found for at, found in open_.items() if at > acked}
        for there, wanted in open_.values():
            assert held(arena, there) == wanted
    arena.close()


def test_the_same_object_is_written_once_and_keeps_its_number(arena: TokenArena) -> None:
    tokens = bytes(4096)
    first = arena.place(tokens, 1, 0)
    assert arena.place(tokens, 2, 0) == first
    equal = bytes(bytearray(tokens))
    assert arena.place(equal, 3, 0) != first, "another object may change its mind"


def test_short_and_too_long_things_travel_in_their_message(arena: TokenArena) -> None:
    assert arena.place(bytes(PLACED_BYTES_MIN - 1), 1, 0) == NOWHERE
    assert arena.place(bytes(64 * 1024 + 1), 2, 0) == NOWHERE
    assert arena.place(bytes(64 * 1024), 3, 0)[1] == 64 * 1024


def test_a_full_arena_has_room_again_once_its_messages_are_acknowledged(arena: TokenArena) -> None:
    for seq in (1, 2, 3, 4):
        assert arena.place(bytes(16 * 1024), seq, 0) != NOWHERE
    assert arena.place(bytes(2048), 5, 0) == NOWHERE
    assert arena.place(bytes(2048), 6, 1) != NOWHERE


def test_more_of_it_is_used_where_what_waits_is_named_again_and_again() -> None:
    arena = TokenArena(4 * BEGUN_BYTES)
    waiting = [bytes(BEGUN_BYTES // 2) for _ in range(6)]
    for turn in range(3):
        for tokens in waiting:
            arena.place(tokens, turn + 1, turn)
    places = [arena.place(tokens, 4, 3) for tokens in waiting]
    assert [arena.place(tokens, 9, 8) for tokens in waiting] == places
    arena.close()
