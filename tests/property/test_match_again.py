"""A prompt that is matched again has the same answer as one that is compared from its first token.

Strategy: two worlds have the same history. In one a request hands over the same object every time
it is matched, as a lane does for what has a number; in the other an equal one that is new, so that
nothing is ever remembered. Every event, answer, lease and copy must be the same, and so must be who
falls in the pools and in the host tier, both of which are too small: whatever happens between two
matches, nothing stale can come back, and the orders of eviction know of no difference.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core import again
from directory.core.actions import Matched
from directory.core.events import Flush
from directory.core.namespace import NamespaceKey
from tests.unit.directory.core.world import KEY, Scheduler, World

KEYS = (KEY, NamespaceKey(cache_salt="s"))
STEPS = 60


class Handing(Scheduler):
    """A thin scheduler that hands the same object over for the same tokens, or never does."""

    same = True

    def pack(self, tokens: Sequence[int], key: NamespaceKey = KEY) -> bytes:
        """Also in another namespace it is the same object."""
        handed: dict[tuple[int, ...], bytes] = self.__dict__.setdefault("handed", {})
        packed = super().pack(tokens, key)
        return handed.setdefault(tuple(tokens), packed) if self.same else packed


class Fresh(Handing):
    """The one that never does."""

    same = False


class Half:
    """One of the two worlds: two schedulers, and what they hold."""

    def __init__(self, kind: type[Handing], seed: int, bytes_max: int) -> None:
        self.draw = random.Random(seed)
        self.kind = kind
        self.bytes_max = bytes_max
        self.world = World(host_pages=10, segment_pages=2)
        self.found = 0
        self.schedulers = [self.register(0), self.register(1)]
        draw = self.draw
        self.prompts = [[draw.randrange(2) for _ in range(draw.randrange(1, 9))] for _ in "123456"]
        self.leases: list[tuple[Handing, int]] = []
        self.last: tuple[int, NamespaceKey, list[int]] = (0, KEY, self.prompts[0])

    def register(self, at: int) -> Handing:
        """A scheduler comes."""
        scheduler = self.kind(self.world, f"s{at}", pages=12)
        pool = self.world.directory.pools[scheduler.pool]
        pool.again = again.Again(self.bytes_max)
        return scheduler

    def step(self) -> None:
        """One thing happens, drawn from the seed."""
        draw = self.draw
        what, at = draw.randrange(28), draw.randrange(2)
        key, tokens = draw.choice(KEYS), draw.choice(self.prompts)[: draw.choice((8, 8, 8, 3))]
        if what < 15 and draw.random() < 0.6:
            at, key, tokens = self.last
        scheduler = self.schedulers[at]
        if what < 15:
            self.last = at, key, tokens
            packed = scheduler.pack(tokens, key)
            pool = self.world.directory.pools[scheduler.pool]
            space = self.world.directory.tree.find_space(pool.fingerprint, key)
            known = space is not None and pool.again.find(packed, space.root.space) is not None
            self.found += known
            answer = scheduler.match(tokens, key=key, acquire=draw.random() < 0.5)
            if answer.receipt:
                self.leases.append((scheduler, answer.receipt))
        elif what < 20:
            scheduler.publish(tokens, key=key)
        elif what < 22:
            scheduler.evict(draw.randrange(1, 5))
        elif what < 24 and self.leases:
            owner, receipt = self.leases.pop(draw.randrange(len(self.leases)))
            assert owner.unlock(receipt) is None
        elif what < 26 and self.world.copies:
            self.world.finish(next(iter(self.world.copies)), draw.choice(("ok", "ok", "failed")))
        elif what == 26:
            scheduler.ask(Flush("host"))
        elif what == 27 and draw.random() < 0.3:
            self.leases = [lease for lease in self.leases if lease[0] is not scheduler]
            self.world.close(scheduler.pool)
            self.world.finish_all()
            self.schedulers[at] = self.register(at)


@pytest.mark.timeout(600)
@settings(deadline=None)
@given(seed=st.integers(0, 1 << 32), bytes_max=st.sampled_from((0, 40, 1 << 20)))
def test_a_prompt_that_is_matched_again_is_as_one_that_is_compared(
    seed: int, bytes_max: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again, "AGAIN_BYTES_MIN", 1)
        halves = [Half(kind, seed, bytes_max) for kind in (Handing, Fresh)]
        for _ in range(STEPS):
            for half in halves:
                half.step()
            handing, fresh = (half.world for half in halves)
            assert handing.log == fresh.log
            assert handing.directory.figures() == fresh.directory.figures()
            assert last_used(handing) == last_used(fresh)
        assert halves[1].found == 0, "an equal prompt is not the same one"
        for half in halves:
            for scheduler in half.schedulers:
                kept = half.world.directory.pools[scheduler.pool].again
                assert kept._nbytes == sum(len(one.tokens) for one in kept._found.values())
                assert kept._nbytes <= bytes_max


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_what_was_noted_of_a_path_is_what_it_has_for_as_long_as_it_counts(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again, "AGAIN_BYTES_MIN", 1)
        half = Half(Handing, seed, 1 << 20)
        for _ in range(STEPS):
            half.step()
            for scheduler in half.schedulers:
                pool = half.world.directory.pools[scheduler.pool]
                for one in pool.again._found.values():
                    if one.version == one.node.space.version and one.own is not None:
                        assert noted(one, pool.place) == noted(
                            copy.copy(one), pool.place, anew=True
                        )


def last_used(world: World) -> list[tuple[int, int, int]]:
    """When each node's pages were used last, by place."""
    nodes = world.directory.tree.nodes.values()
    return [(node.id, place, at.tick) for node in nodes for place, at in node.places.items()]


def noted(found: again.Found, place: int, *, anew: bool = False) -> list[object]:
    """Which residencies of a path are marked when it is used, and where the host's part ends."""
    if anew:
        found.own, found.host, found.at_host = None, [], None
    own = found.noted(place)
    return [*map(id, own), *map(id, found.host), found.at_host and found.at_host.id]


def test_most_of_what_is_matched_again_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "AGAIN_BYTES_MIN", 1)
    half = Half(Handing, 1, 1 << 20)
    for _ in range(2_000):
        half.step()
    assert half.found > 200


def test_nothing_is_compared_where_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "AGAIN_BYTES_MIN", 1)
    world = World()
    a, b = Handing(world, "a"), Handing(world, "b")
    a.publish([1, 2])
    a.publish([1, 2, 3, 4])
    world.finish_all()
    first = a.match([1, 2, 3, 4])
    again_ = a.match([1, 2, 3, 4])
    assert again_.own is first.own, "the answer of before"
    b.publish([1, 2, 3, 4])
    other: Matched = a.match([1, 2, 3, 4])
    assert other.own == first.own
    assert other.own is not first.own, "another pool has it now, so it was looked up"


def test_a_short_prompt_and_one_that_lies_beyond_are_not_kept() -> None:
    world = World()
    a, b = Handing(world, "a"), Handing(world, "b", pages=400)
    a.publish([1, 2, 3])
    a.match([1, 2, 3])
    long = list(range(300))
    b.publish(long[:290])
    world.finish_all()
    assert a.match(long).peer_pages == 290
    pool = world.directory.pools[a.pool]
    assert len(pool.again) == 0, "one comes anew each time, of the other no page is a's"
