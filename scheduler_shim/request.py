"""One request of the reference scheduler: its tokens, its row of pages and where it stands.

Owns the data of a request's life, not its steps. The first `tree_pages` pages of a row belong to
the tree and are locked; the others are the request's own until they are published or freed.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING

from directory.core.ids import NO_LEASE, LeaseId
from directory.core.limits import PROMPT_PAGES_MAX, TOKENS_BYTES_MAX
from directory.core.namespace import NamespaceKey
from directory.core.node import Node
from scheduler_shim.content import page_digests
from scheduler_shim.worker_messages import Finished

if TYPE_CHECKING:
    from scheduler_shim.fills import Fill
    from scheduler_shim.own_tree import Found


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"  # holds nothing
    MATCHING = "matching"  # own pages are locked; what lies beyond is asked for
    RESTORING = "restoring"  # a mover writes into pages that it waits for
    ADMITTED = "admitted"  # nothing more is to be had; the rest is to be computed
    COMPUTING = "computing"  # the prompt is computed in part, and that part is published
    DECODING = "decoding"  # the prompt's pages are published, output pages are to be computed
    ENDED = "ended"  # holds nothing


class Request:
    """A request in progress; mutated by the scheduler and its tree side alone."""

    def __init__(
        self, number: int, name: str, key: NamespaceKey, prompt: bytes, output: bytes, page_key: int
    ) -> None:
        """`prompt`, `output`: packed tokens; `page_key`: bytes of packed tokens a page."""
        self.number = number
        self.name = name
        self.key = key
        self.tokens = prompt + output
        self.fill: Fill | None = None  # the restore that it waits for, its own or another's
        self.prompt_bytes = len(prompt)
        self.page_key = page_key
        self.phase = Phase.WAITING
        self.attempt = 0
        self.losses = 0
        self.row: array[int] = array("I")
        self.tree_pages = 0
        self.node: Node | None = None  # the mirror's lock
        self.found: Found | None = None  # what a mirror had of `match_tokens` the last time
        self.receipt: LeaseId = NO_LEASE  # the daemon's lease
        self.lease_attempt = 0  # the attempt that the lease was granted to
        self.seq = 0  # the question that it waits for
        self.hit_pages = 0  # pages at the row's start that need no computation
        self.host_pages = 0
        self.peer_pages = 0
        self.reach = 0  # up to which page the path could be had when that was last asked
        self.computed = 0  # pages of the row that hold what they must
        self.accepted_pages = 0  # pages of its path that were in the tree after its last insert
        self.checked: list[tuple[int, int]] = []  # ranges of the row that were read back
        self.verified = 0
        self.wrong = 0
        self.started_us = 0
        # For the report of its end (telling.py); all since it came or was told of last.
        self.told = False
        self.lookups = 0
        self.looked_us = 0  # when it was looked up first
        self.latency_us = 0  # until that was answered
        self.restore_us = 0  # from a restore's question to its landing
        self.restoring_us = 0  # when a restore was asked for
        self._digests: list[bytes] | None = None
        self._match_tokens: bytes | None = None

    def lease(self, receipt: LeaseId) -> None:
        """Hold a lease that was granted to the present attempt; an earlier one was let go."""
        self.receipt, self.lease_attempt = receipt, self.attempt

    @property
    def alive_as(self) -> tuple[tuple[str, int], ...]:
        """The names by which it is alive: its attempt, and the earlier one that has its lease."""
        if self.receipt == NO_LEASE or self.lease_attempt == self.attempt:
            return ((self.name, self.attempt),)
        return (self.name, self.attempt), (self.name, self.lease_attempt)

    @property
    def match_tokens(self) -> bytes:
        """What may be matched: whole pages of all but the prompt's last token.

        At least one token is always left to compute, because its logits are what is wanted. It is
        one object for as long as the request waits, so that its daemon is told it once.
        """
        if self._match_tokens is None:
            self._match_tokens = self.tokens[: self.match_pages * self.page_key]
        return self._match_tokens

    @property
    def match_pages(self) -> int:
        """Pages of `match_tokens`."""
        return (self.prompt_bytes - 1) // self.page_key

    def fits(self, pages: int) -> bool:
        """Whether the wire carries so much of the path; a report that it does not would cost the
        daemon."""
        return pages <= PROMPT_PAGES_MAX and pages * self.page_key <= TOKENS_BYTES_MAX

    @property
    def own_pages(self) -> int:
        """Pages that the own pool held, or that another request had restored."""
        return self.hit_pages - self.host_pages - self.peer_pages

    @property
    def unchecked(self) -> list[int]:
        """Places of the row that need no computation and were not read back yet."""
        done = {at for first, last in self.checked for at in range(first, last)}
        return [at for at in range(self.hit_pages) if at not in done]

    @property
    def has_output(self) -> bool:
        """Whether anything follows the prompt."""
        return len(self.tokens) > self.prompt_bytes

    @property
    def prompt_pages(self) -> int:
        """Whole pages of the prompt."""
        return self.prompt_bytes // self.page_key

    @property
    def full_pages(self) -> int:
        """Whole pages of prompt and output: what ends up in the tree."""
        return len(self.tokens) // self.page_key

    @property
    def all_pages(self) -> int:
        """Pages of prompt and output, a partial last one included."""
        return -(-len(self.tokens) // self.page_key)

    def digests(self, seed: bytes) -> list[bytes]:
        """One a page of prompt and output; `seed` is the namespace's."""
        if self._digests is None:
            self._digests = page_digests(seed, self.tokens, self.page_key)
        return self._digests

    def start_over(self) -> None:
        """Forget what an attempt brought; what it held was released."""
        self.phase = Phase.WAITING
        self.hit_pages = self.host_pages = self.peer_pages = 0
        self.checked.clear()
        self.reach = self.computed = self.accepted_pages = 0
        self.attempt += 1
        self.losses = 0

    def rekey(self, key: NamespaceKey) -> None:
        """Go on in another namespace; the request holds nothing."""
        self.key = key
        self.found = self._digests = None

    def finished(self, now_us: int, error: str = "") -> Finished:
        """The driver's record of the request."""
        return Finished(
            self.number,
            self.prompt_bytes // 4,
            self.own_pages,
            self.host_pages,
            self.peer_pages,
            self.verified,
            self.wrong,
            (now_us - self.started_us) / 1e6 if self.started_us else 0.0,
            error,
            self.accepted_pages * self.page_key // 4,
        )

    def __repr__(self) -> str:
        return (
            f"<Request {self.number} {self.phase.value}, {len(self.row)}/{self.all_pages} pages, "
            f"{self.tree_pages} in the tree>"
        )
