"""Adding up what workers and the daemon counted, and judging it.

Owns the definitions of the ratios and of success. Pure arithmetic over worker messages: it must
never count anything that no process reported.

block_hit_ratio: whole trace blocks in the hit prefixes / blocks listed in the trace, a partial
last block included in the latter. token_hit_ratio: hit tokens / prompt tokens. A page is hit when
it was in the own pool or restored from the host tier or from another scheduler's pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from scheduler_shim.worker_messages import Finished, Summary

ERRORS_KEPT_MAX = 3


class HitTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that were not computed, by where their pages came from."""

    own: int = 0
    host: int = 0
    peer: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.own + self.host + self.peer


class Percentiles(msgspec.Struct, frozen=True):
    """Of round trips, microseconds; None when there was none."""

    p50: float | None = None
    p99: float | None = None


class Tally:
    """Sums over finished requests. Pages are of `page_size` tokens, blocks of `block_tokens`."""

    def __init__(self, page_size: int, block_tokens: int | None = None) -> None:
        self.page_size = page_size
        self.block_tokens = block_tokens or page_size
        self.requests = 0
        self.prompt_tokens = 0
        self.blocks = 0
        self.hit_blocks = 0
        self.own_pages = 0
        self.host_pages = 0
        self.peer_pages = 0
        self.verified = 0
        self.wrong = 0
        self.failed = 0
        self.errors: list[str] = []

    def add(self, done: Finished) -> None:
        """Count one finished request in; one that ended in an error is counted as failed."""
        self.requests += 1
        self.prompt_tokens += done.prompt_tokens
        self.blocks += -(-done.prompt_tokens // self.block_tokens)
        hit_pages = done.own_pages + done.host_pages + done.peer_pages
        self.hit_blocks += hit_pages * self.page_size // self.block_tokens
        self.own_pages += done.own_pages
        self.host_pages += done.host_pages
        self.peer_pages += done.peer_pages
        self.verified += done.verified
        self.wrong += done.wrong
        if done.error:
            self.failed += 1
            if len(self.errors) < ERRORS_KEPT_MAX:
                self.errors.append(f"request {done.number}: {done.error}")

    def merge(self, other: Tally) -> None:
        """Count everything of another tally of the same sizes in."""
        for name in (
            "requests", "prompt_tokens", "blocks", "hit_blocks", "own_pages", "host_pages",
            "peer_pages", "verified", "wrong", "failed",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.errors = (self.errors + other.errors)[:ERRORS_KEPT_MAX]

    @property
    def hit_pages(self) -> int:
        """Pages hit anywhere."""
        return self.own_pages + self.host_pages + self.peer_pages

    @property
    def hit_tokens(self) -> HitTokens:
        """Tokens of the pages that were hit."""
        size = self.page_size
        return HitTokens(self.own_pages * size, self.host_pages * size, self.peer_pages * size)

    @property
    def missed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.hit_tokens.total

    @property
    def block_hit_ratio(self) -> float:
        """See the module's docstring; 0 without blocks."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """See the module's docstring; 0 without tokens."""
        return self.hit_tokens.total / self.prompt_tokens if self.prompt_tokens else 0.0

    def __repr__(self) -> str:
        return f"<Tally {self.requests} requests, {self.hit_pages} pages hit, {self.wrong} wrong>"


class BytesMoved(msgspec.Struct, frozen=True):
    """Copies by kind; backups (pool to host) are the daemon's to count, for all pools at once."""

    host_to_pool: int
    pool_to_pool: int
    pool_to_host: int | None = None


class Outcome:
    """One run: a tally and a summary for each scheduler, in order, and wall seconds."""

    def __init__(
        self,
        tallies: Sequence[Tally],
        summaries: Sequence[Summary],
        seconds: float,
    ) -> None:
        self.tallies = tuple(tallies)
        self.summaries = tuple(summaries)
        self.seconds = seconds
        self.total = Tally(tallies[0].page_size, tallies[0].block_tokens)
        for tally in tallies:
            self.total.merge(tally)

    @property
    def daemon(self) -> dict[str, int]:
        """The daemon's counters at the end: those of the summary that was asked for last."""
        return self.summaries[-1].daemon

    @property
    def bytes_moved(self) -> BytesMoved:
        """Of all schedulers together."""
        return BytesMoved(
            sum(self.bytes_moved_by(number).host_to_pool for number in range(len(self.summaries))),
            sum(self.bytes_moved_by(number).pool_to_pool for number in range(len(self.summaries))),
            self.daemon.get("bytes_backed_up", 0),
        )

    def bytes_moved_by(self, number: int) -> BytesMoved:
        """Of one scheduler; a kind that never happened has no counter."""
        counters = self.summaries[number].counters
        return BytesMoved(
            counters.get("bytes_restored_host", 0), counters.get("bytes_restored_peer", 0)
        )

    @property
    def violations(self) -> list[str]:
        """Invariants that did not hold, each once."""
        return list(dict.fromkeys(v for summary in self.summaries for v in summary.violations))

    @property
    def rtt_us(self) -> Percentiles:
        """Round trips of all schedulers together."""
        return percentiles(sample for summary in self.summaries for sample in summary.rtt_us)

    def problems(self, requests: int) -> list[str]:
        """Why a run of `requests` requests was no success: one sentence each, none if it was."""
        total, found = self.total, []
        if total.wrong:
            found.append(f"{total.wrong} of {total.verified + total.wrong} pages held wrong bytes")
        unread = total.hit_pages - total.verified - total.wrong
        if unread > 0:
            found.append(f"{unread} of {total.hit_pages} pages hit were not read back and compared")
        if total.requests != requests:
            found.append(f"{total.requests} of {requests} requests finished")
        if total.failed:
            found.append(f"{total.failed} requests failed ({'; '.join(total.errors)})")
        if self.violations:
            found.append(f"{len(self.violations)} invariants do not hold: {self.violations[0]}")
        return found


def percentiles(samples: Iterable[float]) -> Percentiles:
    """Nearest-rank percentiles."""
    ordered = sorted(samples)
    if not ordered:
        return Percentiles()
    ranks = (max(1, math.ceil(len(ordered) * share)) for share in (0.50, 0.99))
    return Percentiles(*(round(ordered[rank - 1], 1) for rank in ranks))
