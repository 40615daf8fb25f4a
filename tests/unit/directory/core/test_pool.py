"""What a pool's owner does to the tree: insert with duplicates, eviction to the page, reports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from directory.core.actions import Inserted, Refused
from directory.core.events import Evicted, Insert, Mode
from directory.core.tokens import pack_pages, pack_tokens, unpack_pages
from tests.unit.directory.core.world import KEY, Scheduler, World


def insert(tokens: Sequence[int], pages: Sequence[int], span: int = 1) -> Insert:
    return Insert("r", 1, KEY, pack_tokens(tokens), pack_pages(pages), span, 0, (0, 0))


def code(answer: object) -> str:
    assert isinstance(answer, Refused), answer
    return answer.code


@pytest.mark.parametrize("mode", ["thin", "mirrored"])
def test_the_second_insert_of_a_path_in_one_pool_frees_its_own_pages_only_f13(mode: Mode) -> None:
    world = World()
    a, b = Scheduler(world, "a", mode), Scheduler(world, "b", mode)
    first = a.publish([1, 2, 3])
    second = a.publish([1, 2, 3, 4], fresh_all=True)
    assert first is not None
    assert second is not None
    assert second[0][:3] == first[0]
    assert len(second[1]) == 3
    assert not set(second[1]) & set(second[0])
    other = b.publish([1, 2, 3])
    assert other is not None
    assert other[1] == [], "another pool's pages are a second residency, nothing is freed"
    a.check()
    b.check()


def test_the_answer_names_canonical_and_duplicate_pages_f13() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.ask(insert([1, 2], [5, 6]))
    answer = a.ask(insert([1, 2, 3], [5, 9, 7], span=2))
    assert isinstance(answer, Inserted)
    assert unpack_pages(answer.canonical).tolist() == [5, 6, 7]
    assert unpack_pages(answer.duplicates).tolist() == [9]
    assert (answer.accepted_pages, answer.fresh_pages) == (3, 1)


@pytest.mark.parametrize(
    ("tokens", "pages", "span"),
    [
        ([1, 2], [5], 2),
        ([3, 4], [6, 6], 2),
        ([3], [32], 2),
        ([3], [5], 2),
        ([1, 3], [7, 7], 2),
        ([3], [6], 0),
        ([3], [6], 1),
        ([3], [6], 33),
    ],
)
def test_an_insert_that_cannot_be_true_changes_nothing(
    tokens: list[int], pages: list[int], span: int
) -> None:
    world = World()
    a = Scheduler(world, "a", pages=32)
    a.ask(insert([1], [5]))
    assert code(a.ask(insert(tokens, pages, span))) == "bad_message"
    assert set(world.directory.pools[a.pool].owned) == {5}


def test_an_insert_of_nothing_leaves_no_namespace_behind() -> None:
    world = World()
    a = Scheduler(world, "a", page_size=4)
    assert isinstance(a.ask(insert([1, 2, 3], [])), Inserted)
    assert not world.directory.tree.spaces


@pytest.mark.parametrize("mode", ["thin", "mirrored"])
def test_eviction_is_exact_to_the_page_and_takes_the_coldest_tail_first(mode: Mode) -> None:
    world = World(host_pages=0)
    a = Scheduler(world, "a", mode)
    cold = a.publish([1, 2, 3, 4])
    warm = a.publish([1, 2, 8, 9])
    assert cold is not None
    assert warm is not None
    assert a.evict(1) == [cold[0][3]]
    assert sorted(a.evict(2)) == sorted([cold[0][2], warm[0][3]])
    assert a.own([1, 2, 8, 9]) == pack_pages(warm[0][:3])
    assert len(a.flush()) == 3
    assert a.totals() == (0, 0)


def test_a_report_of_given_up_runs_must_be_the_tails_that_were_reported() -> None:
    for runs in (
        ((9, 0, 1),),
        ((1, 0, 0),),
        ((1, 0, 1),),
        ((1, 1, 3),),
        ((1, 0, 9),),
        ((1, 1, 1), (1, 1, 1)),
    ):
        world = World()
        a = Scheduler(world, "a", "mirrored")
        a.ask(insert([1, 2], [0, 1]))
        a.ask(insert([1, 2, 3], [0, 1, 2], span=2))
        a.ask(Evicted(((2, 0, 1),), ((2, 1),)))
        assert code(a.ask(Evicted(runs, ()))) == "diverged"
        assert a.totals() == (0, 0) or not world.directory.pools[a.pool].owned


def test_a_page_above_others_is_not_the_end_of_a_path() -> None:
    world = World()
    a = Scheduler(world, "a", "mirrored")
    a.ask(insert([1, 2], [0, 1]))
    a.ask(insert([1, 2, 3], [0, 1, 2], span=2))
    assert code(a.ask(Evicted(((1, 1, 1),), ()))) == "diverged"


def test_a_report_that_contradicts_an_earlier_one_drops_the_pools_residency() -> None:
    world = World()
    a, b = Scheduler(world, "a", "mirrored"), Scheduler(world, "b")
    a.ask(insert([1, 2], [0, 1]))
    assert code(a.ask(insert([1, 2], [0, 7], span=2))) == "diverged"
    assert b.match([1, 2]).restorable_pages == 0
    assert a.ask(insert([1, 2], [0, 7])) is None
    assert b.match([1, 2]).restorable_pages == 2


def test_what_is_left_of_a_span_is_guarded_by_its_new_word() -> None:
    world = World()
    for name, mode in (("a", "thin"), ("b", "mirrored")):
        who = Scheduler(world, name, mode)  # type: ignore[arg-type]
        who.publish([1, 2, 3])
        who.evict(1)
        (span,) = world.directory.pools[who.pool].spans.values()
        assert span.value == 1 == next(iter(world.words[who.pool].values()))


def test_a_mirror_that_counts_other_fresh_pages_has_diverged_and_nothing_is_published() -> None:
    world = World()
    a = Scheduler(world, "a", "mirrored")
    assert a.ask(replace(insert([1, 2], [5, 6]), fresh_pages=2)) is None
    assert a.ask(replace(insert([1, 2], [5, 6]), fresh_pages=0)) is None
    assert a.ask(replace(insert([1, 2, 3], [5, 6, 7], 2), fresh_pages=1)) is None
    assert a.ask(insert([1, 2, 3, 4], [5, 6, 7, 8], 3)) is None
    for said in (0, 2, -2):
        again = a.ask(replace(insert([1, 9], [5, 9], 4), fresh_pages=said))
        assert code(again) == "diverged"
        assert set(a.state.owned) == set(), "the owner republishes"
        a.ask(insert([1, 2], [5, 6]))


def test_a_thin_pool_is_told_what_is_fresh_and_does_not_say_it() -> None:
    world = World()
    a = Scheduler(world, "a")
    assert code(a.ask(replace(insert([1, 2], [5, 6]), fresh_pages=2))) == "wrong_mode"
    assert set(a.state.owned) == set()
