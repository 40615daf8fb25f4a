"""Adding up requests: totals, and the same over time. The definitions of every ratio.

Owns the arithmetic; docs/analytics.md has the definitions in words. Counters only ever grow, and a
ratio is always a quotient of two sums over the same requests, so that it lies between 0 and 1
whatever was restarted in between. Retries, probes and recomputations are counted beside, never in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from directory.analytics.record import Access

BUCKETS_MAX: Final = 120
BUCKET_US_MIN: Final = 1_000_000


class HitTokens(msgspec.Struct):
    """Prompt tokens that were not computed, by source. simulated: what the cache assumed for a
    trace would have had; a log has none of it."""

    own: int = 0
    host: int = 0
    peer: int = 0
    store: int = 0
    simulated: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.own + self.host + self.peer + self.store + self.simulated


SOURCES: Final = HitTokens.__struct_fields__


class Totals(msgspec.Struct):
    """Sums over requests that count."""

    requests: int = 0
    prompt_tokens: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    hit_tokens: HitTokens = msgspec.field(default_factory=HitTokens)

    def add(self, access: Access, hit_blocks: int, simulated: int = 0) -> None:
        """Count a request in. hit_blocks: whole pages in its hit prefix."""
        self.requests += 1
        self.prompt_tokens += access.tokens
        self.blocks += access.blocks
        self.hit_blocks += hit_blocks
        hit, tokens = access.hit, self.hit_tokens
        tokens.own += hit.own
        tokens.host += hit.host
        tokens.peer += hit.peer
        tokens.store += hit.store
        tokens.simulated += simulated

    def merge(self, other: Totals) -> None:
        """Count everything of another one in."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.blocks += other.blocks
        self.hit_blocks += other.hit_blocks
        for source in SOURCES:
            more = getattr(other.hit_tokens, source)
            setattr(self.hit_tokens, source, getattr(self.hit_tokens, source) + more)

    @property
    def missed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.hit_tokens.total

    @property
    def block_hit_ratio(self) -> float:
        """Whole blocks in hit prefixes / blocks, partial last ones included; 0 without any."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """Hit tokens / prompt tokens; 0 without any."""
        return self.hit_tokens.total / self.prompt_tokens if self.prompt_tokens else 0.0


class Beside(msgspec.Struct):
    """What happened and is no query: shown, and in no ratio. lookups: raw ones, of everything."""

    lookups: int = 0
    retries: int = 0
    recomputations: int = 0
    probes: int = 0


class Timeline:
    """Totals over equal stretches of time; stretches double when there are too many of them."""

    def __init__(self, buckets_max: int = BUCKETS_MAX, width_us: int = BUCKET_US_MIN) -> None:
        self.width_us = width_us
        self._buckets_max = buckets_max
        self._buckets: dict[int, Totals] = {}

    def add(self, access: Access, hit_blocks: int, simulated: int = 0) -> None:
        """Count a request in at its time."""
        self._room_for(access.at_us)
        index = access.at_us // self.width_us
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = Totals()
        bucket.add(access, hit_blocks, simulated)

    def __iter__(self) -> Iterator[tuple[int, Totals]]:
        """(first microsecond, totals) in order of time, the empty ones in between included."""
        if not self._buckets:
            return
        for index in range(min(self._buckets), max(self._buckets) + 1):
            yield index * self.width_us, self._buckets.get(index) or Totals()

    def _room_for(self, at_us: int) -> None:
        index = at_us // self.width_us
        while self._buckets and (
            max(index, *self._buckets) - min(index, *self._buckets) >= self._buckets_max
        ):
            self.width_us *= 2
            index = at_us // self.width_us
            merged: dict[int, Totals] = {}
            for old, totals in self._buckets.items():
                if old // 2 in merged:
                    merged[old // 2].merge(totals)
                else:
                    merged[old // 2] = totals
            self._buckets = merged
