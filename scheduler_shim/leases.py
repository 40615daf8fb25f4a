"""The leases that a daemon has granted to one registration, as its client has seen them.

Owns who holds which receipt, so that the client knows when a list of live requests is worth
reporting and what it makes fall. It decides nothing: whether a lease is held is the daemon's
fact, and a receipt that is here may have been used up there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from directory.core.actions import AnyReply, Locked, Matched
from directory.core.events import Lock, Match, Request
from directory.core.ids import LeaseId
from scheduler_shim.questions import LiveRequest, asker

LEASING: Final = (Matched, Locked)
"""Answers that may bring a lease."""


class LeasesOut:
    """Leases that were granted and not released, or that may have been. Mutated by their client
    alone."""

    def __init__(self) -> None:
        self._owners: dict[LeaseId, LiveRequest] = {}
        self._unknown: dict[LiveRequest, None] = {}

    def granted(self, body: Request, reply: AnyReply) -> None:
        """A question was answered; the answer may bring a lease."""
        if isinstance(reply, LEASING) and reply.receipt:
            owner = asker(body)
            if owner is not None:
                self._owners[reply.receipt] = owner

    def unknown(self, body: Request) -> None:
        """A question was answered, and nobody will hear how: there may be a lease, whose receipt
        nobody knows."""
        owner = asker(body)
        if isinstance(body, Lock | Match) and owner is not None:
            self._unknown[owner] = None

    def may_hold(self, body: Request) -> bool:
        """Whether who asked this may hold a lease whose receipt nobody knows."""
        return asker(body) in self._unknown

    def released(self, receipt: LeaseId) -> None:
        """The release is on its way."""
        self._owners.pop(receipt, None)

    def listed(self, live: Collection[LiveRequest]) -> None:
        """A list of live requests is on its way: what it leaves out falls."""
        self._owners = {receipt: own for receipt, own in self._owners.items() if own in live}
        self._unknown = {own: None for own in self._unknown if own in live}

    def clear(self) -> None:
        """The registration is over, and all its leases with it."""
        self._owners.clear()
        self._unknown.clear()

    def __len__(self) -> int:
        return len(self._owners) + len(self._unknown)

    def __repr__(self) -> str:
        unknown = f", unknown {list(self._unknown)}" if self._unknown else ""
        return f"<LeasesOut {self._owners}{unknown}>"
