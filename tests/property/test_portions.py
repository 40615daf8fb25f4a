"""What a mirror gives up in several reports, and lists in several parts, is as if said at once.

Strategy: a real mirror with its words beside a directory that is told its reports one by one, with
messages made so small that nearly every eviction takes several. Between any two reports no page
that is given up may stand at the directory under the word as it is: a copy of it would count.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core import limits
from directory.core.actions import Answer, Done, Matched, Refused
from directory.core.directory import Directory
from directory.core.events import Asked, Body, Live, Match, PoolRegistered
from directory.core.namespace import NamespaceKey
from directory.core.place import PoolState
from directory.core.tokens import pack_pages, pack_tokens, unpack_pages
from scheduler_shim.mirror import PLACE, Mirror
from scheduler_shim.questions import live_parts
from scheduler_shim.spans import SpanTable
from tests.simulation.memory import SimWords
from tests.unit.directory.core.world import Scheduler, World

PAGES = 14
KEY = NamespaceKey()


class Told:
    """A mirror, and a directory that has heard some of its reports."""

    def __init__(self) -> None:
        self.words = SimWords(PAGES + 1)
        self.mirror = Mirror(
            SpanTable(self.words, PAGES),
            fingerprint=b"f",
            page_size=1,
            page_count=PAGES,
            page_bytes=8,
        )
        self.directory = Directory()
        self.directory.handle(PoolRegistered(1, 0, "a", b"f", 1, PAGES, 8, "mirrored"))
        self.free = list(range(PAGES))
        self._seq = 0

    @property
    def pool(self) -> PoolState:
        """As the directory knows it."""
        return self.directory.pools[1]

    def tell(self, body: Body) -> None:
        """One report; nothing of the mirror's may be refused."""
        self._seq += 1
        for action in self.directory.handle(Asked(1, self._seq, 0, body)):
            assert isinstance(action, Answer)
            assert isinstance(action.body, Done), action
        self.check_words()

    def check_words(self) -> None:
        """Every page that the directory has and the mirror gave up is guarded."""
        if self.words.read(0) != self.pool.word:
            return
        for node in self.pool.nodes.values():
            residency = node.places[1]
            pages = unpack_pages(residency.pages)
            at = 0
            for run in residency.runs:
                if self.words.read(run.span) == self.pool.spans[run.span].value:
                    assert set(pages[at : at + run.length]) <= set(self.mirror.pool.owned)
                at += run.length

    def insert(self, path: list[int]) -> None:
        """Publish a path, with pages that are free where it needs any."""
        tokens = pack_tokens(path)
        hit = self.mirror.match(KEY, tokens)
        own = unpack_pages(hit.pages).tolist()
        if len(self.free) < len(path) - len(own):
            return
        own += [self.free.pop() for _ in range(len(path) - len(own))]
        self.tell(self.mirror.insert("r", 0, KEY, tokens, pack_pages(own), (0, 0)).report)

    def give_up(self, count: int) -> int:
        """Evict, or with 0 flush; returns how many reports it took."""
        given = self.mirror.evict(count) if count else self.mirror.flush()
        for report in given.reports:
            self.check_words()
            self.tell(report)
        self.free += unpack_pages(given.pages)
        return len(given.reports)

    def agree(self) -> None:
        """Mirror and directory have the same."""
        assert self.pool.owned == self.mirror.pool.owned
        here = {slot: span.value for slot, span in self.mirror.pool.spans.items()}
        assert {slot: span.value for slot, span in self.pool.spans.items()} == here
        assert self.mirror.check() == self.directory.check() == []


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32), most=st.integers(1, 4))
def test_a_page_given_up_never_stands_under_its_present_word(seed: int, most: int) -> None:
    rng = random.Random(seed)
    told = Told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "GAVE_UP_PAGES_MAX", most)
        for _ in range(40):
            kind = rng.randrange(6)
            if kind < 3:
                told.insert([rng.randrange(3) for _ in range(rng.randrange(1, 7))])
            elif kind < 5:
                told.give_up(rng.randrange(1, PAGES))
            else:
                node = next(iter(told.mirror.pool.nodes.values()), None)
                if node is not None:
                    told.mirror.lock(node)
                told.give_up(0)
                if node is not None:
                    told.mirror.unlock(node)
            told.agree()
    assert told.mirror.pool.place == PLACE


def test_an_eviction_of_many_pages_takes_several_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GAVE_UP_PAGES_MAX", 2)
    told = Told()
    told.insert([1, 2, 3])
    told.insert([1, 2, 4, 5])
    assert told.give_up(5) == 3
    told.agree()


def held(world: World) -> set[tuple[str, int]]:
    """Whose leases are held."""
    return {(lease.owner.request, lease.owner.attempt) for lease in world.directory.leases}


@settings(max_examples=60)
@given(
    owners=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 2)), max_size=12),
    listed=st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers(0, 2)), max_size=12),
    most=st.integers(1, 4),
    later=st.integers(0, 11),
)
def test_a_list_in_parts_lets_the_same_leases_fall_as_one_message(
    owners: list[tuple[str, int]], listed: list[tuple[str, int]], most: int, later: int
) -> None:
    def run(parts: Iterable[Live]) -> set[tuple[str, int]]:
        world = World()
        a, b = Scheduler(world, "a", "mirrored"), Scheduler(world, "b")
        b.publish([1, 2])
        for request, attempt in owners:
            assert isinstance(a.ask(Match(request, attempt, KEY, a.pack([1, 2]))), Matched)
        for at, part in enumerate(parts):
            assert not isinstance(a.ask(part), Refused)
            if at == later and not part.last:
                # Granted while the list is on its way: it says nothing about this one.
                a.ask(Match("new", 0, KEY, a.pack([1, 2])))
        assert world.directory.check() == []
        return held(world) - {("new", 0)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LIVE_REQUESTS_MAX", most)
        parts = list(live_parts(listed))
        assert len(parts) == max(1, -(-len(listed) // most))
        in_parts = run(parts)
    assert in_parts == run([Live(tuple(listed))]) == set(owners) & set(listed)
