"""A match that goes on from the last one finds what a match from the root on finds.

Strategy: two mirrors have the same history. One is told with every match what the same tokens had
the last time, the other one never. Pages, locks, what falls at an eviction and all recounts must be
the same, whatever happened between two matches of a prompt: so neither a stale node nor a page that
has gone can come back, and the order of eviction knows of no difference.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core.namespace import NamespaceKey
from directory.core.node import Node
from directory.core.tokens import pack_pages, pack_tokens
from scheduler_shim.mirror import Mirror, OwnHit
from scheduler_shim.spans import SpanTable
from tests.simulation.memory import SimWords

PAGES = 24
KEYS = (NamespaceKey(), NamespaceKey(cache_salt="s"))


class Twin:
    """A mirror with its free pages and what it holds of each request's last match."""

    def __init__(self, *, remembers: bool) -> None:
        words = SimWords(PAGES + 1)
        self.mirror = Mirror(
            SpanTable(words, PAGES), fingerprint=b"f", page_size=1, page_count=PAGES, page_bytes=1
        )
        self.free = list(range(PAGES))
        self.locked: list[Node] = []
        self._remembers = remembers
        self._last: dict[tuple[NamespaceKey, bytes], OwnHit] = {}

    def match(self, key: NamespaceKey, tokens: bytes) -> OwnHit:
        """Look a prompt up, once more or for the first time."""
        before = self._last.get((key, tokens)) if self._remembers else None
        hit = self._last[key, tokens] = self.mirror.match(key, tokens, before)
        return hit

    def insert(self, key: NamespaceKey, tokens: bytes) -> None:
        """Publish a prompt, as far as there are pages for it."""
        hit = self.mirror.match(key, tokens)
        wanted = len(tokens) // 4 - hit.page_count
        if wanted > len(self.free):
            self.evict(wanted)
            return
        new, self.free = self.free[:wanted], self.free[wanted:]
        self.mirror.insert("r", 0, key, tokens, hit.pages + pack_pages(new), (1, 1))

    def evict(self, pages: int) -> bytes:
        """Give pages up."""
        given = self.mirror.evict(pages).pages
        self.free += memoryview(given).cast("I").tolist()
        return given

    def lock(self, key: NamespaceKey, tokens: bytes) -> None:
        """Protect what a prompt has."""
        node = self.match(key, tokens).node
        if node is not None:
            self.mirror.lock(node)
            self.locked.append(node)

    def unlock(self, at: int) -> None:
        """Protect something no more."""
        if self.locked:
            self.mirror.unlock(self.locked.pop(at % len(self.locked)))


def facts(twin: Twin) -> tuple[object, ...]:
    """What two mirrors must agree on."""
    return twin.mirror.totals, sorted(twin.free), twin.mirror.check()


@pytest.mark.timeout(600)
@settings(deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_match_that_goes_on_from_the_last_one_is_as_one_from_the_root(seed: int) -> None:
    draw = random.Random(seed)
    twins = Twin(remembers=True), Twin(remembers=False)
    prompts = [pack_tokens([draw.randrange(2) for _ in range(draw.randrange(9))]) for _ in "12345"]
    again = 0
    for _ in range(120):
        key, tokens = draw.choice(KEYS), draw.choice(prompts)
        what, at = draw.randrange(10), draw.randrange(8)
        if what < 5:
            one, other = (twin.match(key, tokens) for twin in twins)
            assert one[1:3] == other[1:3]
            again += one.node is not None
        elif what < 7:
            for twin in twins:
                twin.insert(key, tokens)
        elif what < 8:
            one_given, other_given = (twin.evict(at + 1) for twin in twins)
            assert one_given == other_given
        elif what < 9:
            for twin in twins:
                twin.lock(key, tokens)
        else:
            for twin in twins:
                twin.unlock(at)
        assert facts(twins[0]) == facts(twins[1])
        assert not facts(twins[0])[2]


def test_what_has_not_changed_is_the_same_object_and_what_has_is_not() -> None:
    twin = Twin(remembers=True)
    key, tokens = KEYS[0], pack_tokens([1, 2, 3, 4])
    twin.insert(key, tokens[:8])
    first = twin.match(key, tokens)
    assert twin.match(key, tokens) is first
    twin.insert(KEYS[1], tokens)
    assert twin.match(key, tokens) is first, "another namespace is another matter"
    twin.insert(key, tokens)
    longer = twin.match(key, tokens)
    assert (first.page_count, longer.page_count) == (2, 4)
    twin.evict(PAGES)
    assert twin.match(key, tokens).node is None
