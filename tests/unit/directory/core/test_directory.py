"""The Directory's answers to clients: modes, limits, matches, counters."""

from __future__ import annotations

import msgspec
import pytest

from directory.core import limits
from directory.core.actions import Counters, Done, GaveUp, Matched, Refused
from directory.core.events import Body, Evict, Evicted, Flush, Insert, Lock, Match, Restore, Stats
from directory.core.ids import HOST
from directory.core.tokens import pack_pages
from tests.unit.directory.core.world import KEY, Scheduler, World


@pytest.mark.parametrize(
    ("mode", "body"),
    [
        ("mirrored", Lock("r", 1, 1)),
        ("mirrored", Evict(1)),
        ("thin", Evicted((), ())),
    ],
)
def test_a_question_of_the_other_mode_is_refused(mode: str, body: Body) -> None:
    world = World()
    who = Scheduler(world, "a", mode)  # type: ignore[arg-type]
    answer = who.ask(body)
    assert isinstance(answer, Refused)
    assert answer.code == "wrong_mode"


@pytest.mark.parametrize(
    "body",
    [
        Match("r" * (limits.REQUEST_CHARS_MAX + 1), 1, KEY, b""),
        Match("r", 1, KEY, bytes(limits.TOKENS_BYTES_MAX + 4)),
        Insert("r", 1, KEY, b"", bytes(limits.PAGES_BYTES_MAX + 4), 1, 0, (0, 0)),
        Restore("r", 1, 1, 0, bytes(limits.PAGES_BYTES_MAX + 4), (0, 0)),
    ],
)
def test_what_is_too_large_is_refused(body: Body) -> None:
    answer = Scheduler(World(), "a").ask(body)
    assert isinstance(answer, Refused)
    assert answer.code == "too_large"


@pytest.mark.parametrize("mode", ["thin", "mirrored"])
@pytest.mark.parametrize(("unit_bytes", "page_size"), [(4, 1), (8, 1), (4, 2)])
def test_a_prompt_of_too_many_pages_is_refused_at_match_and_insert_alike(
    mode: str, unit_bytes: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PROMPT_PAGES_MAX", 3)
    who = Scheduler(World(), "a", mode, page_size=page_size)  # type: ignore[arg-type]
    key = KEY if unit_bytes == 4 else msgspec.structs.replace(KEY, wide=True)
    tokens = bytes(4 * unit_bytes * page_size)
    answers = [
        who.ask(Match("r", 1, key, tokens)),
        who.ask(Insert("r", 1, key, tokens, pack_pages([0, 1, 2, 3]), 1, 0, (0, 0))),
        who.ask(Insert("r", 1, key, tokens, bytes(limits.PAGES_BYTES_MAX + 4), 1, 0, (0, 0))),
    ]
    for answer in answers:
        assert isinstance(answer, Refused)
        assert answer == Refused("too_large", answer.message)
        assert "a prompt of 4 pages, at most 3" in answer.message
    shorter = tokens[:-4]  # a partial page does not count
    assert isinstance(who.ask(Match("r", 1, key, shorter)), Matched)
    assert not isinstance(
        who.ask(Insert("r", 1, key, shorter, pack_pages([0, 1, 2]), 1, 0, (0, 0))), Refused
    )


def test_the_longest_prompt_is_matched_and_one_page_more_is_not() -> None:
    who = Scheduler(World(), "a")
    longest = bytes(4 * limits.PROMPT_PAGES_MAX)
    assert isinstance(who.ask(Match("r", 1, KEY, longest)), Matched)
    more = who.ask(Match("r", 1, KEY, longest + bytes(4)))
    assert isinstance(more, Refused)
    assert more.code == "too_large"


def test_an_eviction_names_no_more_pages_than_a_message_carries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "GAVE_UP_PAGES_MAX", 3)
    a = Scheduler(World(), "a")
    a.publish(range(8))
    first, rest = a.evict(7), a.evict(2)
    assert (first, rest) == ([7, 6, 5], [4, 3])
    a.check()


def test_a_thin_flush_in_portions_ends_with_nothing_evictable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "GAVE_UP_PAGES_MAX", 3)
    a = Scheduler(World(), "a")
    a.publish(range(8))
    portions = []
    while a.totals()[0]:
        portions.append(len(a.flush()))
    assert portions == [3, 3, 2]
    a.check()


def test_a_mirrored_flush_is_not_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GAVE_UP_PAGES_MAX", 3)
    a = Scheduler(World(), "a", "mirrored")
    a.publish(range(8))
    assert isinstance(a.ask(Flush("pool", 1)), Done)
    assert set(a.state.owned) == set()


@pytest.mark.parametrize("pages", [0, -1, 33])
def test_an_eviction_of_an_impossible_count_is_refused(pages: int) -> None:
    answer = Scheduler(World(), "a", pages=32).ask(Evict(pages))
    assert isinstance(answer, Refused)
    assert answer.code == "bad_message"


def test_a_message_of_an_unknown_pool_is_told_to_register() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.pool = 99
    answer = a.ask(Stats())
    assert isinstance(answer, Refused)
    assert answer.code == "unknown_pool"


def test_a_match_in_an_unknown_namespace_is_a_plain_miss() -> None:
    a = Scheduler(World(), "a")
    got = a.match([1, 2])
    assert (got.own_pages, got.restorable_pages, got.node, got.receipt) == (0, 0, 0, 0)


def test_a_miss_gives_no_receipt() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1])
    assert a.match([2]).receipt == 0
    assert a.match([1], acquire=False).receipt == 0


def test_an_acquired_match_holds_the_host_slots_it_promised() -> None:
    world = World(host_pages=2, segment_pages=2)
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    world.finish_all()
    a.flush()
    got = b.match([1, 2, 3])
    assert got.host_pages == 2
    a.publish([7, 8])
    world.finish_all()
    assert b.match([1, 2]).host_pages == 2
    b.unlock(got.receipt)


def test_a_mirrored_pool_is_answered_only_what_lies_beyond_its_own_pages() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b", "mirrored")
    a.publish([1, 2, 3, 4])
    b.publish([1, 2])
    got = b.match([1, 2, 3, 4], own=2)
    assert (got.own_pages, got.own, got.restorable_pages, got.node) == (2, b"", 2, 0)


def test_a_thin_flush_says_which_words_to_bump() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2, 3])
    answer = a.ask(Flush("pool"))
    assert isinstance(answer, GaveUp)
    assert answer.words == ((1, 1, 3),)
    assert sorted(answer.pages) == sorted(pack_pages([0, 1, 2]))


def test_a_host_flush_frees_every_unleased_slot() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2, 3])
    world.finish_all()
    assert isinstance(a.ask(Flush("host")), Done)
    assert world.directory.host.pages == 0
    assert world.directory.tree.places[HOST].nodes == {}


def test_stats_count_and_check_on_demand() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2])
    plain, checked = a.ask(Stats()), a.ask(Stats(check=True))
    assert isinstance(plain, Counters)
    assert isinstance(checked, Counters)
    assert plain.counters["pages_inserted"] == 2
    assert plain.counters["copies_in_flight"] == 1
    assert checked.violations == ()
    world.checked = False
    world.directory.host.pages += 1
    broken = a.ask(Stats(check=True))
    assert isinstance(broken, Counters)
    assert len(broken.violations) == 1


def test_totals_travel_with_every_answer() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2, 3])
    got = a.match([1, 2])
    assert isinstance(got, Matched)
    assert (got.totals.evictable, got.totals.protected) == (1, 2)
